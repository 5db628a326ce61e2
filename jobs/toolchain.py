"""A model's pass under two toolchains, interpreters or settings: are its outputs, its memory and its speed the same?

A point is one pass under two toolchains, the first of the spec and another: each in a process of its own, one after the
other on one device, with the same weights and tokens. Each is compared with the oracle before it is timed.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from jobs._environments import env_text
from jobs._fields import TimingSpec, torch_dtype
from jobs._pass import ModelPass, PassSpec, agree, model_of
from jobs.measure.check import CEILING
from jobs.measure.clock import TimingPlan, measure_time
from jobs.measure.environment import environment
from jobs.measure.memory import measure_peak, tensor_bytes
from jobs.measure.route import route_of
from jobs.measure.stats import summarize
from jobs.measure.trial import End, Limits, Toolchain, own_gpu_share, run_trial
from jobs.measure.variables import effective
from jobs.point import Beat, Machine, Measurement, Metric, Point, reporter
from jobs.quantities import (
    AGREEMENT,
    MEMORY,
    PEAK_EXTRA_MEMORY,
    TELEMETRY,
    TIME,
    Better,
    Quantity,
    Role,
)
from jobs.spec import Strict
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


class Spec(PassSpec):
    """Lengths x passes x implementations of one model, under each toolchain but the first beside the first."""

    kind: Literal["toolchain"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe
    timing: TimingSpec = TimingSpec()
    tolerance: ToleranceSpec = ToleranceSpec()

    @model_validator(mode="after")
    def _two(self) -> Self:
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
                config = {
                    **point.config,
                    "toolchains": [asdict(first), asdict(other)],
                    "versions": dict(machines[other.python].fingerprint),  # a part of the key: the first's is already
                }
                found.append(replace(point, config=config, env={}, python=first.python))
        return found

    def _own(self) -> dict[str, Any]:
        tolerance = self.tolerance.model_dump(mode="json")
        if tolerance["outputs"] is None:
            tolerance["outputs"] = CEILING[torch_dtype(self.precision)]
        deadlines = self.deadlines
        return {
            "timing": self.timing.model_dump(mode="json"),
            "tolerance": tolerance,
            "limits": asdict(Limits(deadlines.startup_s, deadlines.heartbeat_s, deadlines.point_s)),
            "settings": self.settings,
        }


class ToolchainFailed(Exception):  # noqa: N818 - the state it leads to is "error"; the name says which
    """The pass does not run under a toolchain."""


class OutputsDiffer(Exception):  # noqa: N818 - the state it leads to is "error"; the name says which
    """The outputs under two toolchains differ by more than the tolerance."""


@dataclass(frozen=True)
class Outputs:
    """Comparison of the loss and the gradients.

    Attributes:
        differences: of each tensor, relative to its norm under the first toolchain.
        equal: number of tensors that are equal bit for bit.
    """

    differences: Mapping[str, float]
    equal: int

    @property
    def largest(self) -> float:
        return max(self.differences.values())


def measure(config: Mapping[str, Any], beat: Beat) -> Measurement:
    """Run the pass under both toolchains and compare them.

    Raises:
        ToolchainFailed: it hangs, dies or raises under one of them, or disagrees with the oracle there.
        OutputsDiffer: its outputs are not the same.
        MemoryError: memory ran out under one of them.
    """
    tolerance = config["tolerance"]
    with tempfile.TemporaryDirectory(prefix="toolchain-") as name:
        folder = Path(name)
        beat("inputs")
        _write_inputs(config, folder / "inputs.pt")
        first, other = (_run(config, number, folder, beat) for number in (1, 2))
        beat("comparison")
        outputs = compare_outputs(*(_load(folder / f"outputs-{number}.pt") for number in (1, 2)))
    beyond = {name: x for name, x in outputs.differences.items() if not x <= tolerance["outputs"]}
    if beyond:
        worst = sorted(beyond, key=lambda name: -beyond[name])[:_MOST_NAMED]
        named = ", ".join(f"{name} by {beyond[name]:.1e}" for name in worst)
        raise OutputsDiffer(
            f"{_name(config, 2)}: {len(beyond)} of {len(outputs.differences)} outputs differ from those of "
            f"{_name(config, 1)} by more than {tolerance['outputs']:.1e} of their norm: {named}"
        )
    metrics = _metrics(first, other, outputs)
    values = {metric.name: metric.value for metric in metrics}
    found = differences(values, tolerance, first["route"], other["route"])
    for difference in found:
        reporter(beat).warn(f"{_name(config, 2)} against {_name(config, 1)}: {difference}")
    method = "changes of time and memory beyond the tolerance, and other kernels"
    counted = Metric.of(DIFFERENCES, len(found), method=method)
    files = {f"lock-{number}.txt": _lock(config, number, run) for number, run in ((1, first), (2, other))}
    files["comparison.txt"] = _table(config, first, other, values, found)
    return Measurement((*metrics, counted), other["route"], other["environment"], files)


def _write_inputs(config: Mapping[str, Any], path: Path) -> None:
    """Write weights and tokens, made once: generators may differ between versions of PyTorch."""
    torch.manual_seed(config["seed"])
    model = model_of(config)
    tokens = torch.randint(model.vocab_size, (config["batch"], config["seq_len"] + 1))
    torch.save({"weights": NSATransformer(model).state_dict(), "tokens": tokens}, path)


def _run(config: Mapping[str, Any], number: int, folder: Path, beat: Beat) -> Mapping[str, Any]:
    """Findings of `try_pass` under the first or second toolchain."""
    toolchain = Toolchain(**config["toolchains"][number - 1])
    name = _name(config, number)

    def told(phase: str, done: int = 0, total: int = 0) -> None:
        beat(f"{name}: {phase}", done, total)

    order = {**config, "inputs": str(folder / "inputs.pt"), "outputs": str(folder / f"outputs-{number}.pt")}
    limits = Limits(**config["limits"])
    share = own_gpu_share(config["device"])
    trial = run_trial("jobs.toolchain:try_pass", order, limits, told, share, toolchain)
    if trial.end is End.OK:
        return trial.found
    print(f"{name}:\n{trial.stderr}", file=sys.stderr)
    if trial.end is End.OOM:
        raise MemoryError(f"{name}: {trial.reason}")
    raise ToolchainFailed(f"{name}: {trial.end}: {trial.reason}")


def try_pass(config: Mapping[str, Any], beat: Beat) -> dict[str, Any]:
    """One pass in this process: its outputs to a file; its times, memory, route and packages as JSON.

    Raises:
        WrongResult: the attention disagrees with the oracle.
    """
    settings = effective(config["settings"])  # before anything else uses CUDA
    beat("check")
    agreement = agree(config)
    beat("inputs")
    trial = ModelPass(config)
    given = _load(Path(config["inputs"]))
    trial.model.load_state_dict(given["weights"])
    tokens = given["tokens"].to(trial.device)
    trial.inputs = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    del given, tokens
    beat("first run")
    losses: list[Tensor] = []
    route = route_of(lambda: losses.append(trial.run().detach()))
    grads = {f"gradient of {name}": p.grad for name, p in trial.model.named_parameters() if p.grad is not None}
    torch.save({name: x.cpu() for name, x in {"loss": losses[0], **grads}.items()}, config["outputs"])
    del grads

    def call() -> object:
        trial.clear()
        return trial.run()

    timing = measure_time(call, trial.device, TimingPlan(**config["timing"]), beat)
    beat("memory")
    trial.clear()
    peak = measure_peak(trial.run, trial.device, tensor_bytes(trial.resident))
    return {
        "samples_ms": timing.samples_ms,
        "method": timing.method,
        "metrics": [asdict(metric) for metric in (*peak.metrics(), *agreement.metrics())],
        "route": route,
        "environment": {**environment(trial.device), "settings": settings},
        "packages": packages(),
    }


def packages() -> dict[str, str]:
    """Versions of all distributions that this interpreter finds, by name."""
    found = {d.metadata["Name"]: d.version for d in metadata.distributions() if d.metadata["Name"]}
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


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
    values: Mapping[str, float], tolerance: Mapping[str, float], first: Mapping[str, str], other: Mapping[str, str]
) -> list[str]:
    """Changes of time and memory beyond their tolerance, and other routes: a phrase each."""
    found = []
    for name, word in (("time", "time"), ("memory", "peak memory")):
        change, allowed = values[f"{name}_change"], tolerance[f"{name}_percent"]
        if abs(change) > allowed:
            found.append(f"{word} {change:+.1f} %, beyond {allowed:g} %")
    for branch in dict.fromkeys([*first, *other]):
        kernels = first.get(branch, "nothing"), other.get(branch, "nothing")
        if kernels[0] != kernels[1]:
            found.append(f"branch {branch} ran {kernels[1]}, not {kernels[0]}")
    return found


def _metrics(first: Mapping[str, Any], other: Mapping[str, Any], outputs: Outputs) -> list[Metric]:
    """Metrics of the second toolchain, and beside those of the first."""
    kept = [Metric(**{**metric, "samples": tuple(metric["samples"])}) for metric in other["metrics"]]
    time, before = (summarize(TIME, run["samples_ms"], run["method"]) for run in (other, first))
    memory = next(metric for metric in kept if metric.name == PEAK_EXTRA_MEMORY.name)
    held = next(metric for metric in first["metrics"] if metric["name"] == PEAK_EXTRA_MEMORY.name)
    method = "relative to the first toolchain's, on the same device in the same point"
    norms = "largest norm of a difference relative to the norm, of the loss and all gradients of the first run"
    share = 100 * outputs.equal / len(outputs.differences)
    return [
        time,
        replace(before, name=FIRST_TIME.name),
        Metric.of(TIME_CHANGE, 100 * (time.value / before.value - 1), method=f"medians; {method}"),
        *kept,
        Metric.of(FIRST_MEMORY, held["value"], method=held["method"]),
        Metric.of(MEMORY_CHANGE, 100 * (memory.value / held["value"] - 1), method=method),
        Metric.of(OUTPUT_DIFFERENCE, outputs.largest, method=norms),
        Metric.of(TENSORS_EQUAL, share, method=f"{outputs.equal} of {len(outputs.differences)} tensors"),
    ]


def _name(config: Mapping[str, Any], number: int) -> str:
    """A toolchain in words."""
    toolchain = Toolchain(**config["toolchains"][number - 1])
    words = [toolchain.python or "", env_text(toolchain.env) or ""]
    return f"toolchain {number} ({' '.join(filter(None, words)) or 'as it is'})"


def _lock(config: Mapping[str, Any], number: int, run: Mapping[str, Any]) -> str:
    """Interpreter, driver, variables and exact versions of all packages of a toolchain; pip reads it."""
    there = run["environment"]
    head = [_name(config, number), f"Python {there['python']}, {there['interpreter']}", there["platform"]]
    if "cuda" in there:
        head.append(f"CUDA {there['cuda']}, cuDNN {there['cudnn']}, driver {there['gpu'].get('driver', 'unknown')}")
    head += [f"{name} in effect: {value}" for name, value in there["settings"].items()]
    lines = [f"{name}=={version}" for name, version in run["packages"].items()]
    return "\n".join([*(f"# {line}" for line in head), *lines, ""])


def _table(
    config: Mapping[str, Any],
    first: Mapping[str, Any],
    other: Mapping[str, Any],
    values: Mapping[str, float],
    found: Sequence[str],
) -> str:
    """The comparison as text."""
    rows = [
        f"1: {_name(config, 1)}",
        f"2: {_name(config, 2)}",
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
    versions = first["packages"], other["packages"]
    for name in sorted({*versions[0], *versions[1]}, key=str.lower):
        before, after = (each.get(name, "none") for each in versions)
        if before != after:
            rows.append(f"  {name}: {before}, {after}")
    return "\n".join([*rows, ""])


def _load(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)
