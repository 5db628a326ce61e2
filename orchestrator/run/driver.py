"""The driver of a run: `python -m jobs SPEC.yaml` (jobs/__main__.py is its door).

The order is validated before a file is made or a point handed out. Then the points are measured; every event is
journalled, stored and shown, and a summary printed at the end.

Exit codes: 0 every point is ok or skipped, 1 a point failed or the run could not go on, 2 bad input, 130 cancelled.
"""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from jobs.hardware.machine import probe
from jobs.process.compiler_cache import network_file_system
from jobs.schema.point import Machine
from jobs.schema.quantities import Quantities, Role
from jobs.schema.states import PointState, RunState, run_in_words
from jobs.specs.kinds import axes_of, kind_module
from jobs.specs.spec import SpecError
from orchestrator import provenance, terminal
from orchestrator.database_url import StoreError, StoreUnavailable, hide_password, sqlite_path
from orchestrator.errors import ExecutorGone, UserError
from orchestrator.execute.local import LocalExecutor
from orchestrator.execute.ray_cluster import RayExecutor
from orchestrator.judge.fleet import require_preflight
from orchestrator.report import summary
from orchestrator.report.table import Table
from orchestrator.run import plan, webhook
from orchestrator.run.order import Order, never_began, print_points, read_order, record_refusal
from orchestrator.run.progress import Watcher
from orchestrator.run.scheduler import Scheduler
from orchestrator.settings import Settings, example_spec
from orchestrator.store import Store
from orchestrator.store.journal import NAME, STOP_S, TIMEOUT_S, Journal, JournalFull, Recorder
from orchestrator.store.records import EventRecord, PointRecord

