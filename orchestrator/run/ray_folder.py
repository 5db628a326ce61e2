"""The folder of a local Ray cluster, where Ray notes the cluster's address.

Ray gives a job the address noted in its cluster's folder, by default one folder a host: a second cluster there would
get the jobs of the first.
"""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path

import psutil

from orchestrator.settings import Settings

_REACH_S = 5.0


def folder_of_a_new_cluster(settings: Settings) -> Path | None:
    """The folder to start a cluster in; None for Ray's own, if no other cluster of this host uses it."""
    return _folder(settings) if _used(_temporary() / "ray") else None


def local_address(settings: Settings) -> str | None:
    """The address of the cluster that `nsa up` started in a folder of its own; None if there is none that answers."""
    try:
        address = (_folder(settings) / "ray_current_cluster").read_text().strip()
    except OSError:
        return None
    return address if listens(address) else None


def listens(address: str) -> bool:
    """Whether something listens at an address, "host:port"."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except (OSError, ValueError):
        return False
    return True


def _folder(settings: Settings) -> Path:
    """The folder of the cluster of this NSA_HOME: short, as the paths of Ray's sockets must fit 107 characters."""
    home = hashlib.sha256(os.fsencode(settings.home.resolve())).hexdigest()
    return _temporary() / f"nsa-ray-{home[:8]}"


def _temporary() -> Path:
    """The folder that Ray makes its own in."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp")


def _used(folder: Path) -> bool:
    """Whether a cluster runs in a folder; its server tells, as Ray notes the address only after the cluster answers."""
    sessions = f"{folder}/session_"
    servers = (process.info for process in psutil.process_iter(["name", "cmdline"]))
    return any(
        sessions in argument for one in servers if one["name"] == "gcs_server" for argument in one["cmdline"] or ()
    )
