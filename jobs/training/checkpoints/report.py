"""The section of a spec on checkpoints, and a training's report of them; light, as all who read a spec import it."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import Field

from jobs.schema.quantities import Better, Quantity
from jobs.specs.fields import Count
from jobs.specs.spec import Strict

CHECKPOINT_WAIT = Quantity("checkpoint_wait", "ms", "Training waits for a checkpoint", better=Better.LOWER)
CHECKPOINT_TIME = Quantity("checkpoint_time", "ms", "Time until a checkpoint is complete", better=Better.LOWER)
CHECKPOINT_SIZE = Quantity("checkpoint_size", "MiB", "Size of a checkpoint", better=Better.LOWER)
CHECKPOINT_FAILURES = Quantity("checkpoint_failures", "1", "Checkpoints not saved", better=Better.LOWER)
RESUMED_STEP = Quantity("resumed_step", "1", "Step that training was last resumed from")
CHECKPOINTS = (CHECKPOINT_WAIT, CHECKPOINT_TIME, CHECKPOINT_SIZE, CHECKPOINT_FAILURES, RESUMED_STEP)


class CheckpointSpec(Strict):
    """Checkpoints in the artifact store, from which any later attempt of the point goes on."""

    every: Count = Field(description="steps between two checkpoints; the last step has one, too")
    keep_last: Count = Field(default=2, description="newest checkpoints that are kept")
    keep_best: bool | Count = Field(default=False, description="those of the lowest held-out loss, besides; true: 1")
    asynchronous: bool = Field(default=False, description="copy the state to the host's memory and write it meanwhile")


@dataclass
class CheckpointReport:
    """History of the checkpoints of one attempt, on its first rank."""

    folder: str  # their URL
    waits_ms: list[float] = field(default_factory=list)  # that the training waited for each one
    times_ms: list[float] = field(default_factory=list)  # until each was complete
    sizes: list[int] = field(default_factory=list)  # [bytes]
    kept: list[str] = field(default_factory=list)  # names of the complete ones
    failures: list[str] = field(default_factory=list)  # one line for each that could not be saved
    damaged: list[str] = field(default_factory=list)  # or loaded
