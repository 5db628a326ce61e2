"""Keeps a Ray cluster to those who may use it, by a folder of its own and a token.

Ray gives a job the address noted in its cluster's folder, by default one folder a host, so a second cluster there would
get the jobs of the first. Ray also lets every user write into that folder, uploaded code and sockets included: here it
lies in one that only its owner can enter.

A cluster that asks for the token runs code for those alone who have it. Ray reads it from RAY_AUTH_TOKEN, from the file
RAY_AUTH_TOKEN_PATH, or from ~/.ray/auth_token, in this order, and only where RAY_AUTH_MODE=token:
https://docs.ray.io/en/latest/ray-security/token-auth.html
"""

import contextlib
import hashlib
import os
import secrets
import shutil
import socket
import stat
from pathlib import Path

from jobs.specs.user_files import open_regular
from orchestrator.errors import UserError
from orchestrator.settings import Settings

_REACH_S = 5.0
_MODE = "RAY_AUTH_MODE"
_PATH = "RAY_AUTH_TOKEN_PATH"


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
    with contextlib.suppress(OSError):  # it is not there
        if _is_own(private) and not local_address(settings):
            shutil.rmtree(private, ignore_errors=True)


def local_address(settings: Settings) -> str | None:
    """The address of the cluster that `nsa up` started; None if there is none that answers."""
    private = _private_folder(settings)
    with contextlib.suppress(OSError):
        address = (private / "r" / "ray_current_cluster").read_text().strip()
        return address if _is_own(private) and listens(address) else None
    return None


def listens(address: str) -> bool:
    """Whether something listens at an address, "host:port"."""
    with contextlib.suppress(OSError, ValueError), connection(address):
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


def token_is_enabled() -> bool:
    """Whether a new cluster asks for the token: yes, unless RAY_AUTH_MODE says otherwise."""
    return os.environ.get(_MODE, "token").strip().lower() == "token"


def token_file() -> Path | None:
    """The file that the token is read from; None if it is in RAY_AUTH_TOKEN."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return None
    if named := os.environ.get(_PATH):
        return Path(named).absolute()
    try:
        return Path.home() / ".ray" / "auth_token"
    except RuntimeError:
        raise UserError(f"{_PATH}: is not set, and this user has no home; set it to a file of your own") from None


def token() -> str | None:
    """The token of this user's cluster; None if there is none. Raises UserError, OSError: it cannot be read."""
    if not token_is_enabled():
        return None
    path = token_file()
    return os.environ["RAY_AUTH_TOKEN"] if path is None else path.read_text().strip() if path.exists() else None


def send_token() -> None:
    """Send the token from this process, if there is one and RAY_AUTH_MODE is not set; call it before Ray is imported.

    Of itself Ray sends none to an address that it was given. A cluster that asks for none takes no notice of it.
    """
    with contextlib.suppress(UserError):
        path = token_file()
        if path is None or os.path.exists(path):
            os.environ.setdefault(_MODE, "token")


def environment_of_a_cluster() -> dict[str, str]:
    """The variables by which a new cluster and its jobs find the token, which is made if there is none yet.

    It is taken from other users' reach: `ray get-auth-token --generate` leaves it readable by all. Raises UserError: it
    cannot be made or read, is empty, or another user owns it.
    """
    if not token_is_enabled():
        return {}
    path = token_file()
    if path is None:
        return {_MODE: "token"}
    mistake = f"{_PATH}: '{path}':"
    try:
        if not os.path.exists(path):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(secrets.token_hex(32))
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            empty = not file.read().strip()
            if status.st_uid == os.geteuid() and status.st_mode & 0o077:
                os.fchmod(file.fileno(), 0o600)
    except OSError as err:
        raise UserError(f"{mistake} cannot be made or read ({err.strerror}); set it to a file of your own") from None
    if status.st_uid not in (os.geteuid(), 0):
        raise UserError(f"{mistake} another user owns this token; set it to a file of your own")
    if empty:
        raise UserError(f"{mistake} is empty; remove it, and `nsa up` writes a new token")
    return {_MODE: "token", _PATH: str(path)}


def token_problem() -> str | None:
    """The reason why others may know the token, or why it cannot be used; None if all is well or there is none."""
    with contextlib.suppress(OSError):
        path = token_file()
        if path is not None and path.stat().st_mode & 0o077:
            return f"{path}: other users can read this token"
    return None
