"""The driver of a run: `python -m jobs SPEC.yaml` (jobs/__main__.py is its door).

Everything that can be wrong is found before a point is handed out or a file is made; then the points are measured, and
what happened is journalled, stored, shown and summed up.

Exit codes: 0 every point is ok or skipped, 1 a point failed or the run could not go on, 2 bad input, 130 cancelled.
"""

from __future__ import annotations

import argparse
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from jobs.point import Machine
from jobs.spec import JobSpec, SpecError, load_spec, parse_spec
from orchestrator import provenance, summary
from orchestrator.database_url import StoreError, check_url, hide_password
from orchestrator.errors import UserError
from orchestrator.gates.rules import load_gates
from orchestrator.journal import NAME, Journal
from orchestrator.messages import Conditions
from orchestrator.records import PointRecord, RunRecord
from orchestrator.run import plan
from orchestrator.run.executor import Executor, ExecutorGone
from orchestrator.run.local import LocalExecutor
from orchestrator.run.progress import LogWatcher, watcher
from orchestrator.run.recorder import Recorder
from orchestrator.run.scheduler import Scheduler
from orchestrator.settings import Settings, load_settings
from orchestrator.states import PointState, RunState

if TYPE_CHECKING:
    from orchestrator.store import Store

OK, FAILURE, BAD_INPUT, CANCELLED = 0, 1, 2, 130
_ASSUMED_GPU_BYTES = 80 << 30


def main(argv: Sequence[str] | None = None) -> int:
    """Run a spec; the exit code. Mistakes are told on stderr, a line each: `error: field: value: fix`."""
    try:
        args = _arguments(argv)
        order = _order(args)
        return _dry_run(order) if args.dry_run else _run(order, args)
    except (UserError, SpecError, StoreError) as err:
        for line in str(err).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:  # before the first point; from then on it is a reason to cancel
        return CANCELLED


def check(argv: Sequence[str]) -> None:
    """What `main` would refuse before it contacts anything. Raises UserError, SpecError, StoreError."""
    from jobs.measure.machine import probe

    order = _order(_arguments(argv))
    if order.spec.device == "cpu":  # alike everywhere, so what cannot run here cannot run on the cluster
        order.spec.points(probe("cpu"))


@dataclass(frozen=True)
class Order:
    """What was asked for, validated."""

    spec: JobSpec
    settings: Settings
    run_id: str
    resumed: bool

    @property
    def folder(self) -> Path:
        """Where the run's journal and artifacts are."""
        return self.settings.artifacts_dir / self.run_id


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"arguments: {message}; see python -m jobs --help")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="python -m jobs", description="Measure the points of a spec and store the results.")
    parser.add_argument("spec", nargs="?", type=Path, help="YAML spec; may be left out with --resume")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the spec")
    parser.add_argument("--dry-run", action="store_true", help="validate and list the points; contacts nothing")
    parser.add_argument("--local", action="store_true", help="measure on this machine, without a Ray cluster")
    parser.add_argument("--resume", metavar="RUN_ID", help="measure the points that this run lacks")
    parser.add_argument("--retry-failed", action="store_true", help="with --resume: those that failed, too")
    args = parser.parse_args(argv)
    if args.resume == "":
        parser.error("--resume is empty; name a run (nsa runs lists them)")
    if args.spec is None and not args.resume:
        parser.error("SPEC is missing")
    if args.retry_failed and not args.resume:
        parser.error("--retry-failed is of use with --resume only")
    if args.spec is None and args.set:
        parser.error("--set changes a SPEC, and none is given")
    return args


def _order(args: argparse.Namespace) -> Order:
    """Everything that can be checked without contacting anything; all mistakes at once."""
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
        check_url(settings.database)
    if settings:
        with noting():
            load_gates(settings.gates)  # the verdict at the end must not fail on them
    with noting():
        spec = load_spec(args.spec, args.set) if args.spec else None
    if settings and args.resume:
        with noting():
            spec = _spec_of(args.resume, plan.read_history(args.resume, settings.artifacts_dir).run, spec)
    if mistakes or settings is None or spec is None:
        raise UserError("\n".join(mistakes))
    return Order(spec, settings, args.resume or plan.new_run_id(spec.name), resumed=bool(args.resume))


