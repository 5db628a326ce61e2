"""The parent's side of one worker slot: its children, its GPUs, and the points that they measure.

`supervise` is a generator of updates; it runs in a thread of the driver or inside a Ray task. It needs neither the
driver's disk nor its database: outcomes travel in the updates, and files go from here to the artifact store.
"""

from __future__ import annotations

import socket
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace

from jobs.hardware.process_usage import PointUsage
from jobs.hardware.telemetry import Telemetry, TelemetrySummary
from jobs.schema.point import Point
from jobs.schema.states import PointState
from orchestrator.attempt import diagnostics, gpu_release, protocol, temporary
from orchestrator.attempt.child import Child, Violation
from orchestrator.attempt.keeping import Keeping
from orchestrator.attempt.live import LiveSeries
from orchestrator.attempt.watch import POLL_S, Ended, Watch, warning
from orchestrator.execute.artifacts import Source
from orchestrator.messages import Assignment, Conditions, Update
from orchestrator.store.records import MetricData, OutcomeRecord, StartRecord, now


class ProbeError(RuntimeError):
    """The machine could not be probed; the text is the child's message."""


def supervise(
    assignments: Sequence[Assignment],
    conditions: Conditions,
    gpus: str | None = None,
    stopped: Callable[[], bool] = lambda: False,
    cluster: protocol.Cluster | None = None,
) -> Iterator[Update]:
    """Measure points one after the other in child processes and yield what happens.

    Args:
        gpus: the children's CUDA_VISIBLE_DEVICES; None keeps this process's.
        cluster: where the ranks of the points run; None: on this host.
        stopped: polled several times a second; once true, the child is killed and the generator ends at once,
            without an outcome for the current point.
    """
    slot = _Slot(conditions, gpus, stopped)
    if cluster is not None:
        cluster = replace(cluster, card=conditions.card)
    try:
        for assignment in assignments:
            if stopped():
                return
            yield StartRecord(
                run_id=assignment.run_id,
                point_id=assignment.point_id,
                attempt=assignment.attempt,
                node=socket.gethostname(),
            )
            if (problem := slot.unfit()) is not None:
                yield _not_measured(assignment, problem)
                continue
            if slot.serves_another(assignment.point) and (obstacle := slot.clear()):
                yield warning(assignment, obstacle)
            try:
                child = slot.child(assignment.point)
            except OSError as err:
                yield _not_started(assignment, err)
                continue
            with Keeping(assignment, conditions.store) as keeping:
                ended = yield from _watch(child, assignment, conditions, slot.gpu_ids, stopped, cluster, keeping)
                if ended is None:
                    return
                yield ended.outcome
                yield from keeping.rest(ended.files, stopped)
            if not (conditions.warm and ended.outcome.state is PointState.OK) and (obstacle := slot.clear()):
                yield warning(assignment, obstacle)
    finally:
        slot.clear()


def probe(
    wanted: protocol.Probe,
    gpus: str | None = None,
    timeout_s: float = 300,
    *,
    env: Mapping[str, str | None] | None = None,
    python: str | None = None,
) -> protocol.Machine:
    """The machine as a point's process sees it (jobs.hardware.machine.probe, run in a child).

    Args:
        gpus, env, python: the child's (orchestrator.attempt.child.Child).

    Raises:
        ProbeError: the probe failed in the child, or the child died or did not answer.
        OSError: the interpreter cannot be started.
    """
    child = Child(threads=1, gpus=gpus, env=env, python=python)
    try:
        child.send(wanted)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            alive = child.alive()
            for event in child.events(POLL_S):
                match event:
                    case protocol.Machine() as answer:
                        return answer
                    case protocol.Failure(reason=reason) | Violation(reason):
                        raise ProbeError(reason.removeprefix("ValueError: "))
            if not alive:
                exit_ = diagnostics.describe_exit(child.kill())
                raise ProbeError(f"{exit_}: {words}" if (words := child.last_words().strip()) else exit_)
        raise ProbeError(f"no answer within {timeout_s:.0f} s")
    finally:
        child.discard()


