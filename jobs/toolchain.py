"""A model's pass under two toolchains, interpreters or settings: are its outputs, its memory and its speed the same?

A point is one pass under two toolchains, the first of the spec and another: each in a process of its own, one after the
other on one device, with the same weights and tokens. Each is compared with the oracle before it is timed.
"""

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
from jobs.measure.passes import ModelPass, PassCase, PassSpec
from jobs.process import messages
from jobs.process.child import Channel, Child, DeadlineWatch
from jobs.process.memory_limit import gpu_share
from jobs.process.messages import Measured, MeasurePoint
from jobs.process.reporter import ProcessReporter
from jobs.schema.point import STARTING, Beat, EndedPoint, Machine, Measurement, Metric, Point, reporter
from jobs.schema.quantities import AGREEMENT, MEMORY, PEAK_EXTRA_MEMORY, TELEMETRY, TIME, Better, Quantity, Role
from jobs.schema.states import PointState
from jobs.specs.spec import Strict, env_text
from nsa_core.model import NSATransformer

LOWER, HEADLINE = Better.LOWER, Role.HEADLINE
DIFFERENCES = Quantity("differences", "1", "Differences beyond their tolerance", "differences", LOWER, HEADLINE)
OUTPUT_DIFFERENCE = Quantity(
    "output_difference", "1", "Largest difference of an output", "output difference", LOWER, HEADLINE
)
TENSORS_EQUAL = Quantity("tensors_equal", "%", "Outputs equal bit for bit", better=Better.HIGHER)
TIME_CHANGE = Quantity("time_change", "%", "Time against the first toolchain's", "time change", role=HEADLINE)
MEMORY_CHANGE = Quantity("memory_change", "%", "Memory against the first toolchain's", "memory change", role=HEADLINE)
FIRST_TIME = Quantity("first_time", "ms", "Time under the first toolchain", better=LOWER)
FIRST_MEMORY = Quantity("first_memory", "MiB", "Peak memory beyond inputs under the first", better=LOWER)
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

    tolerance: ToleranceSpec
    settings: list[str]  # names of the variables that the spec sets
    toolchains: tuple[Toolchain, Toolchain] = (Toolchain(), Toolchain())
    versions: Mapping[str, str] = {}  # of the second interpreter, a part of the key: the first's are already


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
        """Points of every toolchain but the first, each of which runs both: in processes of its own process, which has
        the first interpreter."""
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
        outputs = self.tolerance.outputs or CEILING[getattr(torch, self.precision)]
        tolerance = self.tolerance.model_copy(update={"outputs": outputs})
        return self.pass_points(machine, Case, timing=self.timing, tolerance=tolerance, settings=self.settings)


class ToolchainFailed(Exception):  # noqa: N818 - the state it leads to is "error"; the name says which
    """The pass fails under a toolchain, or disagrees with the oracle there."""


class OutputsDiffer(Exception):  # noqa: N818 - the state it leads to is "error"; the name says which
    """The outputs under two toolchains differ by more than the tolerance."""


def measure(case: Case, beat: Beat) -> Measurement:
    """Run the pass under both toolchains and compare them. Raises ToolchainFailed, OutputsDiffer, MemoryError."""
    names = []
    for number, toolchain in enumerate(case.toolchains, 1):
        words = [toolchain.python or "", env_text(toolchain.env) or ""]
        names.append(f"toolchain {number} ({' '.join(filter(None, words)) or 'as it is'})")
    with tempfile.TemporaryDirectory(prefix="toolchain-") as name:
        folder = Path(name)
        beat("inputs")
        torch.manual_seed(case.seed)  # made once: generators may differ between versions of PyTorch
        tokens = torch.randint(case.model.vocab_size, (case.batch, case.seq_len + 1))
        torch.save({"weights": NSATransformer(case.model).state_dict(), "tokens": tokens}, folder / "inputs.pt")
        first, other = (run_under(case, number, names[number - 1], folder, beat) for number in (1, 2))
        beat("comparison")
        relative, equal = compare_outputs(*(_load(folder / f"outputs-{number}.pt") for number in (1, 2)))
    metrics, found = compare_figures(case, first, other)
    norms = "largest norm of a difference relative to the norm, of the loss and all gradients of the first run"
    metrics.append(Metric.of(OUTPUT_DIFFERENCE, max(relative.values()), method=norms))
    share = 100 * equal / len(relative)
    metrics.append(Metric.of(TENSORS_EQUAL, share, method=f"{equal} of {len(relative)} tensors"))
    allowed = case.tolerance.outputs or 0.0
    beyond = sorted((name for name, x in relative.items() if not x <= allowed), key=lambda name: -relative[name])
    wrong = (
        f"{names[1]}: {len(beyond)} of {len(relative)} outputs differ from those of {names[0]} by more than "
        f"{allowed:.1e} of their norm: {', '.join(f'{x} by {relative[x]:.1e}' for x in beyond[:_MOST_NAMED])}"
    )
    files = {f"lock-{n}.txt": lock_file(names[n - 1], run.environment) for n, run in ((1, first), (2, other))}
    files["comparison.txt"] = comparison_table(names, first, other, metrics, [wrong, *found] if beyond else found)
    if beyond:  # an error keeps no files: what explains it is printed
        print(*(f"{name}:\n{text}" for name, text in files.items()), sep="\n", file=sys.stderr)
        raise OutputsDiffer(wrong)
    for difference in found:
        reporter(beat).warn(f"{names[1]} against {names[0]}: {difference}")
    method = "changes of time and memory beyond the tolerance, and other kernels"
    counted = Metric.of(DIFFERENCES, len(found), method=method)
    environment = {name: value for name, value in other.environment.items() if name != "distributions"}
    return Measurement((*metrics, counted), other.route, environment, files)


