"""Check that all ranks of a training see the same folder of checkpoints: they may run on several hosts."""

from __future__ import annotations

import contextlib
import socket
import time
import uuid
from typing import Any

import fsspec

from jobs.training.checkpoints.folder import CheckpointError, filesystem_options
from jobs.training.exchange import Exchange

_PATIENCE_S = 10.0  # a network's file system may show a new file late
_LOOK_S = 0.5


def check_reach(url: str, exchange: Exchange) -> None:
    """Check that every rank sees what the first one writes at the URL; called by all of them together.

    A store that cannot be written is not judged: then no checkpoint is saved, which is told each time.

    Raises:
        CheckpointError: the folder is another one on some rank's host; on all ranks.
    """
    if exchange.ranks == 1:
        return
    fs: Any = fsspec.url_to_fs(url, **filesystem_options())[0]
    folder = str(fs._strip_protocol(url)).rstrip("/")
    mark, host = exchange.from_first(lambda: (_written(fs, folder), socket.gethostname()))
    blind = exchange.gathered(None if mark is None or _seen(fs, mark) else socket.gethostname())
    if exchange.rank == 0 and mark is not None:
        with contextlib.suppress(Exception):
            fs.rm_file(mark)
    if (node := next(filter(None, blind), None)) is not None:
        raise CheckpointError(
            f"NSA_ARTIFACT_STORE: {url}: node {node} does not see what node {host} writes there; name a store that all "
            "nodes reach"
        )


def _written(fs: Any, folder: str) -> str | None:
    """Path of a new file in the folder; None if it cannot be written."""
    mark = f"{folder}/.reach-{uuid.uuid4().hex}"
    try:
        fs.makedirs(folder, exist_ok=True)
        fs.pipe_file(mark, b"reach")
    except Exception:  # the packages of the schemes raise errors of their own
        return None
    return mark


def _seen(fs: Any, mark: str) -> bool:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        with contextlib.suppress(Exception):
            if fs.exists(mark):
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