class _Slot:
    """A slot's child, started when needed, and its GPUs."""

    def __init__(self, conditions: Conditions, gpus: str | None, stopped: Callable[[], bool]) -> None:
        self._conditions = conditions
        self._gpus = gpus
        self._stopped = stopped
        self._child: Child | None = None
        self._serves: tuple[Mapping[str, str], str | None] = ({}, None)  # environment and interpreter of the child
        self.gpu_ids = gpu_release.visible(gpus, stopped) if conditions.device == "cuda" else []
        self._baseline = gpu_release.Baseline(None)

    def unfit(self) -> str | None:
        """Reason why no point may be measured here: a GPU that the run is not planned for; None if there is none."""
        planned = self._conditions.card
        for gpu in self.gpu_ids if planned else []:
            card = gpu_release.card_name(gpu, self._stopped)
            if card not in (planned, None):
                node = socket.gethostname()
                fix = "name one type in resources.accelerator_type, or with --local in CUDA_VISIBLE_DEVICES"
                return f"planned for {planned}, node {node} has {card}; {fix}"
        return None

    def serves_another(self, point: Point) -> bool:
        """Whether the child has another environment or interpreter than the point's."""
        return self._child is not None and self._serves != (point.env, point.python)

    def child(self, point: Point) -> Child:
        """A living child for a point: the warm one, else a new one. Raises OSError if its interpreter cannot start."""
        if self._child is not None and not self._child.alive():
            self.clear()
        if self._child is None:
            self._baseline = gpu_release.Baseline.take(self.gpu_ids, self._stopped)
            threads, gpus = self._conditions.threads, self._gpus
            self._child = Child(threads=threads, gpus=gpus, env=point.env, python=point.python)
            self._serves = (point.env, point.python)
        return self._child

    def clear(self) -> str | None:
        """End the child and wait until its GPUs are free. Returns the obstacle if they do not get free, else None."""
        if self._child is None:
            return None
        child, self._child = self._child, None
        pids = {process.pid for process in child.tree()} | {child.pid}
        child.discard()
        return self._baseline.wait_free(pids, self._stopped)


def _watch(
    child: Child,
    assignment: Assignment,
    conditions: Conditions,
    gpu_ids: Sequence[str],
    stopped: Callable[[], bool],
    cluster: protocol.Cluster | None,
    keeping: Keeping,
) -> Generator[Update, None, Ended | None]:
    """Follow one point to its end. Returns None if stopped before: then the point has had its grace."""
    telemetry = Telemetry(gpu_ids)
    here = not gpu_ids and cluster is None  # ranks on a cluster are sampled there
    live = LiveSeries(assignment, PointUsage(child.tree, conditions.threads) if here else telemetry)
    watch = Watch(child, assignment, conditions, live, cluster)
    telemetry.start()
    ended: Ended | None = None
    try:
        child.send(watch.command())
        while (ended := watch.step()) is None:
            yield from watch.progress()
            yield from watch.warnings()
            keeping.add(watch.noted())
            yield from keeping.records()
            if (piece := live.due()) is not None:
                yield piece
            if stopped():
                return None
    finally:
        if ended is None:
            telemetry.ask_to_stop()  # its samples are wanted no more, and a wedged driver would hold it up
            watch.ask_to_end()
    assert ended is not None
    sampled = telemetry.stop()
    yield from watch.warnings()
    yield from keeping.records()
    if (piece := live.rest()) is not None:
        yield piece
    return ended if conditions.device != "cuda" or cluster is not None else _with_telemetry(ended, sampled)


def _with_telemetry(ended: Ended, sampled: TelemetrySummary) -> Ended:
    """The end of a point with the samples of its GPUs: a table as a file, and metrics if it is ok and lacks them."""
    ended = replace(ended, files=(Source("telemetry.txt", sampled.text), *ended.files))
    if ended.outcome.state is not PointState.OK:
        return ended
    metrics = tuple(MetricData(**vars(metric)) for metric in sampled.metrics)
    known = {metric.name for metric in ended.outcome.metrics}
    added = ended.outcome.metrics + tuple(m for m in metrics if m.name not in known)
    return replace(ended, outcome=ended.outcome.model_copy(update={"metrics": added}))


def _not_started(assignment: Assignment, err: OSError) -> OutcomeRecord:
    """End of a point whose child could not be started: lost, so measured again, where the host had no room for it."""
    if err.errno is not None and err.filename is None:  # no folder at all, pipe or process
        reason = f"the host has no room for the point's process ({err.strerror}); make room"
        return _not_measured(assignment, reason, PointState.LOST)
    if temporary.POINT in str(err.filename):  # in the child's folder: the host's disk, not the interpreter
        reason = f"TMPDIR: {tempfile.gettempdir()!r}: no room for the point's files there ({err.strerror}); make room"
        return _not_measured(assignment, reason, PointState.LOST)
    return _not_measured(
        assignment, f"python: {assignment.point.python or sys.executable!r}: cannot be started ({err})"
    )


def _not_measured(assignment: Assignment, reason: str, state: PointState = PointState.ERROR) -> OutcomeRecord:
    """End of a point whose child was not started."""
    run_id, point_id, attempt = assignment.run_id, assignment.point_id, assignment.attempt
    return OutcomeRecord(
        run_id=run_id, point_id=point_id, attempt=attempt, state=state, reason=reason, started_at=now()
    )
