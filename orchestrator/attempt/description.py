"""Description of the process that measures a point: versions, hardware, effective values of environment variables."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any


def described(device: str, settings: Sequence[str]) -> dict[str, Any]:
    """This process's environment, with the effective values of `settings`; without these {} for a kind without torch.

    Args:
        device: PyTorch's name of the point's device.
        settings: names of environment variables.
    """
    found: dict[str, Any] = {}
    try:
        if settings:  # before anything else uses CUDA: the point's process is as it will be measured
            found["settings"] = importlib.import_module("jobs.hardware.variables").effective(settings)
        if (torch := sys.modules.get("torch")) is not None:
            found |= importlib.import_module("jobs.hardware.environment").environment(torch.device(device))
    except Exception as err:
        found["unknown"] = f"{type(err).__name__}: {err}"
    return found
