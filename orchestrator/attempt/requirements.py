"""Check of a node before anything is measured: interpreters, files, and the effects of environment variables."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jobs.hardware import variables
from jobs.schema.point import Machine
from jobs.specs.environments import env_text
from orchestrator.attempt import protocol
from orchestrator.attempt.supervisor import ProbeError, probe
from orchestrator.messages import Requirements

_NAMED = re.compile(r"[a-z_]+: ")  # a reason that begins with its field
_LACKS = re.compile(r"No module named '([^'.]+)")


def missing(wanted: Requirements) -> list[str]:
    """Mistakes in the spec's paths and interpreters as this node has them: field, value, mistake, fix."""
    found = []
    for name, text in wanted.paths.items():
        if (problem := _unreadable(Path(text))) is not None:
            fix = "put it there, or give a path that every node has"
            found.append(f"{name}: {text!r}: {problem} on node {_node()}; {fix}")
    for python in wanted.pythons:
        if python is not None and (problem := _not_a_program(Path(python))) is not None:
            fix = "make the environment there, or give an interpreter that every node has"
            found.append(f"python: {python!r}: {problem} on node {_node()}; {fix}")
    return found


def lacking(wanted: Requirements) -> list[str]:
    """Mistakes as `missing` finds them, and interpreters that are here but cannot measure; starts a child for each."""
    found = missing(wanted)
    for python in filter(None, () if found else wanted.pythons):
        try:
            _Interpreter(wanted, "cpu", "", python).check({})
        except ProbeError as err:
            found.append(str(err))
    return found


def check(wanted: Requirements, gpus: str | None = None) -> dict[str | None, Machine]:
    """The machine as each interpreter of the spec finds it, once all of the spec's environments have an effect.

    Args:
        gpus: the children's CUDA_VISIBLE_DEVICES; None keeps this process's.

    Raises:
        ProbeError: one line for each mistake: field, value, mistake, fix.
    """
    if faults := missing(wanted):
        raise ProbeError("\n".join(faults))
    machines: dict[str | None, Machine] = {}
    device = wanted.device
    for python in wanted.pythons:
        interpreter = _Interpreter(wanted, device, gpus, python)
        try:
            for env in wanted.envs:
                interpreter.check(env)
        except ProbeError as err:
            faults.append(str(err))
            continue
        faults += interpreter.faults
        assert interpreter.machine is not None
        machines[python] = interpreter.machine
        device = interpreter.machine.device  # all points of a run use the same
    if faults:
        raise ProbeError("\n".join(dict.fromkeys(faults)))
    return machines


@dataclass
class _Interpreter:
    """The checks under one interpreter; a child process for each environment."""

    wanted: Requirements
    device: str
    gpus: str | None
    python: str | None
    machine: Machine | None = None
    faults: list[str] = field(default_factory=list)
    _refused: dict[str, str | None] = field(default_factory=dict)  # reasons, by variable; the search for one is long
    _without: dict[tuple[str, str | None], str] = field(default_factory=dict)  # effective values of unset variables

    def check(self, env: Mapping[str, str]) -> None:
        """Note the machine, and the faults of the environment. Raises ProbeError if no point can run here at all."""
        asked = tuple(name for name in env if name not in self._refused or variables.comparable(name))
        try:
            answer = self._probe(env, asked)
        except ProbeError as err:
            if not env:
                raise ProbeError(self._explained(str(err))) from None
            if self.machine is None:
                self._must_answer({}, ())  # else it is not the environment's fault
            (name, value), *others = env.items()
            name, value = ("env", env_text(env)) if others else (f"env.{name}", value)
            self.faults.append(f"{name}: {value!r}: a process with it fails on {self._where()} ({err}); mend it")
            return
        self._refused |= {name: answer.refused.get(name) for name in asked}
        for name, value in env.items():
            if (reason := self._refused[name] or self._ineffective(name, env, answer)) is not None:
                self.faults.append(f"env.{name}: {value!r}: has no effect on {self._where()}: {reason}; remove it")

    def _ineffective(self, name: str, env: Mapping[str, str], answer: protocol.Machine) -> str | None:
        if not variables.comparable(name):
            return None
        others = {other: value for other, value in env.items() if other != name}
        key = (name, env_text(others))
        if key not in self._without:
            self._without[key] = self._must_answer({**others, name: None}, (name,)).settings[name]
        if answer.settings[name] != self._without[key]:
            return None
        return f"without it, {self._without[key]} is in effect as well"

    def _must_answer(self, env: Mapping[str, str | None], names: tuple[str, ...]) -> protocol.Machine:
        try:
            return self._probe(env, names)
        except ProbeError as err:
            raise ProbeError(self._explained(str(err))) from None

    def _probe(self, env: Mapping[str, str | None], names: tuple[str, ...]) -> protocol.Machine:
        """The answer of a child with this environment. Raises ProbeError with the bare reason."""
        kind = self.wanted.kind if self.python is not None or self.wanted.versioned else None
        asked = protocol.Probe(self.device, kind, names, self.wanted.gpus)
        try:
            answer = probe(asked, self.gpus, env=env, python=self.python)
        except (ProbeError, OSError) as err:
            raise ProbeError(str(err).strip().splitlines()[-1]) from None
        self.machine = self.machine or answer.machine
        return answer

    def _explained(self, reason: str) -> str:
        """A failure of a child as a line: the field, the value, the mistake, and the fix."""
        if self.python is None and _NAMED.match(reason):
            return reason
        if self.python is None:
            fix = "see what ends processes there (memory, a driver), then submit again"
            return f"device: {self.device!r}: cannot be looked at on node {_node()}: {reason}; {fix}"
        place = f"python: {self.python!r}: "
        if lacks := _LACKS.search(reason):
            fix = f"install it with {self.python} -m pip install, or nsa-bench with all that it needs"
            return f"{place}lacks the package {lacks[1]} on node {_node()}; {fix}"
        fix = "give one of Python 3.11 or newer with the packages of nsa-bench"
        return f"{place}cannot measure points on node {_node()} ({reason.removeprefix('device: ')}); {fix}"

    def _where(self) -> str:
        return f"node {_node()}" if self.python is None else f"node {_node()} under {self.python}"


def _unreadable(path: Path) -> str | None:
    if not os.path.exists(path):  # Path.exists raises below a folder that may not be searched
        return "does not exist"
    if not os.access(path, os.R_OK | os.X_OK if path.is_dir() else os.R_OK):
        return "may not be read"
    return "is an empty folder" if path.is_dir() and next(os.scandir(path), None) is None else None


def _not_a_program(path: Path) -> str | None:
    if not os.path.exists(path):
        return "does not exist"
    return None if os.path.isfile(path) and os.access(path, os.X_OK) else "is not a program that may be run"


def _node() -> str:
    return socket.gethostname()
