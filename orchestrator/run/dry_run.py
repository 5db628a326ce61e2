"""The dry run: lists the points of a spec and submits nothing."""

from __future__ import annotations

import os

from jobs.hardware.machine import probe
from jobs.schema.point import Machine
from jobs.schema.quantities import readable_bytes
from jobs.specs.spec import JobSpec
from orchestrator.errors import UserError
from orchestrator.execute import requirements
from orchestrator.messages import Requirements
from orchestrator.terminal import say

_ASSUMED_GPU_BYTES = 80 << 30


def print_points(spec: JobSpec, *, local: bool = False) -> None:
    """Print the spec's points on this machine, or on an assumed 80-GiB GPU where the spec wants one and none is here.

    Args:
        local: the run would be on this machine, which then must have the spec's files and interpreters.

    Raises:
        SpecError: the points cannot run on such a machine.
        UserError: files or interpreters are missing, in the words of the run.
    """
    wanted = Requirements.of(spec)
    if local and (faults := requirements.missing(wanted)):
        raise UserError("\n".join(faults))
    note = ""
    try:
        machine = probe(spec.device)
    except ValueError:
        machine = Machine("cuda", "GPU", _ASSUMED_GPU_BYTES)
        note = f" assumed, with {_ASSUMED_GPU_BYTES >> 30} GiB (there is none here)"
    points = spec.all_points(dict.fromkeys(spec.python, machine))
    skipped = sum(point.skip_reason is not None for point in points)
    say(f"{spec.name} ({spec.kind}): {len(points)} points on {machine.device}, {machine.name}{note}; {skipped} skipped")
    for index, point in enumerate(points):
        needs = "" if point.estimate_bytes is None else f"  {readable_bytes(point.estimate_bytes)}"
        say(f"{index:4}  {point.label}{needs}" + (f"  skipped: {point.skip_reason}" if point.skip_reason else ""))
    named = [*wanted.paths.items(), *(("python", python) for python in wanted.pythons if python is not None)]
    for field, path in named:
        if not os.path.exists(path):
            say(f"{field}: {path!r} is not on this machine; a run looks for it on the nodes")
    say("dry run: nothing was submitted")
