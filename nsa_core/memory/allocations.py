"""Counted allocations of PyTorch operations on `meta` tensors, which have shapes but no memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Bytes of all storages made within the context, each counted until nothing refers to it.

    Tensors saved by autograd count, because they refer to storages. An operation's own temporary memory does not.

    Args:
        granule: multiple, in bytes, that the allocator rounds sizes up to.

    Attributes:
        now: bytes live.
        peak: most bytes live since it was last set.
    """

    def __init__(self, granule: int = 1) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._granule = granule
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {storage._cdata for storage in _storages((args, kwargs))}  # views and results written in place
        for storage in _storages(result):
            if storage._cdata not in given and storage._cdata not in self._alive:
                self._watch(storage)
        return result

    def _watch(self, storage: Any) -> None:
        size = -(-storage.nbytes() // self._granule) * self._granule
        release = partial(self._release, storage._cdata, size)
        self._alive[storage._cdata] = weakref.ref(storage, release)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _release(self, key: int, size: int, _: object) -> None:
        del self._alive[key]
        self.now -= size


def _storages(tree: object) -> list[Any]:
    return [x.untyped_storage() for x in tree_leaves(tree) if isinstance(x, Tensor)]
