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
from functools import partial
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
from jobs.schema.point import STARTING, Beat, EndedPoint, Machine, Measurement, Metric, Point, reporter
from jobs.schema.quantities import AGREEMENT, MEMORY, PEAK_EXTRA_MEMORY, TELEMETRY, TIME, Better, Quantity, Role
from jobs.schema.states import PointState
from jobs.specs.spec import Strict, env_text
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
_load = partial(torch.load, map_location="cpu", weights_only=True)


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
    """A pass under two toolchains; `tolerance.outputs` is given."""

    timing: TimingSpec
    tolerance: ToleranceSpec
    settings: list[str]  # names of the variables that the spec sets
    toolchains: tuple[Toolchain, Toolchain] = (Toolchain(), Toolchain())
    versions: Mapping[str, str] = {}  # of the second interpreter, a part of the key: the first's are already

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

    def all_points(
        self, machines: Mapping[str | None, Machine], ended: Sequence[EndedPoint] | None = None
    ) -> list[Point]:
        """Points of every toolchain but the first, each of which runs both.

        The point's own process has the first interpreter, and the processes that it starts have the environments.
        """
        first = Toolchain(self.python[0], self.env[0])
        found = []
        for point in super().all_points(machines, ended):
            other = Toolchain(point.python, point.env)
            if other != first:
                versions = dict(machines[other.python].fingerprint)
                case = Case.model_validate({**point.config, "toolchains": (first, other), "versions": versions})
                found.append(replace(point, case=case, env={}, python=first.python))
        return found

    def points(self, machine: Machine) -> Sequence[Point]:
        """As PassSpec.pass_points."""
        outputs = self.tolerance.outputs or CEILING[getattr(torch, self.precision)]
        tolerance = self.tolerance.model_copy(update={"outputs": outputs})
        return self.pass_points(machine, Case, timing=self.timing, tolerance=tolerance, settings=self.settings)


class ToolchainFailed(Exception):  # noqa: N818 - the state it leads to is "error"; the name says which
    """The pass dies or raises under a toolchain, or disagrees with the oracle there."""


class OutputsDiffer(Exception):  # noqa: N818 - the state it leads to is "error"; the name says which
    """The outputs under two toolchains differ by more than the tolerance."""


def measure(case: Case, beat: Beat) -> Measurement:
    """Run the pass under both toolchains and compare them. Raises ToolchainFailed, OutputsDiffer, MemoryError."""
    with tempfile.TemporaryDirectory(prefix="toolchain-") as name:
        folder = Path(name)
        beat("inputs")
        torch.manual_seed(case.seed)  # made once: generators may differ between versions of PyTorch
        tokens = torch.randint(case.model.vocab_size, (case.batch, case.seq_len + 1))
        torch.save({"weights": NSATransformer(case.model).state_dict(), "tokens": tokens}, folder / "inputs.pt")
        first, other = (run_under(case, number, folder, beat) for number in (1, 2))
        beat("comparison")
        relative, equal = compare_outputs(*(_load(folder / f"outputs-{number}.pt") for number in (1, 2)))
    metrics = comparison_metrics(first, other, relative, equal)
    found = differences(case, {metric.name: metric.value for metric in metrics}, first.route, other.route)
    wrong = _other_outputs(case, relative)
    files = {f"lock-{number}.txt": lock_file(case, number, run.environment) for number, run in ((1, first), (2, other))}
    files["comparison.txt"] = comparison_table(case, first, other, metrics, [wrong, *found] if wrong else found)
    if wrong:  # an error keeps no files: what explains it is printed
        print(*(f"{name}:\n{text}" for name, text in files.items()), sep="\n", file=sys.stderr)
        raise OutputsDiffer(wrong)
    for difference in found:
        reporter(beat).warn(f"{case.toolchain_name(2)} against {case.toolchain_name(1)}: {difference}")
    method = "changes of time and memory beyond the tolerance, and other kernels"
    counted = Metric.of(DIFFERENCES, len(found), method=method)
    environment = {name: value for name, value in other.environment.items() if name != "distributions"}
    return Measurement((*metrics, counted), other.route, environment, files)


def run_under(case: Case, number: int, folder: Path, beat: Beat) -> Measurement:
    """Measure the pass under the first (1) or second (2) toolchain, in a process whose deadlines are the point's.

    The folder has the inputs and gets the outputs.
    """
    name, toolchain = case.toolchain_name(number), case.toolchains[number - 1]
    files = {"inputs": str(folder / "inputs.pt"), "outputs": str(folder / f"outputs-{number}.pt")}
    config = {"case": case.model_dump(mode="json"), "gpu_share": gpu_share(case.device), **files}
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
    """Measure one pass in the process of a toolchain; its outputs go to a file."""
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
        _, measured = measure_call(case, made, beat, first_run=first_run, timing=case.timing, throughput=None)
    except Exception:
        traceback.print_exc()  # which the point prints, too
        raise
    packages = {each.metadata["Name"]: each.version for each in metadata.distributions() if each.metadata["Name"]}
    packages = dict(sorted(packages.items(), key=lambda item: item[0].lower()))
    environment = {**measured.environment, "settings": settings, "distributions": packages}
    return Measured(replace(measured, environment=environment, files={}))


