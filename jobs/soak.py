"""Soak: hours of training in pieces, each in a fresh process. Does memory grow, does throughput drift, does it last?

A point is one kind of attention. The training is that of `train` with checkpoints (jobs.training); the time ends it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from jobs import train
from jobs.schema.axes import Axis
from jobs.schema.point import STARTING, Beat, Machine, Measurement, Point
from jobs.training.checkpoints.report import CheckpointSpec
from jobs.training.errors import Suspended, noting_sigterm
from jobs.training.launch import run_ranks
from jobs.training.soak.history import SoakPlan
from jobs.training.soak.metrics import COUNTS, SLOPES, soak_measurement

__all__ = ["AXES", "QUANTITIES", "Case", "Spec", "measure"]

AXES = (*train.AXES, Axis("minutes", "whole", "minutes"))
QUANTITIES = (*SLOPES, *train.QUANTITIES, *COUNTS)

Case = train.Case

_START_S = 900  # of a point's deadline, for start-up, checkpoints and the check of the attention
_LONGEST_S = 10**6  # that a deadline can be


class Spec(train.TrainingSpec):
    """A long training for each kind of attention."""

    kind: Literal["soak"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe
    minutes: float = Field(gt=0, le=16_000, description="of training, over all pieces; start-ups do not count")
    piece_minutes: float = Field(gt=0, description="of training after which the process ends and a fresh one goes on")
    alert_gb: float = Field(
        default=60.0, gt=0, description="memory held by a rank that a warning is given for [10⁹ bytes]"
    )
    limit_gb: float = Field(default=65.0, gt=0, description="memory held by a rank that ends the point [10⁹ bytes]")
    steps: int = Field(
        default=50_000,
        ge=5,
        le=2**31,
        description="of the learning rate's schedule; later ones keep its lowest rate, as the time ends the soak",
    )
    checkpoints: CheckpointSpec = Field(  # pyright: ignore[reportIncompatibleVariableOverride] - as above
        description="without one a process could not go on where another ended"
    )

    @model_validator(mode="after")
    def _check_pieces(self) -> Self:
        """Refuse pieces that are longer than the whole, and a limit that comes before the alert."""
        if self.piece_minutes > self.minutes:
            raise ValueError(
                f"piece_minutes: {self.piece_minutes:g}: is more than the {self.minutes:g} minutes; use fewer"
            )
        if self.alert_gb > self.limit_gb:
            raise ValueError(
                f"alert_gb: {self.alert_gb:g}: is above limit_gb {self.limit_gb:g}, which ends the point; exchange them"
            )
        return self

    @model_validator(mode="after")
    def _check_deadline(self) -> Self:
        """Give a point time for the whole soak, and refuse a deadline within it."""
        least = 60 * self.minutes
        if "point_s" not in self.deadlines.model_fields_set:
            point_s = min(_LONGEST_S, max(self.deadlines.point_s, 2 * least + _START_S))
            return self.model_copy(update={"deadlines": self.deadlines.model_copy(update={"point_s": point_s})})
        if self.deadlines.point_s <= least:
            raise ValueError(
                f"deadlines.point_s: {self.deadlines.point_s:g}: would end {self.minutes:g} minutes of training, which "
                f"are {least:g} s; use more, or leave it out"
            )
        return self

    def case_fields(self) -> Mapping[str, Any]:
        """As TrainingSpec."""
        return {"soak": SoakPlan(self.minutes, self.piece_minutes, self.alert_gb, self.limit_gb)}

    def points(self, machine: Machine) -> Sequence[Point]:
        """As TrainingSpec, with the time."""
        return [
            replace(
                point,
                label=f"{point.label} {self.minutes:g} min",
                axes=replace(point.axes, more={**point.axes.more, "minutes": int(self.minutes)}),
            )
            for point in super().points(machine)
        ]


def measure(case: Case, beat: Beat) -> Measurement:
    """Train piece by piece, each piece on ranks that are started anew; also one rank is a process of its own.

    Raises:
        RankFailed, WrongResult, Diverged, Ineffective, CheckpointError: as run_ranks.
        MemoryLimit: a rank held more memory than `limit_gb`.
        Suspended: SIGTERM came before the end.
        torch.OutOfMemoryError, RuntimeError: memory ran out (device; host).
    """
    restarts = 0
    with noting_sigterm() as stop:
        while True:
            reports = run_ranks(case, beat, stop)
            restarts += reports[0].environment["training"]["restarts"]
            history = reports[0].run.soak
            assert history is not None
            if history.done:
                return soak_measurement(case, reports, restarts)
            if stop.is_set():
                raise Suspended(f"SIGTERM ended the soak after piece {history.pieces}: nsa submit SPEC --resume RUN")
            beat(STARTING)
