"""The case of a training: its optimizer, the division of its steps over ranks, and the memory that each rank needs."""

import math
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from jobs.measure.call import ModelCase
from jobs.schema.training_plan import TrainingPlan
from jobs.specs.fields import Count
from jobs.specs.spec import Strict
from jobs.training.data.spec import DataSpec
from jobs.training.soak import SoakPlan

_COMPILED = 0.7  # of the memory predicted for eager passes: compiled ones took 11 to 25 % less on H100 and H200
ENDLESS = 2**62  # steps of a training that its time ends

Parallel = Literal["ddp", "replicate", "fsdp"]


@dataclass(frozen=True)
class Layout:
    """Division of a step over ranks and passes: batch = micro-batch × ranks / context_parallel × accumulation.

    The fields are those of `jobs.train.TrainingSpec`; `accumulation` are a rank's passes whose gradients make one step.
    """

    micro_batch: int
    ranks: int = 1
    accumulation: int = 1
    parallel: Parallel = "ddp"
    gradient_compression: Literal["bf16"] | None = None
    bucket_mb: float | None = None
    context_parallel: int = 1


class OptimizerSpec(Strict):
    """AdamW with a linear warm-up and a cosine decay."""

    learning_rate: float = Field(default=3e-3, gt=0, description="at the end of the warm-up")
    final_fraction: float = Field(default=0.1, ge=0, le=1, description="of the learning rate, at the last step")
    warmup_steps: int = Field(default=10, ge=0)
    weight_decay: float = Field(default=0.1, ge=0, description="of matrices; vectors are not decayed")
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    grad_clip: float = Field(default=1.0, gt=0, description="highest norm of all gradients together")


def check_warm_up(spec: OptimizerSpec, steps: int) -> None:
    """Raise ValueError, in the words of a spec's mistake, if the warm-up does not end before the last step."""
    if spec.warmup_steps >= steps:
        raise ValueError(
            f"optimizer.warmup_steps: {spec.warmup_steps}: must end before the last of the {steps} steps; use at most "
            f"{steps - 1}"
        )


def learning_rate(spec: OptimizerSpec, step: int, steps: int) -> float:
    """Learning rate of a step from 0: linear warm-up from near 0, a cosine decay to final_fraction up to step steps-1.

    Later ones keep the last rate.
    """
    if step < spec.warmup_steps:
        return spec.learning_rate * (step + 1) / spec.warmup_steps
    progress = min(1.0, (step - spec.warmup_steps) / max(1, steps - 1 - spec.warmup_steps))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return spec.learning_rate * (spec.final_fraction + (1 - spec.final_fraction) * cosine)


class CheckpointSpec(Strict):
    """Checkpoints in the artifact store, from which any later attempt of the point goes on."""

    every: Count = Field(description="steps between two checkpoints; the last step has one, too")
    keep_last: Count = Field(default=2, description="newest checkpoints that are kept")
    keep_best: bool | Count = Field(default=False, description="those of the lowest held-out loss, besides; true: 1")
    asynchronous: bool = Field(default=False, description="copy the state to the host's memory and write it meanwhile")


class TrainingCase(ModelCase):
    """A training by `jobs.training.loop`, of float32 weights; a `dtype` of bfloat16 means autocast."""

    AUTOCAST = True
    SIZES = ModelCase.SIZES[:-1]  # the vocabulary is the text's, also under a preset

    pass_: str = "train"
    steps: int  # of the learning rate's schedule, which end the training unless it is a soak
    compile: bool
    cuda_graphs: bool = False
    optimizer: OptimizerSpec
    layout: Layout
    soak: SoakPlan | None = None  # of a training that its time ends
    probe: bool = False  # whether the trained model is asked what it makes of its context

    @property
    def last_step(self) -> int:
        return self.steps if self.soak is None else ENDLESS

    @property
    def pass_batch(self) -> int:
        return self.layout.micro_batch

    def predicted_bytes(self) -> int | None:
        """Predicted peak memory of one rank; of a compiled training the bound that eager passes are. None without a
        prediction, as of sharded weights or sequences."""
        layout = self.layout
        divided = layout.context_parallel > 1 or (layout.ranks > 1 and layout.parallel == "fsdp")
        if divided or (estimate := self.estimate()) is None:
            return None
        # During the whole pass there are DDP's buckets, and beside them the gradients of earlier passes.
        kept = (layout.ranks > 1 and layout.parallel == "ddp") + (layout.accumulation > 1)
        return estimate.total + kept * estimate.parameters

    def least_bytes(self) -> int | None:
        needed, ranks = self.predicted_bytes(), 1 if self.device == "cuda" else self.layout.ranks  # that share a memory
        return None if needed is None else int(ranks * needed * (_COMPILED if self.compile else 1))


class TextCase(TrainingCase):
    """A training on text, which may have checkpoints and several ranks; `topology`: they look at their hosts."""

    data: DataSpec
    plan: TrainingPlan | None = None
    checkpoints: CheckpointSpec | None = None
    restarts: int = 0
    topology: bool = False


def divided(batch: int, ranks: int, micro_batch: int | None, together: int = 1) -> tuple[int, int]:
    """Micro-batch and accumulation of a batch; without a micro-batch each rank, or `together` of them, takes its part
    in one pass. Raises ValueError: the batch does not divide; the message shows the arithmetic and the nearest batches
    that do."""
    groups, of = ranks // together, f" / {together}" if together > 1 else ""
    unit = groups * (micro_batch or 1)
    if batch % unit:
        below, above = batch - batch % unit, batch - batch % unit + unit
        given = f"micro_batch {micro_batch}" if micro_batch else "a micro_batch"
        nearest = f"{below} or {above}" if below else f"{above}"
        raise ValueError(f"batch: {batch}: is not {given} × ranks {ranks}{of} × accumulation; use {nearest}")
    return (micro_batch, batch // unit) if micro_batch else (batch // groups, 1)
