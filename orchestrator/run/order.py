"""The order for a run: command line, settings and spec, validated without contacting anything; and the dry run.

A refused Ray job is recorded as a failed run, so that its submitter finds it with the reason.
"""

import argparse
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import NoReturn

from jobs.hardware.machine import probe
from jobs.schema.plain_text import printable, shown
from jobs.schema.point import Machine
from jobs.schema.quantities import readable_bytes
from jobs.schema.states import RunState
from jobs.specs.load import load_spec, parse_spec
from jobs.specs.spec import JobSpec, SpecError, card_of
from orchestrator import provenance, terminal
from orchestrator.database_url import StoreError
from orchestrator.errors import UserError
from orchestrator.execute import requirements
from orchestrator.execute.requirements import Requirements
from orchestrator.execute.supervisor import Conditions
from orchestrator.judge.rules import READY_SPECS, load_gates
from orchestrator.judge.steps import forecast
from orchestrator.run import plan
from orchestrator.run.gates import own_gates
from orchestrator.settings import Settings, check_current_folder, load_settings
from orchestrator.store import Store
from orchestrator.store.engine import parse
from orchestrator.store.records import EventRecord, LabelRecord, Record, RunEndRecord, RunRecord
from orchestrator.terminal import say

_ASSUMED_GPU_GIB = 80
_GRACE_S = 30.0  # that a point which keeps checkpoints has to save one before it is killed
_ODD = re.compile(r"[^A-Za-z0-9_.-]+")
_NAME_LENGTH = 80  # of a spec's name


@dataclass(frozen=True)
class Order:
    """A valid request to measure a spec's points."""

    spec: JobSpec
    settings: Settings
    run_id: str  # of the resumed run, or a new one
    resumed: bool = False  # measure only the points that the run lacks
    retry_failed: bool = False  # with `resumed`: measure failed points again, too
    local: bool = False  # on this machine, without a Ray cluster
    dry_run: bool = False  # only list the points
    labels: tuple[LabelRecord, ...] = ()  # the run's tags and notes, where some are given

    @property
    def folder(self) -> Path:
        """The folder of the run's journal and artifacts."""
        return self.settings.artifacts_dir / self.run_id

    def conditions(self, machine: Machine) -> Conditions:
        """The conditions of the spec's points on a machine."""
        spec = self.spec
        limit = None if spec.memory_gib is None else int(spec.memory_gib * 2**30)
        if limit is None and machine.device == "cpu":
            limit = machine.memory_bytes  # beyond it the kernel's OOM killer would choose any process
        return Conditions(
            device=machine.device,
            deadlines=spec.deadlines,
            memory_bytes=limit,
            threads=max(1, int(spec.resources.num_cpus)),
            warm=spec.isolation == "warm",
            settings=tuple(spec.settings),
            card=machine.name if machine.device == "cuda" else None,
            store=self.settings.artifact_store_url,
            grace_s=_GRACE_S if spec.keeps_checkpoints else 0.0,
        )


def read_order(argv: Sequence[str] | None) -> Order:
    """The order in the arguments of `python -m jobs` (None: this process's), the settings and the spec.

    Raises UserError, with all mistakes at once: one line for each.
    """
    args = parse_arguments(argv)
    check_current_folder()
    mistakes: list[str] = []

    @contextmanager
    def noting() -> Iterator[None]:
        try:
            yield
        except (UserError, SpecError, StoreError) as err:
            mistakes.extend(str(err).splitlines())

    spec = settings = None
    with noting():
        settings = load_settings()
        parse(settings.database)
    if settings:
        with noting():
            own_gates(settings.gates)  # the verdict at the end must not fail on them
    with noting():
        spec = load_spec(args.spec, args.set) if args.spec else None
        for field, path in spec.paths().items() if spec else ():  # absolute ones are looked for on the nodes
            if not (path.is_absolute() or os.path.exists(path)):
                fix = "give an existing one, or an absolute path on the nodes"
                mistakes.append(f"{field}: {str(path)!r}: there is no such file in {Path.cwd()}; {fix}")
    if settings and args.resume:
        with noting():
            begun = plan.begun(args.resume, settings.artifacts_dir)
            earlier = parse_spec(begun.spec)  # with the fields that it was begun without: its own hash lacks them
            if spec is not None and provenance.spec_hash(spec) != provenance.spec_hash(earlier):
                fix = "leave SPEC out, or start a new run"
                raise UserError(f"--resume: {args.resume!r}: its spec differs from the one given; {fix}")
            spec = spec or earlier
    if mistakes or settings is None or spec is None:
        raise UserError("\n".join(mistakes))
    run_id = args.resume or plan.new_run_id(spec.name)
    return Order(
        spec,
        settings,
        run_id,
        labels=(labels(run_id, args.tag, args.note),) if args.tag or args.note else (),
        resumed=bool(args.resume),
        retry_failed=args.retry_failed,
        local=args.local,
        dry_run=args.dry_run,
    )


