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

from orchestrator.errors import UserError
from orchestrator.settings import Settings

_REACH_S = 5.0


def folder_of_a_new_cluster(settings: Settings) -> Path:
    """The folder to start a cluster in; its parent is made, for this user alone. Raises UserError."""
    private = _private_folder(settings)
    try:
        private.mkdir(mode=0o700, parents=True, exist_ok=True)
        problem = None if _is_own(private) else "belongs to another user or is no folder"
        if problem is None:
            private.chmod(0o700)
    except OSError as err:
        problem = f"cannot be made ({err.strerror})"
    if problem:
        raise UserError(f"RAY_TMPDIR: '{private}': {problem}; set it to a folder of your own")
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
    with suppress(OSError):
        address = (private / "r" / "ray_current_cluster").read_text().strip()
        return address if _is_own(private) and listens(address) else None
    return None


def listens(address: str) -> bool:
    """Whether something listens at an address, "host:port"."""
    with suppress(OSError, ValueError), connection(address):
        return True
    return False


def connection(address: str) -> socket.socket:
    """A connection to an address, "host:port". Raises OSError, ValueError."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S)


def _private_folder(settings: Settings) -> Path:
    """The folder of this NSA_HOME and user: short, as the paths of Ray's sockets must fit 107 characters."""
    home = hashlib.sha256(os.fsencode(settings.home.resolve()) + b"\0" + str(os.geteuid()).encode()).hexdigest()
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / f"nsa-ray-{home[:8]}"


def _is_own(folder: Path) -> bool:
    """Whether a folder, no link to one, belongs to this user. Raises OSError if it is not there."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
