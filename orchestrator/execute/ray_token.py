"""Ray's token: a cluster that asks for it runs code for those alone who have it.

Ray reads it from RAY_AUTH_TOKEN, from the file RAY_AUTH_TOKEN_PATH, or from ~/.ray/auth_token, in this order, and only
where RAY_AUTH_MODE=token: https://docs.ray.io/en/latest/ray-security/token-auth.html
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from jobs.specs.user_files import open_regular
from orchestrator.errors import UserError

_MODE = "RAY_AUTH_MODE"
_PATH = "RAY_AUTH_TOKEN_PATH"


def is_enabled() -> bool:
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


def send_it() -> None:
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
    if not is_enabled():
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


def problem() -> str | None:
    """The reason why others may know the token, or why it cannot be used; None if all is well or there is none."""
    with contextlib.suppress(OSError):
        path = token_file()
        if path is not None and path.stat().st_mode & 0o077:
            return f"{path}: other users can read this token"
    return None