OK, FAILURE, BAD_INPUT, CANCELLED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a spec and return the exit code. Mistakes go to stderr, one a line: `error: field: value: fix`."""
    terminal.prepare()
    order = None
    try:
        order = read_order(argv)
        if not order.dry_run:
            with _signals() as stop:
                return _run(order, stop)
        print_points(order)
        return OK
    except JournalFull as err:
        assert order is not None
        terminal.warn(f"error: {err}, then continue with: python -m jobs --resume {order.run_id}")
        return FAILURE
    except (UserError, SpecError, StoreError) as err:
        terminal.complain(err)
        if order is None or isinstance(err, _RefusedError):
            record_refusal(argv, err)
        return BAD_INPUT
    except ExecutorGone as gone:  # before the first point; later it is the run's state
        terminal.warn(f"error: {gone}; submit the job again")
        return FAILURE
    except KeyboardInterrupt:  # before the first point; later it is a reason to cancel
        return CANCELLED


def check(argv: Sequence[str]) -> None:
    """Validate arguments as `main` would before it contacts anything. Raises UserError, SpecError, StoreError."""
    order = read_order(argv)
    if order.spec.device == "cpu":  # the same on every machine: points that cannot run here cannot run on the cluster
        plan.points_of(order.spec, dict.fromkeys(order.spec.python, probe("cpu")))


class _RefusedError(UserError):
    """A resume that may not begin; nothing was recorded."""


def _run(order: Order, stop: _Stop) -> int:
    job = provenance.submission_id()
    executor = None if job else _executor(order)
    with ExitStack() as stack:
        if problem := database_problem(order.settings):
            terminal.warn(f"warning: {problem}")
        store = stack.enter_context(Store.open(order.settings.database))
        # Before the probe, which may wait long, even for another driver of the run: what the journal says must still
        # hold when we write to it.
        journal, history = _resumed(order, store, stack) if order.resumed else (None, None)

        kind = kind_module(order.spec.kind)
        run = plan.run_record(
            order.run_id,
            order.spec.name,
            order.spec.kind,
            order.settings,
            provenance.git_state(),
            spec=order.spec.model_dump(mode="json"),
            spec_hash=provenance.spec_hash(order.spec),
            code_hash=provenance.code_hash(spec=order.spec),
            resumed=history.run.resumed + 1 if history else 0,
            quantities=tuple(kind.QUANTITIES),
            axes=axes_of(kind),
        )
        recorder = None
        if job or history:  # another run makes no file before the probe
            journal = journal or stack.enter_context(Journal(order.folder / NAME))
            recorder = stack.enter_context(Recorder(order.run_id, journal, store, terminal.warn))
        if recorder and job:  # it is shown as pending while it waits for its cluster
            recorder.write([run.model_copy(update={"state": RunState.PENDING}), *order.labels])
        try:
            executor = executor or _executor(order)
            if order.spec.requires_preflight:
                gpus, door = executor.gpus(), "python -m jobs --local" if order.local else "nsa submit"
                again = f"{door} {example_spec('preflight')} --set cards={max(1, sum(gpus.values()))}"
                if accelerator := order.spec.resources.accelerator_type:
                    again += f" --set resources.accelerator_type={accelerator}"
                require_preflight(store, gpus, datetime.now(UTC), again)
            machines = executor.probe()
            points, further = plan.points_of(order.spec, machines), partial(plan.points_of, order.spec, machines)
            todo = plan.Plan(run, points, machines, further, history, again=order.retry_failed)
        except BaseException as err:
            if recorder and job:
                recorder.write(never_began(run, err))
                failed = isinstance(err, Exception)
                notes = recorder.close(TIMEOUT_S if failed else STOP_S)
                if failed:
                    notes += webhook.tell(order.settings, webhook.Ended(run, "failed before its first point", 0, 0))
                for line in notes:
                    terminal.warn(f"warning: {line}")
            raise
        stop.measuring = True
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGINT])  # Ray blocks SIGINT in jobs
        if recorder is None:
            journal = stack.enter_context(Journal(order.folder / NAME))
            recorder = stack.enter_context(Recorder(order.run_id, journal, store, terminal.warn))
        return _measure(order, executor, store, recorder, machines[order.spec.python[0]], todo, stop)


def _resumed(order: Order, store: Store, stack: ExitStack) -> tuple[Journal, plan.History]:
    """The journal of the run that is resumed, locked, and what it says; the lease guards one on another host."""
    try:
        journal = stack.enter_context(Journal(order.folder / NAME))
        history = plan.in_journal(journal.path)
        if history.run.run_id != order.run_id:
            problem = f"is of the run {history.run.run_id!r}; put it into a folder of that name"
            raise UserError(f"journal: {str(journal.path)!r}: {problem}")
        store.take_lease(order.run_id)
        plan.check_complete(store, history)
    except StoreUnavailable:
        raise
    except UserError as err:  # another driver may be measuring the run just now
        raise _RefusedError(str(err)) from None
    return journal, history


def _measure(
    order: Order,
    executor: LocalExecutor | RayExecutor,
    store: Store,
    recorder: Recorder,
    machine: Machine,
    todo: plan.Plan,
    stop: _Stop,
) -> int:
    slots, run = executor.slots(machine), f"run {order.run_id}"
    headline = Quantities(todo.run.quantities or ()).names(role=Role.HEADLINE)
    with Watcher(todo.labels, todo.states.total(), headline) as watching:
        where = f"{len(todo.assignments)} points to measure on {machine.device} ({machine.name}), {slots} at a time"
        settled = ", ".join(f"{count} {state}" for state, count in sorted(todo.states.items()))
        watching.tell(f"{run}: {where}" + (f"; settled: {settled}" if settled else ""))
        watching.tell(f"results: {hide_password(order.settings.database)}; journal and artifacts: {order.folder}")
        if order.settings.artifact_store:
            watching.tell(f"artifact store: {order.settings.artifact_store_url}")
        for record in todo.records:
            if isinstance(record, EventRecord):
                watching.tell(record.message)
            if isinstance(record, PointRecord) and record.state is PointState.SKIPPED:
                watching.tell(f"skipped   {record.label}: {record.reason}")
        recorder.tell = watching.tell
        recorder.write([*todo.records, *order.labels])
        often = {"retries": order.spec.retries, "restarts": getattr(order.spec, "restarts", 0)}  # of trainings
        conditions = order.conditions(machine)
        scheduler = Scheduler(executor, recorder, watching, todo, conditions, slots=slots, **often)
        try:
            state = scheduler.run(lambda: stop.reason)
        except JournalFull:
            with suppress(ExecutorGone):
                executor.cancel(conditions.grace_s)
            raise
        except Exception as err:
            scheduler.end(RunState.FAILED, PointState.LOST, f"{type(err).__name__}: {err}")
            if not isinstance(err, ExecutorGone):
                recorder.close(stopped=lambda: stop.reason)
                raise
            state = RunState.FAILED
            watching.tell(f"error: {err}; continue later: python -m jobs --resume {order.run_id}")
        notes = recorder.close(stopped=lambda: stop.reason)
    console, states, failures = terminal.wide_console(), todo.states, todo.failures
    happened = RunState.FAILED if state is RunState.DONE and failures and not states[PointState.OK] else state
    words = run_in_words({"state": happened, "failed": failures, "points": states.total()})
    ended = webhook.Ended(todo.run, words, failures, states.total())
    rows = [[str(each), str(states[each])] for each in PointState if states[each]]
    console.print(Table("Points", "", ["state", "points"], rows).rich())
    if recorder.stored and state is not RunState.CANCELLED:
        try:
            found = summary.print_evaluation(store, order.run_id, order.settings.gates, console)
        except UserError as err:  # the results are stored; without a verdict the run still ended well
            notes.append(f"no verdict now: {err}; judge later: nsa gate {order.run_id}")
        else:
            try:
                ended = ended.judged(store, found) if order.settings.webhook else ended
            except Exception as err:  # whatever it is
                notes.append(f"NSA_WEBHOOK: was told no verdict ({type(err).__name__}: {err}); nsa gate {order.run_id}")
    notes += webhook.tell(order.settings, ended)
    for line in (*notes, f"{run}: {words}"):
        console.print(line, markup=False, soft_wrap=True)
    if state is RunState.CANCELLED:
        return CANCELLED
    good = state is RunState.DONE and not (failures or todo.broken)
    return OK if good else FAILURE


def _executor(order: Order) -> LocalExecutor | RayExecutor:
    if order.local:
        return LocalExecutor(order.spec)
    if importlib.util.find_spec("ray") is None:  # not imported yet: how to connect is chosen by variables
        raise UserError("ray: not installed; install it (pip install 'ray[default]') or use --local")
    return RayExecutor(order.spec, order.settings)


def database_problem(settings: Settings) -> str | None:
    """A danger to the database: SQLite's log (WAL) is unsafe on a network file system; None elsewhere."""
    path = sqlite_path(settings.database)
    if path is None or (system := network_file_system(path)) is None:
        return None
    return (
        f"NSA_DATABASE_URL: {settings.database!r}: lies on {system}, where SQLite may lose or damage it; use Postgres, "
        "or a path on a local disk"
    )


@dataclass
class _Stop:
    """State of the signals: before the first point one raises KeyboardInterrupt, afterwards it is a reason to stop."""

    reason: str | None = None  # of a cancellation: the first signal's name
    measuring: bool = False


@contextmanager
def _signals() -> Iterator[_Stop]:
    """Handle SIGTERM (sent by `ray job stop`), SIGINT and SIGHUP (the terminal is closed; `nohup` ignores it)."""
    stop = _Stop()

    def handle(number: int, frame: object) -> None:
        """Note a signal. The same again kills as usual, but for SIGHUP, which changes nothing any more: a closed
        terminal and its shell send one each, and systemd sends it right after SIGTERM."""
        first, stop.reason = stop.reason is None, stop.reason or signal.Signals(number).name
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        if number != signal.SIGHUP:
            signal.signal(number, signal.SIG_DFL)
        if first and not stop.measuring:  # another one that comes at once interrupts no cleanup
            raise KeyboardInterrupt

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield stop
    finally:
        if stop.reason is None:  # else a hangup may still come at the very end
            for number, handler in before.items():
                signal.signal(number, handler)
