"""Each branch of the operator by itself, under every backend that computes it, and all branches together.

A point is one branch, backend, pass and length. A forced branch is traced first: it may run nothing of another one
(jobs.measure.isolation). Then it is compared with the oracle, timed, and its peak memory is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Literal

from pydantic import Field, model_validator

from jobs.measure.call import bare_model, measure_call
from jobs.measure.isolation import trace_branch
from jobs.measure.passes import OperatorCase, SweepSpec
from jobs.schema.axes import Axis
from jobs.schema.point import Beat, Machine, Measurement, Point
from jobs.schema.quantities import AGREEMENT, MEMORY, TELEMETRY, THROUGHPUT, TIME
from jobs.specs.fields import WINDOW_ALONE, Backends, BareNSA, Batch, HeadsSpec, Passes, Several, computes
from jobs.specs.fit import ALL, refuse_idle, refuse_unusable
from nsa_core.functional import BRANCHES
from nsa_core.routes import Branch

QUANTITIES = (TIME, THROUGHPUT, *MEMORY, *AGREEMENT, *TELEMETRY)
AXES = (Axis("branch", "text", "branch"),)


class Case(OperatorCase):
    """One branch, "cmp", "slc" or "win", or "all" of them."""

    branch: str

    @property
    def branches(self) -> tuple[Branch, ...]:
        return tuple(branch for branch in BRANCHES if self.branch in (ALL, branch))


class Spec(SweepSpec):
    """Lengths x branches x passes x backends."""

    kind: Literal["branches"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe
    backends: Backends
    branches: Several[Literal["cmp", "slc", "win", "all"]] = Field(
        default=["cmp", "slc", "win", "all"], description="each by itself; all: the whole operator"
    )
    shape: HeadsSpec
    batch: Batch = 1
    passes: Passes = Field(default=["forward", "forward+backward"])
    nsa: BareNSA | None = Field(default=None, description="None: the defaults")

    @model_validator(mode="after")
    def _check_effect(self) -> Spec:
        for name in self.backends:
            if not any(computes(name, branch) for branch in self.branches):
                raise ValueError(f"backends: {name!r}: computes the window alone; add win to branches, or leave it out")
        refuse_idle(self, self.nsa, self.backends, self.dtype, self.branches)
        return self

    def points(self, machine: Machine) -> Sequence[Point]:
        """Points of the grid, shortest lengths first, but for branches that a backend does not compute."""
        model = bare_model(self.shape, self.nsa)
        refuse_unusable(self.backends, machine, self.dtype, model, WINDOW_ALONE, "backends")
        points = []
        for seq_len, branch, pass_, backend in product(sorted(self.lengths), self.branches, self.passes, self.backends):
            if computes(backend, branch):
                case = self.case_of(machine, Case, model, (backend, pass_, seq_len, self.batch), branch=branch)
                label = f"{backend} {branch} {pass_} S={seq_len}"
                points.append(Point("branches", label, case, case.axes(more={"branch": branch})))
        return points


def measure(case: Case, beat: Beat) -> Measurement:
    """Trace a branch, which may run nothing of another one, and measure it. Raises as measure_call."""
    files = {"trace.txt": trace_branch(case, case.branches[0])} if case.branch != ALL else {}
    _, measured = measure_call(case, case.call, beat)
    return replace(measured, files={**measured.files, **files})
