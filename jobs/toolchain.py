"""A model's pass under two toolchains, interpreters or settings: are its outputs, its memory and its speed the same?

A point is one pass under two toolchains, the first of the spec and another: each in a process of its own, one after the
other on one device, with the same weights and tokens. Each is compared with the oracle before it is timed.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from jobs._comparison import (
    COMPARISON,
    DIFFERENCES,
    Outputs,
    compare_outputs,
    comparison_metrics,
    comparison_table,
    differences,
    lock_file,
    toolchain_name,
)
from jobs.hardware.environment import environment
from jobs.hardware.variables import effective
from jobs.measure.call import TimingSpec
from jobs.measure.check import CEILING
from jobs.measure.clock import TimingPlan, measure_time
from jobs.measure.memory import measure_peak, tensor_bytes
from jobs.measure.model_pass import ModelPass, PassCase, PassSpec, agree, model_of, pass_case
from jobs.measure.route import route_of
from jobs.process.trial import Limits, Toolchain, own_gpu_share, run_trial
from jobs.schema.point import Beat, Machine, Measurement, Metric, Point, reporter
from jobs.schema.quantities import AGREEMENT, MEMORY, TELEMETRY, TIME
from jobs.specs.fields import torch_dtype
from jobs.specs.spec import Strict
from nsa_core.model import NSATransformer

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
                found.append(replace(point, case=config, env={}, python=first.python))
        return found

    def points(self, machine: Machine) -> Sequence[Point]:
        """As PassSpec.pass_points."""
        points = self.pass_points(machine, PassCase)
        return [replace(point, case={**point.config, **self._own()}) for point in points]

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


def measure(config: Mapping[str, Any], beat: Beat) -> Measurement:
    """Run the pass under both toolchains and compare them.

    Raises:
        ToolchainFailed: it hangs, dies or raises under one of them, or disagrees with the oracle there.
        OutputsDiffer: its outputs are not the same.
        MemoryError: memory ran out under one of them.
    """
    with tempfile.TemporaryDirectory(prefix="toolchain-") as name:
        folder = Path(name)
        beat("inputs")
        _write_inputs(config, folder / "inputs.pt")
        first, other = (_run(config, number, folder, beat) for number in (1, 2))
        beat("comparison")
        outputs = compare_outputs(*(_load(folder / f"outputs-{number}.pt") for number in (1, 2)))
    metrics = comparison_metrics(first, other, outputs)
    values = {metric.name: metric.value for metric in metrics}
    found = differences(values, config["tolerance"], first["route"], other["route"])
    files = {f"lock-{number}.txt": lock_file(config, number, run) for number, run in ((1, first), (2, other))}
    wrong = _other_outputs(config, outputs)
    files["comparison.txt"] = comparison_table(config, first, other, values, [*([wrong] if wrong else []), *found])
    if wrong:  # an error keeps no files: what explains it is printed
        print(*(f"{name}:\n{text}" for name, text in files.items()), sep="\n", file=sys.stderr)
        raise OutputsDiffer(wrong)
    for difference in found:
        reporter(beat).warn(f"{toolchain_name(config, 2)} against {toolchain_name(config, 1)}: {difference}")
    method = "changes of time and memory beyond the tolerance, and other kernels"
    counted = Metric.of(DIFFERENCES, len(found), method=method)
    return Measurement((*metrics, counted), other["route"], other["environment"], files)


def _other_outputs(config: Mapping[str, Any], outputs: Outputs) -> str | None:
    """Names of the tensors that differ by more than the tolerance, in a sentence; None if none does."""
    allowed = config["tolerance"]["outputs"]
    beyond = {name: x for name, x in outputs.differences.items() if not x <= allowed}
    if not beyond:
        return None
    worst = sorted(beyond, key=lambda name: -beyond[name])[:_MOST_NAMED]
    named = ", ".join(f"{name} by {beyond[name]:.1e}" for name in worst)
    return (
        f"{toolchain_name(config, 2)}: {len(beyond)} of {len(outputs.differences)} outputs differ from those of "
        f"{toolchain_name(config, 1)} by more than {allowed:.1e} of their norm: {named}"
    )


def _write_inputs(config: Mapping[str, Any], path: Path) -> None:
    """Write weights and tokens, made once: generators may differ between versions of PyTorch."""
    torch.manual_seed(config["seed"])
    model = model_of(config)
    tokens = torch.randint(model.vocab_size, (config["batch"], config["seq_len"] + 1))
    torch.save({"weights": NSATransformer(model).state_dict(), "tokens": tokens}, path)


def _run(config: Mapping[str, Any], number: int, folder: Path, beat: Beat) -> Mapping[str, Any]:
    """Findings of `try_pass` under the first or second toolchain."""
    toolchain = Toolchain(**config["toolchains"][number - 1])
    name = toolchain_name(config, number)

    def told(phase: str, done: int = 0, total: int = 0) -> None:
        beat(f"{name}: {phase}", done, total)

    order = {**config, "inputs": str(folder / "inputs.pt"), "outputs": str(folder / f"outputs-{number}.pt")}
    limits = Limits(**config["limits"])
    share = own_gpu_share(config["device"])
    trial = run_trial("jobs.toolchain:try_pass", order, limits, told, share, toolchain)
    return trial.needed(name, ToolchainFailed)


def try_pass(config: Mapping[str, Any], beat: Beat) -> dict[str, Any]:
    """One pass in this process: its outputs to a file; its times, memory, route and packages as JSON.

    Raises:
        WrongResult: the attention disagrees with the oracle.
    """
    settings = effective(config["settings"])  # before anything else uses CUDA
    beat("check")
    agreement = agree(config)
    beat("inputs")
    trial = ModelPass(pass_case(config))
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


def _load(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)
