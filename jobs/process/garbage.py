"""The garbage collector, kept from what it would only slow down."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Look for no garbage within the block.

    For imports, which leave next to none: all their objects are looked at again and again, for a fifth of PyTorch's
    import and a quarter of its compiler's.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