def _spec_of(run_id: str, begun: RunRecord, given: JobSpec | None) -> JobSpec:
    """The spec of the run that is taken up again; one that is given must be the same."""
    if given is None:
        return parse_spec(begun.spec)
    if provenance.spec_hash(given) != begun.spec_hash:
        raise UserError(
            f"--resume: {run_id!r}: its spec differs from the one given; leave SPEC out, or start a new run"
        )
    return given


def _dry_run(order: Order) -> int:
    from jobs.measure.machine import probe

    spec, note = order.spec, ""
    try:
        machine = probe(spec.device)
    except ValueError:
        machine = Machine("cuda", "GPU", _ASSUMED_GPU_BYTES)
        note = f" assumed, with {_ASSUMED_GPU_BYTES >> 30} GiB (there is none here)"
    points = spec.points(machine)
    skipped = sum(point.skip_reason is not None for point in points)
    print(
        f"{spec.name} ({spec.kind}): {len(points)} points on {machine.device}, {machine.name}{note}; {skipped} skipped"
    )
    for index, point in enumerate(points):
        needs = "" if point.estimate_bytes is None else f"  {point.estimate_bytes / 2**30:.2f} GiB"
        print(f"{index:4}  {point.label}{needs}" + (f"  skipped: {point.skip_reason}" if point.skip_reason else ""))
    print("dry run: nothing was submitted")
    return OK


def _run(order: Order, args: argparse.Namespace) -> int:
    executor = _executor(order, args.local)
    with ExitStack() as stack:
        store = stack.enter_context(_open_store(order.settings))
        # A run that is taken up again is ours from here on: what its journal says must hold until we write to it, and
        # the probe may wait long, even for the driver that still measures the run. A new one makes no file before it.
        journal = stack.enter_context(Journal(order.folder / NAME)) if order.resumed else None
        machine = executor.probe()
        points = order.spec.points(machine)
        if journal is None:
            journal = stack.enter_context(Journal(order.folder / NAME))
            todo = plan.new_plan(_run_record(order), points, machine)
        else:
            history = plan.read_history(order.run_id, order.settings.artifacts_dir)
            run = _run_record(order, resumed=history.run.resumed + 1)
            todo = plan.resumed_plan(run, points, machine, history, again=args.retry_failed)
        stopped = stack.enter_context(_stopping())
        return _measure(order, executor, store, journal, machine, todo, stopped)


def _measure(
    order: Order,
    executor: Executor,
    store: Store | None,
    journal: Journal,
    machine: Machine,
    todo: plan.Plan,
    stopped: Callable[[], str | None],
) -> int:
    folder, slots = order.folder, executor.slots(machine)
    with watcher(todo.labels, todo.settled.total()) as watching:
        _announce(order, machine, todo, slots, store, watching)
        recorder = Recorder(order.run_id, journal, store, watching.tell)
        recorder.write(todo.records)
        conditions = _conditions(order.spec, machine)
        retries = order.spec.retries
        scheduler = Scheduler(executor, recorder, watching, folder, conditions, slots=slots, retries=retries)
        try:
            state = scheduler.run(order.run_id, todo.assignments, stopped)
        except Exception as err:
            scheduler.give_up(order.run_id, f"{type(err).__name__}: {err}")
            if not isinstance(err, ExecutorGone):
                raise
            state = RunState.FAILED
            watching.tell(f"error: {err}; continue later: python -m jobs --resume {order.run_id}")
        recorder.close(0 if state is RunState.CANCELLED else 30)
    states = scheduler.states + todo.settled
    _close(order, state, states, store if recorder.stored else None)
    if state is RunState.CANCELLED:
        return CANCELLED
    return OK if state is RunState.DONE and set(states) <= {PointState.OK, PointState.SKIPPED} else FAILURE


