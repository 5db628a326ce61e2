"""Choices of Triton's autotuner, which hold for the sizes that they were measured with."""

from __future__ import annotations

import gc
import sys


def forget_tuned_choices() -> None:
    """Have each kernel of this process that Triton has tuned, or read a choice for from disk, tuned at its next call.

    A choice is kept under a key that need not have the length and the batch, so that the small call of a check would
    else decide how a large one is computed. Triton's source has no function for it (triton/runtime/autotuner.py).
    """
    module = sys.modules.get("triton.runtime.autotuner")
    if module is None:
        return
    for found in gc.get_objects():
        if issubclass(type(found), module.Autotuner):
            found.cache.clear()
            found.cache_results = False
