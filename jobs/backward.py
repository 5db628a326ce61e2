"""The backward pass of a model, layer by layer: does it hang, run out of memory, lose a gradient, and at which size?

A point is one size of a model, with one branch or all, under one backend. It is checked against the oracle; then one
pass is watched layer by layer, and others are timed without the watch. With `bisect` sizes are tried until the
smallest that fails is known (jobs.measure.search); a point of each case and variant concludes.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from jobs.measure.call import measure_call
from jobs.measure.check import WrongResult
from jobs.measure.clock import TimingSpec, synchronize
from jobs.measure.isolation import trace_branch
from jobs.measure.memory import measure_held, resident_bytes, tensor_bytes
from jobs.measure.passes import ModelPass, PassCase
from jobs.measure.search import BISECTION, Size, Untried, bisected
from jobs.schema.axes import Axis
from jobs.schema.point import FAILURE_FILES, Beat, Conclusion, EndedPoint, Machine, Measurement, Metric, Point
from jobs.schema.quantities import AGREEMENT, MEMORY, PEAK_MEMORY, TELEMETRY, THROUGHPUT, TIME
from jobs.schema.states import FAILED, PointState
from jobs.specs import fields
from jobs.specs.fields import WINDOW_ALONE, Layers, ModelChoice, Several, computes
from jobs.specs.fit import ALL, does_not_fit, refuse_idle, refuse_unusable
from jobs.specs.spec import JobSpec, Strict
from nsa_core.functional import BRANCHES
from nsa_core.routes import Branch

FORWARD_MEMORY = replace(
    PEAK_MEMORY, name="forward_memory", title="Memory allocated after the forward pass", short="after forward"
)
QUANTITIES = (*BISECTION, TIME, THROUGHPUT, FORWARD_MEMORY, *MEMORY, *AGREEMENT, *TELEMETRY)
AXES = (
    Axis("preset", "text", "preset"),
    Axis("branch", "text", "branch"),
    Axis("repeats", "whole", "repeats"),
    Axis("anomaly", "text", "anomaly mode"),
)


class CaseSpec(ModelChoice):
    """Sizes of a model and its variants: every combination."""

    layers: Several[Layers] | None = Field(default=None, description="None: the model's")
    lengths: fields.Lengths
    branches: Several[Literal["cmp", "slc", "win", "all"]] = Field(
        default=["all"], description="of each layer: all, or one alone; the model has no weights for the others"
    )
    repeats: Several[Annotated[int, Field(ge=1, le=2**10)]] = Field(
        default=[1], description="times that a layer runs its attention, one after the other"
    )
    anomaly: Several[bool] = Field(
        default=[False], description="PyTorch's anomaly mode, which names the operation that made a NaN"
    )

    @property
    def depths(self) -> list[int]:
        return self.layers or [self.base.layers]

    def variants(self) -> list[Variant]:
        return [Variant(self, *each) for each in product(self.branches, sorted(self.repeats), self.anomaly)]

    def sizes(self) -> list[Size]:
        return list(product(sorted(self.depths), sorted(self.lengths)))


class Variant(NamedTuple):
    """A case with one branch or "all", one number of repeats, and anomaly mode or not."""

    case: CaseSpec
    branch: str
    repeats: int
    anomaly: bool

    def label(self, size: Size | None = None) -> str:
        """Label of a size's points, without the implementation; None: of the search over all sizes."""
        what = "smallest failing size" if size is None else f"{size[0]} layer{'s' if size[0] > 1 else ''} S={size[1]}"
        branch = f"{self.branch}{f' x{self.repeats}' if self.repeats > 1 else ''}"
        return f"{branch} {self.case.model_name} {what}{' anomaly mode' if self.anomaly else ''}"


class DrillSpec(Strict):
    """A hang on purpose, to see what it leaves."""

    hang_in_layer: Layers = Field(description="the layer whose backward pass never ends")
    from_length: fields.Length = Field(default=1, description="of the sequences for which it does not")


class BisectSpec(Strict):
    """The search for the smallest size that fails, instead of the measurement of all sizes."""

    size_s: float = Field(
        default=180, gt=0, le=10**5, description="seconds that one size may take, at most deadlines.point_s"
    )


class Case(PassCase):
    """One size of a model, with `repeats` and `anomaly` as in CaseSpec."""

    repeats: int
    anomaly: bool
    hang_in_layer: int | None = None  # its backward pass never ends, for a drill
    search: str | None = None  # label of the search that tries this size

    def check_rows(self) -> tuple[Metric, ...]:
        return ()  # a size that hangs shall do so in the watched pass


