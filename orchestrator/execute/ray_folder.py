"""The folder of a local Ray cluster, where Ray notes the cluster's address.

Ray gives a job the address noted in its cluster's folder, by default one folder a host, so a second cluster there would
get the jobs of the first. Ray also lets every user write into that folder, uploaded code and sockets included: here it
lies in one that only its owner can enter.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import stat
from contextlib import suppress
from pathlib import Path

import psutil

from orchestrator.errors import UserError
from orchestrator.settings import Settings

_REACH_S = 5.0
_HEAD = "--gcs-address="
# How client and server of HTTP/2 begin (RFC 9113, 3.4). A channel of gRPC would do, but for its threads, which write
# tracebacks when it is left.
_FRAME, _SETTINGS = 9, b"\x04"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + _SETTINGS + bytes(5)


def folder_of_a_new_cluster(settings: Settings) -> Path:
    """The folder to start a cluster in; its parent is made, for this user alone.

    Raises:
        UserError: another user has taken its place, or it cannot be made.
    """
    private = _private_folder(settings)
    try:
        private.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_own(private):
            raise UserError(
                f"RAY_TMPDIR: '{private}': belongs to another user or is no folder; set it to a folder of your own"
            )
        private.chmod(0o700)
    except OSError as err:
        raise UserError(
            f"RAY_TMPDIR: '{private}': cannot be made ({err.strerror}); set it to a folder of your own"
        ) from None
    return private / "r"


def remove_folder(settings: Settings) -> None:
    """Remove what a cluster of `nsa up` left: sockets, logs, uploaded code. One that still answers keeps its folder."""
    private = _private_folder(settings)
    with suppress(OSError):  # it is not there
        if _is_own(private) and not local_address(settings):
            shutil.rmtree(private, ignore_errors=True)


def local_address(settings: Settings) -> str | None:
    """The address of the cluster that `nsa up` started; None if there is none that answers."""
    private = _private_folder(settings)
    try:
        if not _is_own(private):
            return None
        address = (private / "r" / "ray_current_cluster").read_text().strip()
    except OSError:
        return None
    return address if listens(address) else None


def own_address() -> str | None:
    """The address of the cluster whose node this user started last on this host; None if there is none.

    Ray's own search ("auto") also finds other users' clusters, which would get this user's token and code.
    """
    started: list[tuple[float, str]] = []
    for process in psutil.process_iter(["name", "uids", "cmdline", "create_time"]):
        info = process.info
        if info["name"] == "raylet" and info["uids"] and info["uids"].real == os.getuid():
            heads = [text.removeprefix(_HEAD) for text in info["cmdline"] or () if text.startswith(_HEAD)]
            started += [(info["create_time"], head) for head in heads]
    return max(started)[1] if started else None


def listens(address: str) -> bool:
    """Whether something listens at an address, "host:port"."""
    with suppress(OSError, ValueError):
        _connection(address).close()
        return True
    return False


def answers(address: str) -> bool:
    """Whether a gRPC server at an address, "host:port", answers, if only with its settings.

    A hanging one does not. Ray would wait for it, minutes long, and no signal would end that.
    """
    if os.environ.get("RAY_USE_TLS") == "1":  # its certificates are Ray's matter
        return listens(address)
    with suppress(OSError, ValueError), _connection(address) as server:
        server.sendall(_PREFACE)
        return server.recv(_FRAME)[3:4] == _SETTINGS
    return False


def _connection(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S)


def on_loopback_alone(address: str) -> bool:
    """Whether a cluster's address on loopback is the only one of this host where it listens."""
    host, _, port = address.rpartition(":")
    if host not in ("127.0.0.1", "localhost"):
        return False
    addresses = (one for interface in psutil.net_if_addrs().values() for one in interface)
    others = [one.address for one in addresses if one.family == socket.AF_INET and not one.address.startswith("127.")]
    return not any(listens(f"{other}:{port}") for other in others)


def _private_folder(settings: Settings) -> Path:
    """The folder of this NSA_HOME and user: short, as the paths of Ray's sockets must fit 107 characters."""
    home = hashlib.sha256(os.fsencode(settings.home.resolve()) + b"\0" + str(os.geteuid()).encode()).hexdigest()
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / f"nsa-ray-{home[:8]}"


def _is_own(folder: Path) -> bool:
    """Whether a folder, no link to one, belongs to this user. Raises OSError if it is not there."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