def run_under(case: Case, number: int, name: str, folder: Path, beat: Beat) -> Measurement:
    """Measure the pass under the first (1) or second (2) toolchain, in a process whose deadlines are the point's. The
    folder has the inputs and gets the outputs."""
    toolchain = case.toolchains[number - 1]
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
        if isinstance(ended.result, Measured):
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
        _, measured = measure_call(case, made, beat, first_run=first_run, throughput=None)
    except Exception:
        traceback.print_exc()  # which the point prints, too
        raise
    packages = {each.metadata["Name"]: each.version for each in metadata.distributions() if each.metadata["Name"]}
    packages = dict(sorted(packages.items(), key=lambda item: item[0].lower()))
    environment = {**measured.environment, "settings": settings, "distributions": packages}
    return Measured(replace(measured, environment=environment, files={}))


def compare_outputs(first: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> tuple[dict[str, float], int]:
    """Differences of tensors by name, relative to the first's norm, infinite for one that is not finite or that only
    one side has; and how many are equal bit for bit."""
    relative, equal = dict.fromkeys([*first, *other], float("inf")), 0
    for name in first.keys() & other.keys():
        one, two = first[name].double(), other[name].double()
        if one.shape == two.shape:
            equal += torch.equal(first[name], other[name])
            difference = (two - one).norm().item() / (one.norm().item() or 1.0)
            relative[name] = difference if difference == difference else float("inf")
    return relative, equal


def compare_figures(case: Case, first: Measurement, other: Measurement) -> tuple[list[Metric], list[str]]:
    """The second toolchain's metrics with its changes of time and memory; and a phrase for each change beyond the
    tolerance, and for each branch that ran another kernel."""
    before, now = ({metric.name: metric for metric in run.metrics} for run in (first, other))
    metrics, found = list(other.metrics), []
    method = "relative to the first toolchain's, on the same device in the same point"
    for word, quantity, of_first, change, allowed in (
        ("time", TIME, FIRST_TIME, TIME_CHANGE, case.tolerance.time_percent),
        ("peak memory", PEAK_EXTRA_MEMORY, FIRST_MEMORY, MEMORY_CHANGE, case.tolerance.memory_percent),
    ):
        percent = 100 * (now[quantity.name].value / before[quantity.name].value - 1)
        metrics += [replace(before[quantity.name], name=of_first.name), Metric.of(change, percent, method=method)]
        if abs(percent) > allowed:
            found.append(f"{word} {percent:+.1f} %, beyond {allowed:g} %")
    for branch in dict.fromkeys([*first.route, *other.route]):
        kernels = [run.route.get(branch, "nothing") for run in (first, other)]
        if kernels[0] != kernels[1]:
            found.append(f"branch {branch} ran {kernels[1]}, not {kernels[0]}")
    return metrics, found


def lock_file(name: str, there: Mapping[str, Any]) -> str:
    """Text with interpreter, driver, variables and exact versions of all packages of a toolchain; pip reads it."""
    head = [name, f"Python {there['python']}, {there['interpreter']}", there["platform"]]
    if "cuda" in there:
        head.append(f"CUDA {there['cuda']}, cuDNN {there['cudnn']}, driver {there['gpu'].get('driver', 'unknown')}")
    head += [f"{name} in effect: {value}" for name, value in there["settings"].items()]
    lines = [f"{name}=={version}" for name, version in there["distributions"].items()]
    return "\n".join([*(f"# {line}" for line in head), *lines, ""])


def comparison_table(
    names: Sequence[str], first: Measurement, other: Measurement, metrics: Sequence[Metric], found: Sequence[str]
) -> str:
    """Text of the comparison; `found` are its differences in words."""
    rows = [*(f"{number}: {name}" for number, name in enumerate(names, 1)), ""]
    rows += [f"{metric.name:20} {metric.value:12.6g} {metric.unit}" for metric in metrics]
    rows += ["", *(found or ["no difference beyond the tolerance"]), "", "packages that differ:"]
    before, after = (run.environment["distributions"] for run in (first, other))
    for name in sorted({*before, *after}, key=str.lower):
        if before.get(name) != after.get(name):
            rows.append(f"  {name}: {before.get(name, 'none')}, {after.get(name, 'none')}")
    return "\n".join([*rows, ""])