class Spec(JobSpec):
    """Cases x implementations."""

    kind: Literal["backward"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe
    cases: Annotated[list[CaseSpec], Field(min_length=1)]
    implementations: fields.Backends
    batch: fields.Batch = 1
    precision: Literal["float32", "bfloat16"] = Field(default="float32", description="bfloat16: autocast; weights stay")
    checkpointing: bool = Field(default=False, description="compute blocks anew in the backward pass, to save memory")
    nsa: fields.NSA | None = Field(default=None, description="None: the model's")
    timing: TimingSpec = Field(default=TimingSpec(), description="of the pass without the watch")
    bisect: BisectSpec | None = None
    drill: DrillSpec | None = None

    @model_validator(mode="after")
    def _check_work(self) -> Self:
        """Refuse what would change nothing, and what would be measured twice; a search's size has its seconds."""
        branches = {branch for case in self.cases for branch in case.branches}
        for name in self.implementations:
            if not any(computes(name, branch) for branch in branches):
                raise ValueError(f"implementations: {name!r}: computes the window alone; add win to a case's branches")
        refuse_idle(self, self.nsa, self.implementations, self.precision, branches)
        seen: set[str] = set()
        for number, case in enumerate(self.cases):
            section, own, nsa = f"cases.{number}.model.nsa", case.own_nsa, self.nsa or case.base.nsa
            if self.nsa and own:
                raise ValueError(f"nsa: {section} is given as well; keep one of the two")
            refuse_idle(self, own, self.implementations, self.precision, case.branches, section=section)
            section = section if own else "nsa"
            learned = nsa.cmp_block if nsa.compress == "mlp" else 0  # tokens compressed into one
            if learned and "slc" in case.branches:  # a search would take it for a failing size
                raise ValueError(f"{section}.compress: 'mlp': the selected branch alone does not train it; use mean")
            if min(case.lengths) < learned and {"all", "cmp"} & set(case.branches):
                raise ValueError(
                    f"cases.{number}.lengths: {min(case.lengths)}: leaves a learned compression nothing to compress; "
                    f"use at least {section}.cmp_block = {learned}"
                )
            for variant, size in product(case.variants(), [None] if self.bisect else case.sizes()):
                if (label := variant.label(size)) in seen:
                    raise ValueError(f"cases: {label!r} appears more than once; leave it out of one case")
                seen.add(label)
        if self.bisect is None:
            return self
        if self.timing != TimingSpec():  # a stored spec has its defaults, too
            raise ValueError("timing: a search times nothing; leave it out, or leave bisect out")
        point_s = min(self.deadlines.point_s, self.bisect.size_s)
        return self.model_copy(update={"deadlines": self.deadlines.model_copy(update={"point_s": point_s})})

    def points(self, machine: Machine) -> Sequence[Point]:
        """Points of every case, smallest sizes first, but for branches that an implementation does not compute."""
        for case in self.cases:
            refuse_unusable(self.implementations, machine, self.precision, case.base, WINDOW_ALONE)
        if self.bisect:
            return self.next_points(machine, ())
        return [
            self._point(machine, variant, name, size)
            for case in self.cases
            for size, variant, name in product(case.sizes(), case.variants(), self.implementations)
            if computes(name, variant.branch)
        ]

    def next_points(self, machine: Machine, ended: Sequence[EndedPoint]) -> Sequence[Point]:
        """For each search the next size to try, or its conclusion; none without `bisect`."""
        tried: dict[str, dict[Size, EndedPoint]] = defaultdict(dict)
        for each in (each for each in ended if self.bisect and each.point.conclusion is None):
            size = Case.model_validate(each.point.config)
            tried[size.search or ""][size.model.layers, size.seq_len] = each
        variants = [variant for case in self.cases for variant in case.variants()] if self.bisect else []
        found = []
        for variant, name in product(variants, self.implementations):
            known = tried[search := f"{name} {variant.label()}"]
            if not computes(name, variant.branch) or any(each.state is PointState.LOST for each in known.values()):
                continue  # a lost size has neither passed nor failed
            try:
                metrics, sentence = bisected(variant.case.depths, variant.case.lengths, known)
            except Untried as untried:
                found.append(self._point(machine, variant, name, *untried.args))
                continue
            point = self._point(machine, variant, name, max(known))
            axes = replace(point.axes, seq_len=None, layers=None)
            found.append(Point("backward", search, point.case, axes, conclusion=Conclusion(metrics, sentence)))
        return found

    def _point(self, machine: Machine, variant: Variant, name: str, size: Size) -> Point:
        (layers, seq_len), base, branch, drill = size, variant.case.base, variant.branch, self.drill
        branches: tuple[Branch, ...] = tuple(each for each in BRANCHES if branch in (ALL, each))
        settings = {"backend": name, "nsa": self.nsa or base.nsa, "checkpointing": self.checkpointing}
        case = Case.of(
            self,
            machine,
            (name, "forward+backward", seq_len, self.batch),
            dtype=self.precision,
            model=replace(base, layers=layers, branches=branches, **settings),
            repeats=variant.repeats,
            anomaly=variant.anomaly,
            hang_in_layer=drill.hang_in_layer if drill and seq_len >= drill.from_length else None,
            timing=None if self.bisect else self.timing,
            search=f"{name} {variant.label()}" if self.bisect else None,
        )
        predicted = not self.bisect and branch == ALL and variant.repeats == 1
        needed = case.predicted_bytes() if predicted else None
        anomaly = "on" if variant.anomaly else "off"
        more = {"preset": variant.case.model_name, "branch": branch, "repeats": variant.repeats, "anomaly": anomaly}
        advice = "lower layers or lengths" + ("" if self.checkpointing else ", or turn checkpointing on")
        skip, label = does_not_fit(needed, self, machine, advice), f"{name} {variant.label(size)}"
        answers = FAILED - {PointState.LOST} if self.bisect else frozenset()
        return Point("backward", label, case, case.axes(more=more), needed, skip, answers=answers)


def measure(case: Case, beat: Beat) -> Measurement:
    """Check a model, watch a pass of it layer by layer, and time others; in a search nothing is timed.

    Raises:
        WrongResult: the attention disagrees with the oracle, or ran something of another branch.
        BrokenGradient: a layer has no gradient, or one that is not finite.
        PassFailed: the pass raised; caused by an error of memory if memory ran out.
    """
    folder = Path(tempfile.gettempdir()) / FAILURE_FILES
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier point of this process
    branches = case.model.branches
    files = {} if branches == BRANCHES else {"trace.txt": trace_branch(case, branches[0])}

    def watched(call: ModelPass) -> None:
        watch = LayerWatch([*call.model.blocks], call.device, beat, folder, case.hang_in_layer)
        files.update(watch.run(call.forward, call.backward))

    how: dict[str, Any] = {"first_run": watched, "memory": case.search is None}
    with torch.autograd.set_detect_anomaly(case.anomaly):
        call, measured = measure_call(case, lambda: repeated_pass(case), beat, **how)
    if {*branches} != set(measured.route) - {"select"}:
        raise WrongResult(
            f"{case.implementation}: a model of {', '.join(sorted(branches))} ran {', '.join(measured.route)}"
        )
    metrics = measured.metrics
    if case.search is None:
        call.clear()
        with torch.autograd.set_detect_anomaly(case.anomaly):
            held = measure_held(call.forward, call.device, tensor_bytes(call.resident)) / 2**20
        metrics = (Metric.of(FORWARD_MEMORY, held, method="all tensors while the loss is alive"), *metrics)
    return replace(measured, metrics=metrics, files={**measured.files, **files})


def repeated_pass(case: Case) -> ModelPass:
    """The pass of a model whose layers run their attention `repeats` times, each time on its input and its output."""

    def repeat(attention: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        x = args[0] + out
        for _ in range(case.repeats - 1):
            x = x + attention.forward(x)
        return x

    call = ModelPass(case)
    for block in call.model.blocks if case.repeats > 1 else ():
        block.get_submodule("attention").register_forward_hook(repeat)
    return call


LAYERS, STATS = "layers.json", "memory_stats.json"  # the marks; the CUDA allocator's statistics at the last of them


class BrokenGradient(Exception):  # noqa: N818 - the state it leads to is "error"; the name says which
    """A layer has no gradient, or one that is not finite."""


class PassFailed(Exception):  # noqa: N818 - as above
    """The pass raised at a place."""


class Mark(NamedTuple):
    """A place of the pass that was reached."""

    place: str  # "forward of layer 2", "backward of layer 2"
    seconds: float  # since the pass began
    allocated_mib: float | None  # of the CUDA allocator; None on a CPU
    reserved_mib: float | None
    resident_mib: float  # of the process
    finite: bool  # whether all values are that arrived there: the layer's input, or the gradient of its output


@dataclass
class LayerWatch:
    """Watches one pass of layers that follow each other."""

    layers: Sequence[nn.Module]  # first to last; named layer 1, 2, ...
    device: torch.device
    beat: Beat  # gets each place when it is reached
    folder: Path  # for files that outlive a pass that never ends; made if it is missing
    hang_in: int | None = None  # number of a layer whose backward pass shall never end, for a drill
    marks: list[Mark] = field(default_factory=list)
    back: bool = False  # whether the backward pass has begun
    start: float = 0.0

    def run(self, forward: Callable[[], Tensor], backward: Callable[[Tensor], None]) -> dict[str, str]:
        """Run the pass once; returns its marks and the memory around the backward pass, as files by name.

        Raises:
            BrokenGradient: a gradient is missing or not finite, or the loss is not.
            PassFailed: the pass raised; the message begins with the place that was reached last.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.start = time.perf_counter()
        with ExitStack() as hooks:
            for number, layer in enumerate(self.layers, 1):
                hooks.enter_context(layer.register_forward_pre_hook(partial(self._enter, number)))
                hooks.enter_context(layer.register_forward_hook(partial(self._leave, number)))
            try:
                loss = forward()
                self._reach("backward of the loss", 0, loss)
                before = memory_report(self.device)
                self.back = self.marks[-1].finite
                if self.back:
                    backward(loss)
                    self._reach("end of the backward pass", len(self.layers))
            except (RuntimeError, MemoryError) as err:
                place = self.marks[-1].place if self.marks else "start of the forward pass"
                raise PassFailed(f"{place}: {type(err).__name__}: {err}") from err
        if not self.back:
            place = next(mark.place for mark in self.marks if not mark.finite)
            raise BrokenGradient(f"the loss is {loss.item()}; values are not finite from here on: {place}")
        self._check_gradients()
        after, marks = memory_report(self.device), (self.folder / LAYERS).read_text()
        return {LAYERS: marks, "memory_before.txt": before, "memory_after.txt": after}

    def _enter(self, number: int, _: nn.Module, args: tuple[Any, ...]) -> None:
        count = len(self.layers)
        if self.back:
            self._reach(f"recomputation of layer {number}", count - number, args[0])
            return
        self._reach(f"forward of layer {number}", number - 1, args[0])
        if number == 1 and args[0].requires_grad:
            args[0].register_hook(partial(self._reach, "backward of the embedding", count))

    def _leave(self, number: int, _: nn.Module, __: tuple[Any, ...], out: Tensor) -> None:
        def _arrive(grad: Tensor) -> None:
            self._reach(f"backward of layer {number}", len(self.layers) - number, grad)
            while number == self.hang_in:
                time.sleep(3600)

        if not self.back and out.requires_grad:
            out.register_hook(_arrive)

    def _reach(self, place: str, done: int, arrived: Tensor | None = None) -> None:
        synchronize(self.device)
        self.beat(place, done, len(self.layers))
        finite = arrived is None or bool(arrived.detach().isfinite().all())
        stats = torch.cuda.memory_stats(self.device) if self.device.type == "cuda" else {}
        names = ("allocated_bytes.all.current", "reserved_bytes.all.current")
        allocated, reserved = (stats[name] / 2**20 if stats else None for name in names)
        seconds = time.perf_counter() - self.start
        self.marks.append(Mark(place, seconds, allocated, reserved, resident_bytes() / 2**20, finite))
        lines = ",\n".join(json.dumps(mark._asdict()) for mark in self.marks)
        (self.folder / LAYERS).write_text(f"[\n{lines}\n]\n")
        if stats:
            (self.folder / STATS).write_text(json.dumps(stats, indent=1))

    def _check_gradients(self) -> None:
        """Raise BrokenGradient for the first layer, in the order of the backward pass, without a good gradient."""
        reached, count = {mark.place: mark.finite for mark in self.marks}, len(self.layers)
        for number in range(count, 0, -1):
            none = f"layer {number} of {count} is the first without a gradient"
            infinite = f"layer {number} of {count} is the first with a gradient that is not finite"
            if (finite := reached.get(f"backward of layer {number}")) is None:
                raise BrokenGradient(f"{none}: none reaches its output")
            if not finite:
                source = "the loss" if number == count else f"the backward pass of layer {number + 1}"
                raise BrokenGradient(f"{infinite}; it comes from {source}")
            for parameter, weight in self.layers[number - 1].named_parameters():
                if weight.requires_grad and weight.grad is None:
                    raise BrokenGradient(f"{none}: {parameter} has none")
                if weight.grad is not None and not weight.grad.isfinite().all():
                    raise BrokenGradient(f"{infinite}: that of {parameter}")


def memory_report(device: torch.device) -> str:
    """The CUDA allocator's summary; on a CPU the process's memory as the kernel tells it."""
    if device.type == "cuda":
        return torch.cuda.memory_summary(device)
    status = Path("/proc/self/status").read_text()
    return "".join(line for line in status.splitlines(keepends=True) if line.startswith("Vm"))
