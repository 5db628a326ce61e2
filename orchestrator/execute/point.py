"""The process that a point is measured in: answers the commands of its supervisor (jobs.process.child)."""

import contextlib
import gc
import importlib
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jobs.hardware import variables
from jobs.process.child import Channel, write_files
from jobs.process.memory_limit import memory_limit
from jobs.process.messages import Command, Environment, Event, Measured, MeasurePoint, Probe, ProbedMachine
from jobs.process.reporter import ProcessReporter
from jobs.schema.point import Interrupted, Measurement, Surroundings
from jobs.schema.quantities import Quantities
from jobs.specs.kinds import kind_module
from jobs.training.errors import noting_sigterm


def answer(command: Command, channel: Channel) -> Event:
    """Measure a point, or look at the machine. An exception is the point's failure."""
    match command:
        case MeasurePoint():
            return measure_point(command, channel)
        case Probe():
            return _probe(command)
    raise TypeError(f"{type(command).__name__}: is no command for a point's process")


def measure_point(command: MeasurePoint, channel: Channel) -> Measured:
    """Import the kind, send the environment, measure under the memory limit, and check the metrics."""
    launcher, channel.explain = None, dict
    with contextlib.ExitStack() as block:
        with noting_sigterm() as sigterm:  # imports take seconds
            kind = kind_module(command.kind)
            for name in getattr(kind, "IMPORTS", ()):
                importlib.import_module(name)
            if not gc.get_freeze_count():  # else each collection looks through PyTorch's objects, for 0.1 s a point
                gc.freeze()
            declared = Quantities(kind.QUANTITIES)
            if command.cluster is None:
                channel.send(Environment(describe(command.device, command.settings)))
                block.enter_context(memory_limit(command.device, command.memory_bytes))
            else:  # the ranks have environments and limits of their own
                from orchestrator.execute.ray_launcher import RayLauncher

                launcher = RayLauncher(command, command.cluster, channel.send)
                channel.explain = launcher.agents.explain
            surroundings = Surroundings(command.checkpoints, command.key, launcher)
            units = {quantity.name: quantity.unit for quantity in declared if not quantity.name.endswith("*")}
            beat = ProcessReporter(channel.send, surroundings, units=units)
            block.callback(beat.close)
        if sigterm.is_set():
            raise Interrupted("SIGTERM came before the measurement had begun: nsa submit SPEC --resume RUN")
        case = kind.Case.model_validate(command.config) if hasattr(kind, "Case") else command.config
        measurement: Measurement = kind.measure(case, beat)
    if launcher is not None:
        measurement = launcher.with_gpu_metrics(measurement)
    _check(measurement, declared)
    return Measured(replace(measurement, files={}), write_files(measurement.files))


def describe(device: str, settings: Sequence[str]) -> dict[str, Any]:
    """This process's environment, on PyTorch's `device`, with the effective values of the variables in `settings`.

    Without these it is {} for a kind without torch.
    """
    environment: dict[str, Any] = {}
    try:
        if settings:  # before anything else uses CUDA: the point's process is as it will be measured
            environment["settings"] = variables.effective(settings)
        if (torch := sys.modules.get("torch")) is not None:
            from jobs.hardware.environment import environment as measured_environment

            environment |= measured_environment(torch.device(device))
    except Exception as err:
        environment["unknown"] = f"{type(err).__name__}: {err}"
    return environment


def _check(measurement: Measurement, declared: Quantities) -> None:
    """Raise ValueError for a metric that is not as declared, not finite, or there twice."""
    names = Counter(metric.name for metric in measurement.metrics)
    for metric in measurement.metrics:
        if names[metric.name] > 1:
            raise ValueError(f"metric {metric.name}: is there {names[metric.name]} times; return one of each name")
        unit = declared.of(metric.name, "").unit
        if unit != metric.unit:
            problem = f"is declared in {unit}" if unit else "is not declared"
            raise ValueError(f"metric {metric.name} in {metric.unit}: {problem}; mend the kind's QUANTITIES")
        if not all(map(math.isfinite, (metric.value, *metric.samples))):
            raise ValueError(f"metric {metric.name} is not finite (value {metric.value}); a failure is not a number")


def _probe(command: Probe) -> ProbedMachine:
    """The machine, with the kind's own versions, and the effects of environment variables."""
    from jobs.hardware.machine import probe

    machine = probe(command.device)
    if command.kind is not None:
        versions = getattr(kind_module(command.kind), "versions", dict)()
        machine = replace(machine, fingerprint={**machine.fingerprint, **versions})
    if not command.settings:
        return ProbedMachine(machine)
    importlib.import_module("torch")  # which rejects wrong values of its own variables

    gpus = float(machine.device == "cuda") if command.gpus is None else command.gpus
    reasons = {name: variables.refusal(name, machine.device, gpus) for name in command.settings}
    effective = variables.effective([name for name, reason in reasons.items() if reason is None])
    return ProbedMachine(machine, effective, {name: reason for name, reason in reasons.items() if reason})
