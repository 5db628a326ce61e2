"""Where a process keeps compiled kernels: on a disk of this host, in a folder that only its user can write.

Several hosts that compile into one folder of a network file system lose files to each other (EBUSY, ESTALE). PyTorch's
choice below /tmp can be made first by another user, whose code would run.
"""

import contextlib
import errno
import os
import stat
import tempfile
import traceback
from pathlib import Path

import psutil

VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "torchinductor", "TRITON_CACHE_DIR": "triton"}
_NETWORK = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "smbfs", "wekafs"}
)


def network_file_system(path: Path) -> str | None:
    """The type of the network file system that a path lies on, as "nfs4"; None on a disk of this host."""
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    path = path.resolve()
    system = next((mounts[parent] for parent in (path, *path.parents) if parent in mounts), "")
    return system if system in _NETWORK or system.startswith("fuse.") else None


def folders(fallback: Path) -> dict[str, str]:
    """The variables of the compilers' caches: as they are set, else in the user's cache, below /tmp, or `fallback`."""
    candidates = [Path(tempfile.gettempdir()) / f"nsa-bench-{os.geteuid()}"]
    with contextlib.suppress(RuntimeError):  # of a container's user without a home
        of_user = os.environ.get("XDG_CACHE_HOME", "")  # a relative one is to be ignored
        candidates.insert(0, Path(of_user if os.path.isabs(of_user) else Path.home() / ".cache") / "nsa-bench")
    local = (folder for folder in candidates if network_file_system(folder) is None)
    root = next(filter(_usable, local), fallback)
    return {name: os.environ.get(name) or str(root / folder) for name, folder in VARIABLES.items()}


def _usable(folder: Path) -> bool:
    """Make the folder; whether it is this user's, and nobody else can write to it."""
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.lstat()
        own = stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o022
        return own and os.access(folder, os.W_OK)  # a home may be mounted read-only
    return False


def lost_file(err: BaseException) -> str | None:
    """Fix for an exception of a cache on a network file system; None for any other."""
    caches = {name: folder for name in VARIABLES if (folder := os.environ.get(name))}
    if isinstance(err, OSError) and err.errno in (errno.EBUSY, errno.ESTALE):
        paths = [str(path) for path in (err.filename, err.filename2) if path is not None]
        if paths:
            ours = any(path.startswith(os.path.join(folder, "")) for path in paths for folder in caches.values())
        else:  # of an open file: whose code used it?
            modules = (str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(err.__traceback__))
            ours = any(module.startswith(("triton.", "torch._inductor.")) for module in modules)
        if ours:
            named = ", ".join(f"{name}={folder}" for name, folder in caches.items())
            return f"{err}: hosts share a folder of a network file system; if {named} is on one, unset it"
    cause = err.__cause__ or err.__context__
    return None if cause is None else lost_file(cause)
