"""Results that a GPU still works on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def in_order(started: Iterable[Callable[[], T]], ahead: int) -> Iterator[T]:
    """Results in order; `ahead` more calls are started before one is waited for."""
    under_way: deque[Callable[[], T]] = deque()
    for wait in started:
        under_way.append(wait)
        if len(under_way) > ahead:
            yield under_way.popleft()()
    yield from (wait() for wait in under_way)


def on_its_way(x: Tensor) -> Callable[[], list[float]]:
    """Queue a copy of a few numbers to the host; returns a function that waits for this copy alone."""
    if not x.is_cuda:
        return x.tolist
    numbers = torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> list[float]:
        copied.synchronize()
        return numbers.tolist()

    return wait
