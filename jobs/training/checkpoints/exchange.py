"""Exchanges between ranks about checkpoints: on the host, beside the collectives of the training itself."""

from __future__ import annotations

import contextlib
import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import fsspec
import torch.distributed as dist

from jobs.training.checkpoints.folder import CheckpointError, filesystem_options

T = TypeVar("T")

_TIMEOUT = timedelta(days=1)  # the supervisor tells a stalled rank from a slow one
_PATIENCE_S = 10.0  # a network's file system may show a new file late
_LOOK_S = 0.5


class Exchange:
    """The ranks of a training; on one rank nothing is sent. Made and used by all ranks together.

    Attributes:
        group: process group with gloo; None in a process without process groups, which trains alone.
    """

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.rank = rank
        self.ranks = ranks
        group: Any = dist.new_group(backend="gloo", timeout=_TIMEOUT) if dist.is_initialized() else None
        self.group: dist.ProcessGroup | None = group

    def from_first(self, make: Callable[[], T]) -> T:
        """Value that the first rank makes. Its CheckpointError is raised on all ranks."""
        made: list[Any] = [None, None]
        if self.rank == 0:
            try:
                made = [make(), None]
            except CheckpointError as err:
                made = [None, str(err)]
        if self.group is not None:
            dist.broadcast_object_list(made, src=0, group=self.group)
        if made[1] is not None:
            raise CheckpointError(made[1])
        return made[0]

    def gathered(self, value: T) -> list[T]:
        """The values of all ranks, by rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value, group=self.group)
        return values


def check_reach(url: str, exchange: Exchange) -> None:
    """Check that every rank sees what the first one writes at the URL; they may run on several hosts.

    A store that cannot be written is not judged: then no checkpoint is saved, which is reported each time.

    Raises:
        CheckpointError: the folder is another one on some rank's host; on all ranks.
    """
    if exchange.ranks == 1:
        return
    fs: Any = fsspec.url_to_fs(url, **filesystem_options())[0]
    folder = str(fs._strip_protocol(url)).rstrip("/")
    mark, host = exchange.from_first(lambda: (_write_mark(fs, folder), socket.gethostname()))
    blind = exchange.gathered(None if mark is None or _sees(fs, mark) else socket.gethostname())
    if exchange.rank == 0 and mark is not None:
        with contextlib.suppress(Exception):
            fs.rm_file(mark)
    if (node := next(filter(None, blind), None)) is not None:
        raise CheckpointError(
            f"NSA_ARTIFACT_STORE: {url}: node {node} does not see what node {host} writes there; name a store that all "
            "nodes reach"
        )


def _write_mark(fs: Any, folder: str) -> str | None:
    """Path of a new file in the folder; None if it cannot be written."""
    mark = f"{folder}/.reach-{uuid.uuid4().hex}"
    try:
        fs.makedirs(folder, exist_ok=True)
        fs.pipe_file(mark, b"reach")
    except Exception:  # the packages of the schemes raise errors of their own
        return None
    return mark


def _sees(fs: Any, mark: str) -> bool:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        with contextlib.suppress(Exception):
            if fs.exists(mark):
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
