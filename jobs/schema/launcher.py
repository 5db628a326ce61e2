"""Ranks: processes that do one job together; the interface to what starts them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Rank:
    """One of several ranks, as its own process gets it once all have formed torch.distributed's process group."""

    number: int  # from 0
    device: str  # PyTorch's name of its device
    post: Callable[[Any], None]  # sends a message, plain data, to the process that started the ranks
    stop: threading.Event  # set when the ranks are to end
    folder: Path  # for files that explain a stall; made by who writes one


@dataclass(eq=False)
class RanksEnded(Exception):  # noqa: N818  (an event)
    """Not every rank returned a result; all have ended."""

    died: Mapping[int, str]  # ends of ranks whose process died ("was killed by SIGKILL"), the first one first
    tails: Mapping[int, str]  # last lines that a rank wrote to stderr
    out_of_memory: Collection[int] = ()  # those among `died` that were killed because memory ran out


class Launcher(Protocol):
    """Starts the ranks of a point, on one host or several."""

    name: ClassVar[str]  # for the point's environment

    def run(
        self,
        ranks: int,
        device: str,
        main: Callable[[Rank], T],
        note: Callable[[Any], None],
        tell: Callable[[str], None],
        stop: threading.Event,
    ) -> list[T]:
        """Run `main`, which can be pickled, as each rank, and return the results by rank.

        Args:
            note: called with each message of a rank.
            tell: called about once a second, with the reason, while the ranks wait to be started.
            stop: once set, the ranks are asked to end.

        Raises:
            RanksEnded: a rank raised an exception or died, or the ranks were to end before they had begun.
        """
        ...
