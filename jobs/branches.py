"""Each branch of the operator by itself, under every backend that computes it, and all branches together.

A point is one branch, backend, pass and length. A forced branch is traced first: it may run nothing of another one
(jobs.measure.isolation). Then it is compared with the oracle, timed, and its peak memory is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from jobs.hardware.environment import environment
from jobs.measure.case import PointCase, bare_model
from jobs.measure.check import Agreement, HeadShape, attend, check_attention, make_inputs
from jobs.measure.clock import measure_time
from jobs.measure.isolation import trace_branch
from jobs.measure.memory import measure_peak, tensor_bytes
from jobs.measure.route import route_of
from jobs.measure.stats import summarize
from jobs.schema.axes import Axis
from jobs.schema.point import Beat, Machine, Measurement, Point
from jobs.schema.quantities import AGREEMENT, MEMORY, TELEMETRY, THROUGHPUT, TIME
from jobs.specs.fields import (
    WINDOW_ALONE,
    BareNSA,
    Count,
    DType,
    HeadsSpec,
    Lengths,
    Passes,
    TimingSpec,
    Unique,
    computes,
    implementation_names,
    torch_dtype,
)
from jobs.specs.fit import backend_reasons, threads, window_reasons
from jobs.specs.nsa_effect import ALL, refuse_idle
from jobs.specs.spec import JobSpec, SpecError
from nsa_core.backends import Heads
from nsa_core.functional import BRANCHES
from nsa_core.routes import Branch

QUANTITIES = (TIME, THROUGHPUT, *MEMORY, *AGREEMENT, *TELEMETRY)
AXES = (Axis("branch", "text", "branch"),)


class Spec(JobSpec):
    """Lengths x branches x passes x backends."""

    kind: Literal["branches"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe
    backends: Annotated[list[str], Field(min_length=1), Unique, implementation_names(*WINDOW_ALONE)]
    branches: Annotated[list[Literal["cmp", "slc", "win", "all"]], Field(min_length=1), Unique] = Field(
        default=["cmp", "slc", "win", "all"], description="each by itself; all: the whole operator"
    )
    shape: HeadsSpec
    lengths: Lengths
    batch: Count = 1
    passes: Passes = Field(default=["forward", "forward+backward"])
    dtype: DType = "float32"
    nsa: BareNSA | None = Field(default=None, description="None: the defaults")
    timing: TimingSpec = TimingSpec()

    @model_validator(mode="after")
    def _each_has_work(self) -> Spec:
        for name in self.backends:
            if not any(computes(name, branch) for branch in self.branches):
                raise ValueError(f"backends: {name!r}: computes the window alone; add win to branches, or leave it out")
        refuse_idle(self, self.nsa, self.backends, self.dtype, self.branches)
        return self

    def points(self, machine: Machine) -> Sequence[Point]:
        """Points of the whole grid, shortest lengths first; a backend is left out where it does not compute a branch.

        Raises:
            SpecError: a backend cannot run on this machine.
        """
        dtype, shape = torch_dtype(self.dtype), self.shape
        heads = Heads(shape.head_dim, shape.query_heads // shape.kv_heads)
        reasons = backend_reasons(machine, dtype, heads) | window_reasons(machine, dtype)
        for name in self.backends:
            if (reason := reasons[name]) is not None:
                usable = [other for other, against in reasons.items() if against is None]
                raise SpecError(f"backends: {name!r}: {reason}; use {', '.join(usable)}")
        grid = product(sorted(self.lengths), self.branches, self.passes, self.backends)
        return [self._point(machine, *place) for place in grid if computes(place[3], place[1])]

    def _point(self, machine: Machine, seq_len: int, branch: str, pass_: str, backend: str) -> Point:
        heads = self.shape
        model = bare_model(heads.query_heads, heads.kv_heads, heads.head_dim)
        case = BranchCase(
            workload="attention",
            implementation=backend,
            branch=branch,
            backward=pass_ == "forward+backward",
            seq_len=seq_len,
            batch=self.batch,
            dtype=self.dtype,
            device=machine.device,
            seed=self.seed,
            threads=threads(self, machine),
            model=model if self.nsa is None else replace(model, nsa=self.nsa),
            timing=self.timing.plan,
        )
        return Point(
            kind="branches",
            label=f"{backend} {branch} {pass_} S={seq_len}",
            config=case.to_config(),
            axes=case.axes(pass_, more={"branch": branch}),
        )


@dataclass(frozen=True)
class BranchCase(PointCase):
    """A point's configuration: one branch or all of them, by one backend, one pass, one length.

    Attributes:
        branch: "cmp", "slc", "win" or "all".
        backward: whether gradients are computed too.
    """

    branch: str
    backward: bool

    @property
    def branches(self) -> tuple[Branch, ...]:
        return tuple(branch for branch in BRANCHES if self.branch in (ALL, branch))

    @property
    def shape(self) -> HeadShape:
        return HeadShape.of(self.model)

    def _used(self) -> tuple[str, ...]:
        return ("heads", "kv_heads", "head_dim", "nsa")


def measure(config: Mapping[str, Any], beat: Beat) -> Measurement:
    """Trace a branch, compare it with the oracle, and measure its time and memory.

    Raises:
        WrongResult: it disagrees with the oracle, or ran something of another branch.
        torch.OutOfMemoryError, RuntimeError: memory ran out (device; host).
    """
    case = BranchCase.from_config(config)
    device = case.start()
    beat("check")
    agreement, files = _agree(case, device), {}
    if case.branch != ALL:
        settings = case.implementation, case.model.nsa, case.shape, case.torch_dtype, device
        files["trace.txt"] = trace_branch(case.branches[0], *settings, backward=case.backward)
    beat("inputs")
    call, tensors = _call(case, device)
    beat("first run")
    route = route_of(call)
    timing = measure_time(call, device, case.timing, beat)
    beat("memory")
    peak = measure_peak(call, device, tensor_bytes(tensors))
    tokens = case.batch * case.seq_len
    per_second = [1000 * tokens / ms for ms in timing.samples_ms]
    metrics = (
        summarize(TIME, timing.samples_ms, timing.method),
        summarize(THROUGHPUT, per_second, f"{tokens} tokens over each sample of time"),
        *peak.metrics(),
        *agreement.metrics(),
    )
    return Measurement(metrics, route, environment(device), peak.files | files)


def _agree(case: BranchCase, device: torch.device) -> Agreement:
    settings = case.implementation, case.model.nsa, case.shape, case.torch_dtype, device
    return check_attention(*settings, backward=case.backward, seed=case.seed, branches=case.branches)


def _call(case: BranchCase, device: torch.device) -> tuple[Callable[[], object], list[Tensor]]:
    """A call of the branch, and the tensors that stay allocated between calls."""
    inputs = make_inputs(case.shape, case.batch, case.seq_len, case.torch_dtype, device, case.seed, case.backward)
    settings = case.model.nsa, case.implementation, case.branches
    if not case.backward:
        return torch.no_grad()(lambda: attend(inputs, *settings)), [*inputs.values()]
    generator = torch.Generator(device).manual_seed(case.seed + 1)
    towards = torch.randn(inputs["q"].shape, generator=generator, dtype=case.torch_dtype, device=device)

    def call() -> object:
        out = attend(inputs, *settings)
        return out, torch.autograd.grad(out, list(inputs.values()), towards, allow_unused=True)

    return call, [*inputs.values(), towards]