def compare_outputs(first: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> tuple[dict[str, float], int]:
    """Differences of tensors by name, relative to the first's norm; and how many are equal bit for bit.

    One that is not finite, or that only one side has, differs infinitely.
    """
    relative, equal = {}, 0
    for name in dict.fromkeys([*first, *other]):
        relative[name] = float("inf")
        if name in first and name in other and first[name].shape == other[name].shape:
            equal += torch.equal(first[name], other[name])
            norm = first[name].double().norm().item()
            difference = (other[name].double() - first[name].double()).norm().item() / (norm or 1.0)
            relative[name] = difference if difference == difference else float("inf")
    return relative, equal


def _other_outputs(case: Case, relative: Mapping[str, float]) -> str | None:
    """Names of the tensors that differ by more than the tolerance, in a sentence; None if none does."""
    allowed = case.tolerance.outputs or 0.0
    beyond = {name: x for name, x in relative.items() if not x <= allowed}
    if not beyond:
        return None
    worst = sorted(beyond, key=lambda name: -beyond[name])[:_MOST_NAMED]
    named = ", ".join(f"{name} by {beyond[name]:.1e}" for name in worst)
    return (
        f"{case.toolchain_name(2)}: {len(beyond)} of {len(relative)} outputs differ from those of "
        f"{case.toolchain_name(1)} by more than {allowed:.1e} of their norm: {named}"
    )


def differences(
    case: Case, values: Mapping[str, float], first: Mapping[str, str], other: Mapping[str, str]
) -> list[str]:
    """Changes of time and memory beyond their tolerance, and other routes: a phrase each."""
    time, memory = case.tolerance.time_percent, case.tolerance.memory_percent
    found = []
    for word, quantity, allowed in (("time", TIME_CHANGE, time), ("peak memory", MEMORY_CHANGE, memory)):
        if abs(change := values[quantity.name]) > allowed:
            found.append(f"{word} {change:+.1f} %, beyond {allowed:g} %")
    for branch in dict.fromkeys([*first, *other]):
        before, now = (route.get(branch, "nothing") for route in (first, other))
        if before != now:
            found.append(f"branch {branch} ran {now}, not {before}")
    return found


def comparison_metrics(
    first: Measurement, other: Measurement, relative: Mapping[str, float], equal: int
) -> list[Metric]:
    """Metrics of the second toolchain, its changes against the first, and the first's time and memory."""
    metrics, before = ({metric.name: metric for metric in run.metrics} for run in (other, first))
    time, memory = TIME.name, PEAK_EXTRA_MEMORY.name
    changes = {name: 100 * (metrics[name].value / before[name].value - 1) for name in (time, memory)}
    method = "relative to the first toolchain's, on the same device in the same point"
    norms = "largest norm of a difference relative to the norm, of the loss and all gradients of the first run"
    share = 100 * equal / len(relative)
    return [
        *metrics.values(),
        replace(before[time], name=FIRST_TIME.name),
        Metric.of(TIME_CHANGE, changes[time], method=f"medians; {method}"),
        replace(before[memory], name=FIRST_MEMORY.name),
        Metric.of(MEMORY_CHANGE, changes[memory], method=method),
        Metric.of(OUTPUT_DIFFERENCE, max(relative.values()), method=norms),
        Metric.of(TENSORS_EQUAL, share, method=f"{equal} of {len(relative)} tensors"),
    ]


def lock_file(case: Case, number: int, there: Mapping[str, Any]) -> str:
    """Text with interpreter, driver, variables and exact versions of all packages of a toolchain; pip reads it."""
    head = [case.toolchain_name(number), f"Python {there['python']}, {there['interpreter']}", there["platform"]]
    if "cuda" in there:
        head.append(f"CUDA {there['cuda']}, cuDNN {there['cudnn']}, driver {there['gpu'].get('driver', 'unknown')}")
    head += [f"{name} in effect: {value}" for name, value in there["settings"].items()]
    lines = [f"{name}=={version}" for name, version in there["distributions"].items()]
    return "\n".join([*(f"# {line}" for line in head), *lines, ""])


def comparison_table(
    case: Case, first: Measurement, other: Measurement, metrics: Sequence[Metric], found: Sequence[str]
) -> str:
    """Text of the comparison; `found` are the phrases of `differences`."""
    values = {metric.name: metric.value for metric in metrics}
    time, memory = values["first_time"], values["first_memory"]
    rows = [
        f"1: {case.toolchain_name(1)}",
        f"2: {case.toolchain_name(2)}",
        "",
        f"time         {time:12.3f} {values[TIME.name]:12.3f} ms   {values['time_change']:+7.1f} %",
        f"peak memory  {memory:12.3f} {values[PEAK_EXTRA_MEMORY.name]:12.3f} MiB  {values['memory_change']:+7.1f} %",
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
