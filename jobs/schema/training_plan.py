"""A training's plan: the throughput it needs and the hours it takes; and its mode, as axes of its points."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from jobs.schema.axes import Axis, Coordinate

Amount = Annotated[int, Field(ge=1, le=2**40)]

# A stated throughput may be below the needed one by rounding only, else the plan ends late. It may be above it by some
# headroom; beyond that the two figures describe different plans.
_ROUNDING = 0.01
_HEADROOM = 0.15


class TrainingPlan(BaseModel):
    """Steps, tokens a step and hours. A stated throughput must agree with them."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)

    steps: Amount
    tokens_per_step: Amount
    hours: float = Field(gt=0)
    tokens_per_second: float | None = Field(default=None, gt=0, description="a stated target, checked against the rest")

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step

    @property
    def needed(self) -> float:
        """Throughput [tok/s] that finishes the plan in time."""
        return self.tokens / (self.hours * 3600)

    def hours_at(self, tokens_per_second: float) -> float:
        """Hours that the plan takes at this throughput [tok/s]."""
        return self.tokens / tokens_per_second / 3600

    @model_validator(mode="after")
    def _check_throughput(self) -> Self:
        stated, needed = self.tokens_per_second, self.needed
        if stated is not None and not (1 - _ROUNDING) * needed <= stated <= (1 + _HEADROOM) * needed:
            takes = self.hours_at(stated)
            raise ValueError(
                f"tokens_per_second: {stated:g} contradicts {self.steps:,} steps of {self.tokens_per_step:,} tokens in "
                f"{self.hours:g} h, which need {needed:,.0f} tok/s; at {stated:g} tok/s they take {takes:,.4g} h; "
                f"set tokens_per_second to {math.ceil(needed)}, or hours to {takes:.4g}"
            )
        return self


# Figures of two modes are never one curve, pair or verdict.
PACK = Axis("pack", "text", "documents packed")  # absent where they are not
CONTEXT = Axis("context_parallel", "whole", "ranks of a sequence")  # likewise
_SWITCHES = ("compile", "cuda_graphs", "checkpointing")
MODE_AXES = (
    Axis("ranks", "whole", "ranks"),
    Axis("parallel", "text", "parallel"),
    Axis("micro_batch", "whole", "micro-batch"),
    *(Axis(name, "text", name.replace("_", " ")) for name in _SWITCHES),
    Axis("steps", "whole", "steps"),
    PACK,
    CONTEXT,
)


def mode_of(config: Mapping[str, Any]) -> dict[str, Coordinate]:
    """Values of MODE_AXES of a training's configuration, as the journal has it.

    On one rank there are no `ranks` and `parallel`; a micro-batch is an axis where it is not the whole batch.
    """
    layout = config.get("layout") or config.get("ranks") or {}  # the latter in journals of before 0.2.0
    switches = {**config["model"], **config}
    mode: dict[str, Coordinate] = {name: "on" if switches.get(name) else "off" for name in _SWITCHES}
    mode["steps"] = config["steps"]
    if config.get("data", {}).get("pack"):
        mode[PACK.name] = "on"
    if layout.get("ranks", 1) > 1:
        mode |= {"ranks": layout["ranks"], "parallel": layout["parallel"]}
    if layout.get("context_parallel", 1) > 1:
        mode[CONTEXT.name] = layout["context_parallel"]
    if (micro_batch := layout.get("micro_batch")) not in (None, config["batch"]):
        mode["micro_batch"] = micro_batch
    return mode
