"""Small values passed among the ranks of a training, on the host and beside its own collectives."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from jobs.training.checkpoints.folder import CheckpointError

T = TypeVar("T")

_TIMEOUT = timedelta(days=1)  # the supervisor tells a stalled rank from a slow one


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