def print_points(order: Order) -> None:
    """Print the spec's points on this machine, or on an assumed 80-GiB GPU where the spec wants one and none is here.

    Raises SpecError if they cannot run on such a machine, UserError if a local run lacks files or interpreters.
    """
    spec, wanted = order.spec, Requirements.of(order.spec)
    if order.local and (faults := requirements.missing(wanted)):
        raise UserError("\n".join(faults))
    note = ""
    try:
        machine = probe(spec.device)
    except ValueError:
        gib = card_of(spec.resources.accelerator_type or "")[1] or _ASSUMED_GPU_GIB
        machine = Machine("cuda", "GPU", gib << 30)
        note = f" assumed, with {gib} GiB (there is none here)"
    points = plan.points_of(spec, dict.fromkeys(spec.python, machine))
    skipped = sum(point.skip_reason is not None for point in points)
    say(f"{spec.name} ({spec.kind}): {len(points)} points on {machine.device}, {machine.name}{note}; {skipped} skipped")
    for index, point in enumerate(points):
        needs = "" if point.estimate_bytes is None else f"  {readable_bytes(point.estimate_bytes)}"
        say(f"{index:4}  {point.label}{needs}" + (f"  skipped: {point.skip_reason}" if point.skip_reason else ""))
    gpus, machines = ceil(requirements.gpus_per_point(spec, machine)), load_gates(order.settings.gates).hardware
    # Published times are of ready specs as they are: an upper bound for a part of their points.
    ready = [
        load_spec(path) for path in READY_SPECS.glob("*.yaml") if f"name: {spec.name}\n" in path.read_text("utf-8")
    ]
    published, keys = 0, {point.key("", machine) for point in points}
    for each in ready:
        with suppress(SpecError):  # it needs a GPU, and the machine has none
            whole = plan.points_of(each, dict.fromkeys(each.python, machine))
            if each.isolation == spec.isolation and keys <= {point.key("", machine) for point in whole}:
                published = len(whole)
    part = f"{len(points)} of {published} points, so at most " if len(points) < published else ""
    lines = [part + line for line in forecast(spec.model_dump(), published, gpus, machines)]
    for line in (*spec.notes(), *(lines or ["time and price: no estimate, because no published run has these points"])):
        say(line)
    named = [*wanted.paths.items(), *(("python", python) for python in wanted.pythons if python is not None)]
    for field, path in named:
        if not os.path.exists(path):
            say(f"{field}: {path!r} is not on this machine; a run looks for it on the nodes")
    say("dry run: nothing was submitted")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"arguments: {message}; see python -m jobs --help")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of `python -m jobs`, their values not looked at. Raises UserError."""
    parser = _Parser(prog="python -m jobs", description="Measure the points of a spec and store the results.")
    parser.add_argument("spec", nargs="?", type=Path, help="YAML spec; may be left out with --resume")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the spec")
    parser.add_argument("--dry-run", action="store_true", help="validate and list the points; contacts nothing")
    parser.add_argument("--local", action="store_true", help="measure on this machine, without a Ray cluster")
    parser.add_argument("--resume", metavar="RUN_ID", help="measure the points that this run lacks")
    parser.add_argument("--retry-failed", action="store_true", help="with --resume: measure failed points again, too")
    parser.add_argument("--tag", action="append", default=[], help="a word by which lists of runs find this one")
    parser.add_argument("--note", help="a text that is shown with the run")
    args = parser.parse_args(argv)
    if args.resume == "":
        parser.error("--resume is empty; name a run (nsa runs lists them)")
    if args.spec is None and not args.resume:
        parser.error("SPEC is missing")
    if args.retry_failed and not args.resume:
        parser.error("--retry-failed is of use with --resume only")
    if args.resume and (args.tag or args.note is not None):  # they would replace those that it has
        parser.error("--tag and --note label a new run; label an earlier one with nsa label RUN")
    if args.spec is None and args.set:
        parser.error("--set changes a SPEC, and none is given")
    return args


def labels(run_id: str, tags: Sequence[str], notes: str | None) -> LabelRecord:
    """The labels of a run. Raises UserError for what is no tag."""
    for tag in tags:
        if not (re.fullmatch(r"\S{1,40}", tag) and tag.isprintable()):
            raise UserError(f"--tag: {shown(tag)}: is no tag; give at most 40 printable characters without a space")
    return LabelRecord(run_id=run_id, tags=tuple(tags), notes=notes and printable(notes))


def record_refusal(argv: Sequence[str] | None, err: Exception) -> None:
    """Store that this process's Ray job was refused, as a failed run of its own, without a spec and a journal.

    Nothing happens outside of a job, for a dry run, and where the database cannot be used: the error is in the job's
    log in any case.
    """
    if provenance.submission_id() is None:
        return
    name = "job"
    with suppress(UserError):  # the arguments themselves are wrong
        args = parse_arguments(argv)
        if args.dry_run:
            return
        name = _ODD.sub("-", args.spec.stem[:_NAME_LENGTH]).lstrip("_.-") or name if args.spec else "resume"
    with suppress(UserError):  # wrong settings, a database that is away
        settings = load_settings()
        nothing = {"spec": {}, "spec_hash": "", "quantities": (), "code_hash": provenance.code_hash()}
        git = provenance.GitState()
        run = plan.run_record(plan.new_run_id(name), name, "unknown", settings, git, **nothing)
        with Store.open(settings.database) as store:
            store.apply_many([run.model_copy(update={"state": RunState.PENDING}), *never_began(run, err)])


def never_began(run: RunRecord, err: BaseException) -> list[Record]:
    """The end of a run that failed before its first point, or was stopped."""
    failed = isinstance(err, Exception)
    reason = "\n".join(terminal.mistakes(err)) if failed else "stopped while it waited"
    state = RunState.FAILED if failed else RunState.CANCELLED
    message = f"ended before its first point: {reason}"
    return [
        EventRecord(run_id=run.run_id, level="error" if failed else "info", message=message),
        RunEndRecord(run_id=run.run_id, state=state, reason=reason, resumed=run.resumed),
    ]
