"""The mode of a training, as axes of its points: figures of two modes are never one curve, pair or verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobs.schema.axes import Axis, Coordinate

_SWITCHES = ("compile", "cuda_graphs", "checkpointing")
MODE_AXES = (
    Axis("ranks", "whole", "ranks"),
    Axis("parallel", "text", "parallel"),
    Axis("micro_batch", "whole", "micro-batch"),
    *(Axis(name, "text", name.replace("_", " ")) for name in _SWITCHES),
    Axis("steps", "whole", "steps"),
)


def mode_of(config: Mapping[str, Any]) -> dict[str, Coordinate]:
    """Values of MODE_AXES of a training's configuration, as the journal has it.

    On one rank there are no `ranks` and `parallel`; a micro-batch is an axis where it is not the whole batch.
    """
    layout = config.get("layout") or config.get("ranks") or {}  # the latter in journals of before 0.2.0
    switches = {**config["model"], **config}
    mode: dict[str, Coordinate] = {name: "on" if switches.get(name) else "off" for name in _SWITCHES}
    mode["steps"] = config["steps"]
    if layout.get("ranks", 1) > 1:
        mode |= {"ranks": layout["ranks"], "parallel": layout["parallel"]}
    if (micro_batch := layout.get("micro_batch")) not in (None, config["batch"]):
        mode["micro_batch"] = micro_batch
    return mode
