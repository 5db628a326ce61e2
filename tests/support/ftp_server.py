"""An FTP server in a process of its own: an artifact store of another scheme than file://, on loopback."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_SERVER = """
import logging, sys
from pyftpdlib.authorizers import DummyAuthorizer
from pyftpdlib.handlers import FTPHandler
from pyftpdlib.servers import FTPServer
logging.basicConfig(level=logging.WARNING)
class Handler(FTPHandler):
    authorizer = DummyAuthorizer()
Handler.authorizer.add_anonymous(sys.argv[1], perm="elradfmw")
server = FTPServer(("127.0.0.1", 0), Handler)
print(server.address[1], flush=True)
server.serve_forever()
"""


@dataclass(frozen=True)
class FtpServer:
    """A running server: the URL of a store on it, the folder that it serves, its process."""

    url: str
    folder: Path
    process: subprocess.Popen[str]


@contextmanager
def ftp_server(folder: Path) -> Iterator[FtpServer]:
    """A server of `folder`, which anyone on this host may write."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-W", "ignore", "-c", _SERVER, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline())
        time.sleep(0.05)
        yield FtpServer(f"ftp://127.0.0.1:{port}/store", folder, process)
    finally:
        process.kill()
        process.wait()
