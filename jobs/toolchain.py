"""A model's pass under two toolchains, interpreters or settings: are its outputs, its memory and its speed the same?

A point is one pass under two toolchains, the first of the spec and another: each in a process of its own, one after the
other on one device, with the same weights and tokens. Each is compared with the oracle before it is timed.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from jobs.hardware.variables import effective
from jobs.measure.call import measure_call
from jobs.measure.check import CEILING
from jobs.measure.clock import TimingSpec
from jobs.measure.model_pass import ModelPass, PassCase, PassSpec
from jobs.process import messages
from jobs.process.child import Child
from jobs.process.memory_limit import gpu_share
from jobs.process.messages import Measured, MeasurePoint
from jobs.process.reporter import ProcessReporter
from jobs.process.watch import DeadlineWatch
from jobs.process.worker import Channel
from jobs.schema.point import STARTING, Beat, Machine, Measurement, Metric, Point, reporter
from jobs.schema.quantities import AGREEMENT, MEMORY, PEAK_EXTRA_MEMORY, TELEMETRY, TIME, Better, Quantity, Role
from jobs.schema.states import PointState
from jobs.specs.environments import env_text
from jobs.specs.fields import torch_dtype
from jobs.specs.spec import Strict
from nsa_core.model import NSATransformer

DIFFERENCES = Quantity(
    "differences", "1", "Differences beyond their tolerance", "differences", Better.LOWER, Role.HEADLINE
)
OUTPUT_DIFFERENCE = Quantity(
    "output_difference", "1", "Largest difference of an output", "output difference", Better.LOWER, Role.HEADLINE
)
TENSORS_EQUAL = Quantity("tensors_equal", "%", "Outputs equal bit for bit", better=Better.HIGHER)
TIME_CHANGE = Quantity("time_change", "%", "Time against the first toolchain's", "time change", role=Role.HEADLINE)
MEMORY_CHANGE = Quantity(
    "memory_change", "%", "Memory against the first toolchain's", "memory change", role=Role.HEADLINE
)
FIRST_TIME = Quantity("first_time", "ms", "Time under the first toolchain", better=Better.LOWER)
FIRST_MEMORY = Quantity("first_memory", "MiB", "Peak memory beyond inputs under the first", better=Better.LOWER)
COMPARISON = (DIFFERENCES, OUTPUT_DIFFERENCE, TENSORS_EQUAL, TIME_CHANGE, MEMORY_CHANGE, FIRST_TIME, FIRST_MEMORY)
QUANTITIES = (TIME, *COMPARISON, *MEMORY, *AGREEMENT, *TELEMETRY)

_MOST_NAMED = 5  # tensors in the message of a failed point


class ToleranceSpec(Strict):
    """Differences that are none."""

    outputs: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="of the loss and each gradient, relative to its norm; None: the largest error against the oracle "
        "that any implementation may have in the precision",
    )
    time_percent: float = Field(default=10, gt=0, le=10**4, description="of the medians")
    memory_percent: float = Field(default=2, gt=0, le=10**4, description="of the peak beyond the inputs")


@dataclass(frozen=True)
class Toolchain:
    """An interpreter, None: the point's own, and the environment variables that are set for it."""

    python: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)


class Case(PassCase):
    """A pass under two toolchains; `tolerance.outputs` is given.

    Attributes:
        versions: of the second toolchain's interpreter, a part of the key: the first's are already.
        settings: names of the variables that the spec sets.
    """

    timing: TimingSpec
    tolerance: ToleranceSpec
    settings: list[str]
    toolchains: tuple[Toolchain, Toolchain] = (Toolchain(), Toolchain())
    versions: Mapping[str, str] = {}

    def toolchain_name(self, number: int) -> str:
        """The first (1) or second (2) toolchain in words."""
        toolchain = self.toolchains[number - 1]
        words = [toolchain.python or "", env_text(toolchain.env) or ""]
        return f"toolchain {number} ({' '.join(filter(None, words)) or 'as it is'})"