def _executor(order: Order, local: bool) -> Executor:
    if local:
        return LocalExecutor(order.spec)
    try:
        import ray  # noqa: F401
    except ImportError:
        raise UserError("ray: not installed; install it (pip install 'ray[default]') or use --local") from None
    from orchestrator.run.ray_cluster import RayExecutor

    return RayExecutor(order.spec, order.settings)


@contextmanager
def _open_store(settings: Settings) -> Iterator[Store | None]:
    """The store; None where SQLAlchemy is not installed, which the closing line tells what to do about."""
    try:
        from orchestrator.store import Store
    except ModuleNotFoundError as err:
        if err.name not in ("sqlalchemy", "alembic"):
            raise
        yield None
        return
    with Store.open(settings.database) as store:
        yield store


def _run_record(order: Order, resumed: int = 0) -> RunRecord:
    commit, dirty = provenance.git_state()
    return RunRecord(
        run_id=order.run_id,
        name=order.spec.name,
        kind=order.spec.kind,
        spec=order.spec.model_dump(mode="json"),
        spec_hash=provenance.spec_hash(order.spec),
        git_commit=commit,
        git_dirty=dirty,
        code_hash=provenance.code_hash_of(order.spec),
        submission_id=provenance.submission_id(),
        host=socket.gethostname(),
        artifacts=str(order.folder),
        resumed=resumed,
    )


def _conditions(spec: JobSpec, machine: Machine) -> Conditions:
    limit = None if spec.memory_gib is None else int(spec.memory_gib * 2**30)
    if limit is None and machine.device == "cpu":
        limit = machine.memory_bytes  # the kernel's OOM killer would take whichever process it likes
    return Conditions(
        device=machine.device,
        deadlines=spec.deadlines,
        memory_bytes=limit,
        threads=max(1, int(spec.resources.num_cpus)),
        warm=spec.isolation == "warm",
    )


def _announce(
    order: Order, machine: Machine, todo: plan.Plan, slots: int, store: Store | None, watching: LogWatcher
) -> None:
    where = f"{len(todo.assignments)} points to measure on {machine.device} ({machine.name}), {slots} at a time"
    settled = ", ".join(f"{count} {state}" for state, count in sorted(todo.settled.items()))
    watching.tell(f"run {order.run_id}: {where}" + (f"; settled: {settled}" if settled else ""))
    database = hide_password(order.settings.database) if store else "none (SQLAlchemy is not installed)"
    watching.tell(f"results: {database}; journal and artifacts: {order.folder}")
    for record in todo.records:
        if isinstance(record, PointRecord) and record.state is PointState.SKIPPED:
            watching.tell(f"skipped   {record.label}: {record.reason}")


def _close(order: Order, state: RunState, states: Counter[PointState], store: Store | None) -> None:
    console = summary.wide_console()
    summary.print_states(states, console)
    if store is None:
        console.print(f"not in the database; store the results with: nsa import {order.folder / NAME}", markup=False)
    elif state is not RunState.CANCELLED:
        try:
            summary.print_evaluation(store, order.run_id, order.settings.gates, console)
        except UserError as err:  # the results are stored; how the run ended does not depend on their judgement
            console.print(f"no verdict now: {err}; judge later: nsa gate {order.run_id}", markup=False)
    console.print(f"run {order.run_id}: {state}", markup=False)


@contextmanager
def _stopping() -> Iterator[Callable[[], str | None]]:
    """SIGTERM (what `ray job stop` sends) and SIGINT become a reason to cancel; a second one kills as usual."""
    reasons: list[str] = []

    def note(number: int, frame: object) -> None:
        reasons.append(signal.Signals(number).name)
        signal.signal(number, signal.SIG_DFL)

    signals = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, note) for number in signals}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)  # Ray's jobs start with SIGINT blocked
    try:
        yield lambda: reasons[0] if reasons else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
