"""Check of a node before anything is measured: interpreters, files, and the effects of environment variables."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from jobs.hardware import variables
from jobs.process.child import Child, DeadlineWatch
from jobs.process.messages import Probe, ProbedMachine
from jobs.schema.point import Machine
from jobs.schema.states import PointState
from jobs.specs.kinds import kind_module
from jobs.specs.spec import JobSpec, env_text
from orchestrator.errors import UserError
from orchestrator.execute.supervisor import ANSWER, process_variables

MOST_A_CORE = 16  # points at a time, however small a share they ask for: each is a process, which imports torch
_NAMED = re.compile(r"[a-z_]+: ")  # a reason that begins with its field
_PROBE_S = 300.0
_LACKS = re.compile(r"No module named '([^'.]+)")


@dataclass(frozen=True)
class Requirements:
    """Requirements of a spec's points, to be checked where they will run."""

    device: Literal["auto", "cpu", "cuda"]
    kind: str
    envs: Sequence[Mapping[str, str]]  # the environments of the points
    pythons: Sequence[str | None]  # paths of their interpreters; None: this process's own
    paths: Mapping[str, str]  # files and folders that they read, by the spec's field; relative to the working directory
    gpus: float | None  # of a point; None: one on a CUDA device
    versioned: bool = False  # whether the kind has versions of its own to look for

    @classmethod
    def of(cls, spec: JobSpec) -> Requirements:
        paths = {field: str(path) for field, path in spec.paths().items()}
        versioned = hasattr(kind_module(spec.kind), "versions")
        return cls(spec.device, spec.kind, spec.env, spec.python, paths, spec.resources.num_gpus, versioned)


def gpus_per_point(spec: JobSpec, machine: Machine) -> float:
    """GPUs for each point: the spec's num_gpus, else 1 on a CUDA device and 0 on a CPU."""
    num_gpus = spec.resources.num_gpus
    return num_gpus if num_gpus is not None else float(machine.device == "cuda")


def missing(required: Requirements) -> list[str]:
    """Mistakes in the spec's paths and interpreters as this node has them: field, value, mistake, fix."""
    node, mistakes = socket.gethostname(), []
    for name, text in required.paths.items():
        if (problem := _unreadable(Path(text))) is not None:
            fix = "put it there, or give a path that every node has"
            mistakes.append(f"{name}: {text!r}: {problem} on node {node}; {fix}")
    for python in filter(None, required.pythons):
        if not (os.path.isfile(python) and os.access(python, os.X_OK)):
            problem = "is not a program that may be run" if os.path.exists(python) else "does not exist"
            fix = "make the environment there, or give an interpreter that every node has"
            mistakes.append(f"python: {python!r}: {problem} on node {node}; {fix}")
    return mistakes


def check(required: Requirements, gpus: str | None = None) -> dict[str | None, Machine]:
    """The machine as each interpreter of the spec sees it, once all of the spec's environments have an effect.

    `gpus` is the processes' CUDA_VISIBLE_DEVICES; None keeps this process's. Raises UserError: one line a mistake.
    """
    mistakes = missing(required)
    machines: dict[str | None, Machine] = {}
    device = required.device
    for python in () if mistakes else required.pythons:
        try:
            machines[python], without_effect = _look(replace(required, device=device), gpus, python)
        except UserError as err:
            mistakes.append(str(err))
            continue
        mistakes += without_effect
        device = machines[python].device  # all points of a run use the same
    if mistakes:
        raise UserError("\n".join(dict.fromkeys(mistakes)))
    return machines


def _look(required: Requirements, gpus: str | None, python: str | None) -> tuple[Machine, list[str]]:
    """The machine under one interpreter, and mistakes of the environments; starts a process for each of these.

    Raises UserError if no point can run here at all.
    """
    node = f"node {socket.gethostname()}" + (f" under {python}" if python else "")
    machine, mistakes = None, []
    for env in required.envs:
        try:
            found = _probe(required, gpus, python, env, [*env])
        except UserError as err:
            try:
                machine = machine or _probe(required, gpus, python, {}, []).machine
            except UserError as plain:  # it is not the environment's fault
                raise UserError(_unusable(str(plain), required.device, python)) from None
            name = f"env.{next(iter(env))}" if len(env) == 1 else "env"
            value = next(iter(env.values())) if len(env) == 1 else env_text(env)
            mistakes.append(f"{name}: {value!r}: a process with it fails on {node} ({err}); mend it")
            continue
        machine = machine or found.machine
        for name, value in env.items():
            reason = found.refused.get(name)
            if reason is None and name in variables.COMPARABLE:
                without = _probe(required, gpus, python, {**env, name: None}, [name]).settings[name]
                if found.settings[name] == without:
                    reason = f"without it, {without} is in effect as well"
            if reason is not None:
                mistakes.append(f"env.{name}: {value!r}: has no effect on {node}: {reason}; remove it")
    assert machine is not None
    return machine, mistakes


def _probe(
    required: Requirements, gpus: str | None, python: str | None, env: Mapping[str, str | None], names: Sequence[str]
) -> ProbedMachine:
    """The answer of a point's process. Raises UserError: its bare reason why it cannot answer, in a line."""
    kind = required.kind if python is not None or required.versioned else None
    try:
        child = Child(ANSWER, env={**process_variables(1, gpus), **env}, python=python)
    except OSError as err:
        raise UserError(str(err)) from None
    try:
        child.send(Probe(required.device, kind, tuple(names), required.gpus))
        watch, ended = DeadlineWatch(child, startup_s=_PROBE_S), None
        while ended is None:
            _, ended = watch.step()
        if isinstance(ended.result, ProbedMachine):
            return ended.result
        said = child.tail().strip().splitlines() if ended.state is PointState.CRASH else []
        raise UserError([str(ended.reason).removeprefix("ValueError: "), *said][-1])
    finally:
        child.discard()


def _unusable(reason: str, device: str, python: str | None) -> str:
    """Why no point can run here: field, value, mistake, fix."""
    node = socket.gethostname()
    if python is None and _NAMED.match(reason):
        return reason
    if python is None:
        fix = "see what ends processes there (memory, a driver), then submit again"
        return f"device: {device!r}: cannot be looked at on node {node}: {reason}; {fix}"
    if lacks := _LACKS.search(reason):
        fix = f"install it with {python} -m pip install, or nsa-bench with all that it needs"
        return f"python: {python!r}: lacks the package {lacks[1]} on node {node}; {fix}"
    reason, fix = reason.removeprefix("device: "), "give one of Python 3.11 or newer with the packages of nsa-bench"
    return f"python: {python!r}: cannot measure points on node {node} ({reason}); {fix}"


def _unreadable(path: Path) -> str | None:
    if not os.path.exists(path):  # Path.exists raises below a folder that may not be searched
        return "does not exist"
    if not os.access(path, os.R_OK | os.X_OK if path.is_dir() else os.R_OK):
        return "may not be read"
    return "is an empty folder" if path.is_dir() and next(os.scandir(path), None) is None else None