class Spec(PassSpec):
    """Lengths x passes x implementations of one model, under each toolchain but the first beside the first."""

    kind: Literal["toolchain"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe
    timing: TimingSpec = TimingSpec()
    tolerance: ToleranceSpec = ToleranceSpec()

    @model_validator(mode="after")
    def _check_two(self) -> Self:
        if len(self.python) * len(self.env) < 2:
            raise ValueError("env: one toolchain has nothing to compare with; name two, or two interpreters in python")
        if None in self.python[1:]:
            raise ValueError("python: null, the orchestrator's own interpreter, must be the first; put it first")
        return self

    def all_points(self, machines: Mapping[str | None, Machine]) -> list[Point]:
        """Points of every toolchain but the first, each of which runs both.

        The point's own process has the first interpreter, and the processes that it starts have the environments.
        """
        first = Toolchain(self.python[0], self.env[0])
        found = []
        for point in super().all_points(machines):
            other = Toolchain(point.python, point.env)
            if other != first:
                versions = dict(machines[other.python].fingerprint)
                case = Case.model_validate({**point.config, "toolchains": (first, other), "versions": versions})
                found.append(replace(point, case=case, env={}, python=first.python))
        return found

    def points(self, machine: Machine) -> Sequence[Point]:
        """As PassSpec.pass_points."""
        outputs = self.tolerance.outputs or CEILING[torch_dtype(self.precision)]
        return self.pass_points(
            machine,
            Case,
            timing=self.timing,
            tolerance=self.tolerance.model_copy(update={"outputs": outputs}),
            settings=self.settings,
        )


class ToolchainFailed(Exception):  # noqa: N818 - the state it leads to is "error"; the name says which
    """The pass does not run under a toolchain."""


class OutputsDiffer(Exception):  # noqa: N818 - the state it leads to is "error"; the name says which
    """The outputs under two toolchains differ by more than the tolerance."""


def measure(case: Case, beat: Beat) -> Measurement:
    """Run the pass under both toolchains and compare them.

    Raises:
        ToolchainFailed: it dies or raises under one of them, or disagrees with the oracle there.
        OutputsDiffer: its outputs are not the same.
        MemoryError: memory ran out under one of them.
    """
    with tempfile.TemporaryDirectory(prefix="toolchain-") as name:
        folder = Path(name)
        beat("inputs")
        torch.manual_seed(case.seed)  # made once: generators may differ between versions of PyTorch
        tokens = torch.randint(case.model.vocab_size, (case.batch, case.seq_len + 1))
        torch.save({"weights": NSATransformer(case.model).state_dict(), "tokens": tokens}, folder / "inputs.pt")
        first, other = (run_under(case, number, folder, beat) for number in (1, 2))
        beat("comparison")
        outputs = compare_outputs(*(_load(folder / f"outputs-{number}.pt") for number in (1, 2)))
    metrics = comparison_metrics(first, other, outputs)
    values = {metric.name: metric.value for metric in metrics}
    found = differences(values, case.tolerance, first.route, other.route)
    files = {f"lock-{number}.txt": lock_file(case, number, run.environment) for number, run in ((1, first), (2, other))}
    wrong = _other_outputs(case, outputs)
    files["comparison.txt"] = comparison_table(case, first, other, values, [*([wrong] if wrong else []), *found])
    if wrong:  # an error keeps no files: what explains it is printed
        print(*(f"{name}:\n{text}" for name, text in files.items()), sep="\n", file=sys.stderr)
        raise OutputsDiffer(wrong)
    for difference in found:
        reporter(beat).warn(f"{case.toolchain_name(2)} against {case.toolchain_name(1)}: {difference}")
    method = "changes of time and memory beyond the tolerance, and other kernels"
    counted = Metric.of(DIFFERENCES, len(found), method=method)
    environment = {name: value for name, value in other.environment.items() if name != "distributions"}
    return Measurement((*metrics, counted), other.route, environment, files)


def _other_outputs(case: Case, outputs: Outputs) -> str | None:
    """Names of the tensors that differ by more than the tolerance, in a sentence; None if none does."""
    allowed = case.tolerance.outputs or 0.0
    beyond = {name: x for name, x in outputs.differences.items() if not x <= allowed}
    if not beyond:
        return None
    worst = sorted(beyond, key=lambda name: -beyond[name])[:_MOST_NAMED]
    named = ", ".join(f"{name} by {beyond[name]:.1e}" for name in worst)
    return (
        f"{case.toolchain_name(2)}: {len(beyond)} of {len(outputs.differences)} outputs differ from those of "
        f"{case.toolchain_name(1)} by more than {allowed:.1e} of their norm: {named}"
    )


def run_under(case: Case, number: int, folder: Path, beat: Beat) -> Measurement:
    """Measure the pass under the first (1) or second (2) toolchain, in a process whose deadlines are the point's.

    Args:
        folder: with the inputs; gets the outputs.
    """
    name, toolchain = case.toolchain_name(number), case.toolchains[number - 1]
    config = {
        "case": case.model_dump(mode="json"),
        "inputs": str(folder / "inputs.pt"),
        "outputs": str(folder / f"outputs-{number}.pt"),
        "gpu_share": gpu_share(case.device),
    }
    beat(STARTING)
    # Its files about a failure go where this process's are looked for.
    env = {"TMPDIR": tempfile.gettempdir(), **toolchain.env}
    child = Child("jobs.toolchain:answer", env=env, python=toolchain.python)
    try:
        child.send(MeasurePoint("toolchain", config, case.device))
        watch, ended = DeadlineWatch(child), None
        while ended is None:
            events, ended = watch.step()
            for event in events:
                if isinstance(event, messages.Beat):
                    beat(f"{name}: {event.phase}", event.done, event.total)
        if ended.result is not None:
            return ended.result.measurement
        print(f"{name}:\n{child.tail()}", file=sys.stderr)
    finally:
        child.discard()
    if ended.state is PointState.OOM:
        raise MemoryError(f"{name}: {ended.reason}")
    last = f" (last in phase {watch.phase!r})" if ended.state is PointState.CRASH else ""
    raise ToolchainFailed(f"{name}: {ended.state}: {ended.reason}{last}")


def answer(command: MeasurePoint, channel: Channel) -> Measured:
    """Measure one pass in the process of a toolchain; its outputs go to a file.

    Raises:
        WrongResult: the attention disagrees with the oracle.
    """
    config = command.config
    case = Case.model_validate(config["case"])
    settings = effective(case.settings)  # before anything else uses CUDA
    if config["gpu_share"] is not None:
        torch.cuda.set_per_process_memory_fraction(config["gpu_share"])

    def made() -> ModelPass:
        call, saved = ModelPass(case), _load(Path(config["inputs"]))
        call.model.load_state_dict(saved["weights"])
        tokens = saved["tokens"].to(call.device)
        call.inputs = tokens[:, :-1].clone(), tokens[:, 1:].clone()
        return call

    def first_run(call: ModelPass) -> None:
        outputs = {"loss": call.run().detach()}
        outputs |= {f"gradient of {name}": p.grad for name, p in call.model.named_parameters() if p.grad is not None}
        torch.save({name: x.cpu() for name, x in outputs.items()}, config["outputs"])

    beat = ProcessReporter(channel.send)
    try:
        measured = measure_call(case, case.check, made, beat, first_run=first_run, timing=case.timing, throughput=None)
    except Exception:
        traceback.print_exc()  # which the point prints, too
        raise
    environment = {**measured.environment, "settings": settings, "distributions": packages()}
    return Measured(replace(measured, environment=environment, files={}))


def packages() -> dict[str, str]:
    """Versions of all distributions that this interpreter finds, by name."""
    found = {d.metadata["Name"]: d.version for d in metadata.distributions() if d.metadata["Name"]}
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def _load(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)


@dataclass(frozen=True)
class Outputs:
    """Comparison of the loss and the gradients.

    Attributes:
        differences: of each tensor, relative to its norm under the first toolchain.
        equal: number of tensors that are equal bit for bit.
    """

    differences: Mapping[str, float]
    equal: int


def compare_outputs(first: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Outputs:
    """Differences of tensors by name. One that is not finite, or that only one side has, differs infinitely."""
    found, equal = {}, 0
    for name in dict.fromkeys([*first, *other]):
        if name not in first or name not in other or first[name].shape != other[name].shape:
            found[name] = float("inf")
            continue
        equal += torch.equal(first[name], other[name])
        norm = first[name].double().norm().item()
        difference = (other[name].double() - first[name].double()).norm().item()
        relative = difference / norm if norm > 0 else difference
        found[name] = relative if relative == relative else float("inf")
    return Outputs(found, equal)


def differences(
    values: Mapping[str, float], tolerance: ToleranceSpec, first: Mapping[str, str], other: Mapping[str, str]
) -> list[str]:
    """Changes of time and memory beyond their tolerance, and other routes: a phrase each."""
    found = []
    for word, change, allowed in (
        ("time", values[TIME_CHANGE.name], tolerance.time_percent),
        ("peak memory", values[MEMORY_CHANGE.name], tolerance.memory_percent),
    ):
        if abs(change) > allowed:
            found.append(f"{word} {change:+.1f} %, beyond {allowed:g} %")
    for branch in dict.fromkeys([*first, *other]):
        kernels = first.get(branch, "nothing"), other.get(branch, "nothing")
        if kernels[0] != kernels[1]:
            found.append(f"branch {branch} ran {kernels[1]}, not {kernels[0]}")
    return found


def comparison_metrics(first: Measurement, other: Measurement, outputs: Outputs) -> list[Metric]:
    """Metrics of the second toolchain, its changes against the first, and the first's time and memory."""
    metrics, before = ({metric.name: metric for metric in run.metrics} for run in (other, first))
    time, memory = metrics[TIME.name], metrics[PEAK_EXTRA_MEMORY.name]
    first_memory = before[PEAK_EXTRA_MEMORY.name]
    method = "relative to the first toolchain's, on the same device in the same point"
    norms = "largest norm of a difference relative to the norm, of the loss and all gradients of the first run"
    share = 100 * outputs.equal / len(outputs.differences)
    return [
        *metrics.values(),
        replace(before[TIME.name], name=FIRST_TIME.name),
        Metric.of(TIME_CHANGE, 100 * (time.value / before[TIME.name].value - 1), method=f"medians; {method}"),
        replace(first_memory, name=FIRST_MEMORY.name),
        Metric.of(MEMORY_CHANGE, 100 * (memory.value / first_memory.value - 1), method=method),
        Metric.of(OUTPUT_DIFFERENCE, max(outputs.differences.values()), method=norms),
        Metric.of(TENSORS_EQUAL, share, method=f"{outputs.equal} of {len(outputs.differences)} tensors"),
    ]


def lock_file(case: Case, number: int, there: Mapping[str, Any]) -> str:
    """Text with interpreter, driver, variables and exact versions of all packages of a toolchain; pip reads it.

    Args:
        there: environment of the measurement under the toolchain.
    """
    head = [case.toolchain_name(number), f"Python {there['python']}, {there['interpreter']}", there["platform"]]
    if "cuda" in there:
        head.append(f"CUDA {there['cuda']}, cuDNN {there['cudnn']}, driver {there['gpu'].get('driver', 'unknown')}")
    head += [f"{name} in effect: {value}" for name, value in there["settings"].items()]
    lines = [f"{name}=={version}" for name, version in there["distributions"].items()]
    return "\n".join([*(f"# {line}" for line in head), *lines, ""])


def comparison_table(
    case: Case,
    first: Measurement,
    other: Measurement,
    values: Mapping[str, float],
    found: Sequence[str],
) -> str:
    """Text of the comparison; `values` are its metrics by name, `found` the phrases of `differences`."""
    rows = [
        f"1: {case.toolchain_name(1)}",
        f"2: {case.toolchain_name(2)}",
        "",
        f"time         {values['first_time']:12.3f} {values['time']:12.3f} ms   {values['time_change']:+7.1f} %",
        f"peak memory  {values['first_memory']:12.3f} {values[PEAK_EXTRA_MEMORY.name]:12.3f} MiB  "
        f"{values['memory_change']:+7.1f} %",
        f"outputs      {values['output_difference']:.2e} at most, {values['tensors_equal']:.1f} % equal bit for bit",
        "",
        *(found or ["no difference beyond the tolerance"]),
        "",
        "packages that differ:",
    ]
    versions = first.environment["distributions"], other.environment["distributions"]
    for name in sorted({*versions[0], *versions[1]}, key=str.lower):
        before, after = (each.get(name, "none") for each in versions)
        if before != after:
            rows.append(f"  {name}: {before}, {after}")
    return "\n".join([*rows, ""])
