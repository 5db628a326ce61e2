"""Check of a node before anything is measured: interpreters, files, and the effects of environment variables."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jobs.hardware import variables
from jobs.process.child import Child
from jobs.process.messages import Failure, Probe, ProbedMachine
from jobs.process.post_mortem import describe_exit
from jobs.process.watch import POLL_S
from jobs.schema.point import Machine
from jobs.specs.environments import env_text
from orchestrator.errors import UserError
from orchestrator.execute.supervisor import ANSWER, process_variables
from orchestrator.messages import Requirements

_NAMED = re.compile(r"[a-z_]+: ")  # a reason that begins with its field
_LACKS = re.compile(r"No module named '([^'.]+)")


def probe(
    command: Probe,
    gpus: str | None = None,
    timeout_s: float = 300,
    *,
    env: Mapping[str, str | None] | None = None,
    python: str | None = None,
) -> ProbedMachine:
    """The machine as a point's process sees it (jobs.hardware.machine.probe, run in such a process).

    Args:
        gpus, env, python: the process's.

    Raises:
        UserError: the probe failed in the process, or that died or did not answer.
        OSError: the interpreter cannot be started.
    """
    child = Child(ANSWER, env={**process_variables(1, gpus), **(env or {})}, python=python)
    try:
        child.send(command)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            alive = child.alive()
            for event in child.events(POLL_S):
                match event:
                    case ProbedMachine():
                        return event
                    case Failure(reason=reason):
                        raise UserError(reason.removeprefix("ValueError: "))
            if not alive:
                reason = describe_exit(child.kill())
                raise UserError(f"{reason}: {printed}" if (printed := child.tail().strip()) else reason)
        raise UserError(f"no answer within {timeout_s:.0f} s")
    finally:
        child.discard()


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


def lacking(required: Requirements) -> list[str]:
    """Mistakes as `missing` reports them, and interpreters that are here but cannot measure; starts a process each."""
    mistakes = missing(required)
    for python in filter(None, () if mistakes else required.pythons):
        try:
            _Interpreter(required, "cpu", "", python).mistakes({})
        except UserError as err:
            mistakes.append(str(err))
    return mistakes


def check(required: Requirements, gpus: str | None = None) -> dict[str | None, Machine]:
    """The machine as each interpreter of the spec sees it, once all of the spec's environments have an effect.

    Args:
        gpus: the processes' CUDA_VISIBLE_DEVICES; None keeps this process's.

    Raises:
        UserError: one line for each mistake: field, value, mistake, fix.
    """
    mistakes = missing(required)
    machines: dict[str | None, Machine] = {}
    device = required.device
    for python in () if mistakes else required.pythons:
        interpreter = _Interpreter(required, device, gpus, python)
        try:
            for env in required.envs:
                mistakes += interpreter.mistakes(env)
        except UserError as err:
            mistakes.append(str(err))
            continue
        assert interpreter.machine is not None
        machines[python] = interpreter.machine
        device = interpreter.machine.device  # all points of a run use the same
    if mistakes:
        raise UserError("\n".join(dict.fromkeys(mistakes)))
    return machines


@dataclass
class _Interpreter:
    """The checks under one interpreter; a process for each environment."""

    required: Requirements
    device: Literal["auto", "cpu", "cuda"]
    gpus: str | None
    python: str | None
    machine: Machine | None = None

    def mistakes(self, env: Mapping[str, str]) -> list[str]:
        """Mistakes of an environment; notes the machine. Raises UserError if no point can run here at all."""
        node = f"node {socket.gethostname()}" + (f" under {self.python}" if self.python else "")
        try:
            answer = self._probe(env, tuple(env))
        except UserError as err:
            if self.machine is None or not env:
                self._answer({}, ())  # else it is not the environment's fault
            if not env:
                return []
            (name, value), *others = env.items()
            name, value = ("env", env_text(env)) if others else (f"env.{name}", value)
            return [f"{name}: {value!r}: a process with it fails on {node} ({err}); mend it"]
        mistakes = []
        for name, value in env.items():
            reason = answer.refused.get(name)
            if reason is None and variables.comparable(name):
                without = self._answer({**env, name: None}, (name,)).settings[name]
                if answer.settings[name] == without:
                    reason = f"without it, {without} is in effect as well"
            if reason is not None:
                mistakes.append(f"env.{name}: {value!r}: has no effect on {node}: {reason}; remove it")
        return mistakes

    def _probe(self, env: Mapping[str, str | None], names: tuple[str, ...]) -> ProbedMachine:
        """The answer of a process with this environment. Raises UserError with the bare reason."""
        kind = self.required.kind if self.python is not None or self.required.versioned else None
        command = Probe(self.device, kind, names, self.required.gpus)
        try:
            answer = probe(command, self.gpus, env=env, python=self.python)
        except (UserError, OSError) as err:
            raise UserError(str(err).strip().splitlines()[-1]) from None
        self.machine = self.machine or answer.machine
        return answer

    def _answer(self, env: Mapping[str, str | None], names: tuple[str, ...]) -> ProbedMachine:
        """As `_probe`. Raises UserError with the field, the value, the mistake and the fix."""
        try:
            return self._probe(env, names)
        except UserError as err:
            reason, node = str(err), socket.gethostname()
        if self.python is None and _NAMED.match(reason):
            raise UserError(reason)
        if self.python is None:
            fix = "see what ends processes there (memory, a driver), then submit again"
            raise UserError(f"device: {self.device!r}: cannot be looked at on node {node}: {reason}; {fix}")
        if lacks := _LACKS.search(reason):
            fix = f"install it with {self.python} -m pip install, or nsa-bench with all that it needs"
            raise UserError(f"python: {self.python!r}: lacks the package {lacks[1]} on node {node}; {fix}")
        reason, fix = reason.removeprefix("device: "), "give one of Python 3.11 or newer with the packages of nsa-bench"
        raise UserError(f"python: {self.python!r}: cannot measure points on node {node} ({reason}); {fix}")


def _unreadable(path: Path) -> str | None:
    if not os.path.exists(path):  # Path.exists raises below a folder that may not be searched
        return "does not exist"
    if not os.access(path, os.R_OK | os.X_OK if path.is_dir() else os.R_OK):
        return "may not be read"
    return "is an empty folder" if path.is_dir() and next(os.scandir(path), None) is None else None
