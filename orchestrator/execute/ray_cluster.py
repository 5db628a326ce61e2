"""The executor for a Ray cluster: checks its resources, runs batches as tasks."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from jobs.process.messages import Cluster
from jobs.schema.point import Machine
from jobs.schema.states import PointState
from jobs.specs.spec import JobSpec
from orchestrator import provenance
from orchestrator.background import BackgroundCall, interruptibly
from orchestrator.errors import ExecutorGone, UserError
from orchestrator.execute import requirements, supervisor
from orchestrator.execute.ray_connection import ClusterWatch, connect, in_brief
from orchestrator.execute.room import Share, card_types, check_resources, check_room, gpus_per_point
from orchestrator.messages import Assignment, BatchEnded, Conditions, Requirements, Update
from orchestrator.settings import Settings
from orchestrator.terminal import warn

_CANCEL_S = 1.5
_STOP_S = 3.0  # that a driver needs to end, and that Ray gives it where nothing is set
_PATIENCE_S = 15.0
_PROBES = 3
_CHECK_S = 120.0  # a node's first task of a job waits for its copy of the sources
_ANSWER_S = 1.0


class RayExecutor:
    """Measures on a Ray cluster: one streaming task a batch, with the GPUs and cores of one point.

    The task of a point with several ranks has neither: Ray Train places the ranks, on one node or several.
    """

    def __init__(self, spec: JobSpec, settings: Settings) -> None:
        """Connect, and check that some node has the resources of a point, or the cluster those of its ranks.

        Raises:
            UserError: no cluster answers, or it cannot run a point.
        """
        self._spec = spec
        if spec.world_size > 1 and (python := next(filter(None, spec.python), None)):
            raise UserError(
                f"python: {python!r}: on a cluster, ranks run under the interpreter of its workers; leave it out, or "
                "use --local"
            )
        head = connect(spec, settings)
        self._by_id = interruptibly(_nodes)
        check_resources(spec, list(self._by_id.values()))
        if (job := provenance.submission_id()) and (held := interruptibly(lambda: _held(job))):
            node, amounts = held
            self._by_id[node] = {name: amount - amounts.get(name, 0) for name, amount in self._by_id[node].items()}
            try:
                check_resources(spec, list(self._by_id.values()))
            except UserError as err:
                own = ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())
                raise UserError(
                    f"entrypoint: this job itself holds {own}, which its points need; submit it without "
                    f"--entrypoint-num-cpus and the like\n{err}"
                ) from None
        self._nodes = list(self._by_id.values())
        self._type = spec.resources.accelerator_type  # of all points: the requested one, else the one probed
        self._planned: Share | None = None  # of the probe, then of the points
        self._task: Any = None
        self._gpus: str | None = None
        self._cluster: Cluster | None = None  # for points of several ranks
        self._grace_s = 0.0  # that points have to end
        self._live: dict[Any, int] = {}  # ray.ObjectRefGenerator -> batch
        self._watch = ClusterWatch(head, self._check_room)

    def probe(self) -> Mapping[str | None, Machine]:
        """As LocalExecutor, once a slot is free; also pins the points to the type of the card that was probed."""
        import ray

        required = Requirements.of(self._spec)
        has_gpu = any(node.get("GPU", 0) >= 1 for node in self._nodes)
        gpus = required.gpus if required.gpus is not None else float(has_gpu and self._spec.device != "cpu")
        # A probe whose worker or node is lost says nothing about the spec: another is tried.
        task: Any = ray.remote(max_retries=_PROBES - 1, max_calls=0)(_probe)  # pyright: ignore[reportCallIssue]
        self._planned = Share.of(self._spec, gpus, self._type)
        task = task.options(**_options(self._planned))
        with _gone():
            answer = interruptibly(lambda: task.remote(required, None if gpus else ""))  # the head hears of it here
            if not ray.wait([answer], timeout=_PATIENCE_S)[0]:
                count = len(required.envs) * len(required.pythons)
                checks = f", and to check {count} environments there" if count > 1 else ""
                warn(f"waiting for the cluster to have room for a point{checks}")
            while not ray.wait([answer], timeout=_ANSWER_S)[0]:
                self._watch.look()
            node, machines = ray.get(answer)
        gpus = gpus_per_point(self._spec, machines[self._spec.python[0]])  # none if the nodes' GPUs are of no use
        if gpus and self._type is None:
            self._type = next(iter(card_types(self._by_id.get(node, {}))), None)
        self._check_nodes(required, gpus, checked=node)
        return machines

    def _check_nodes(self, required: Requirements, gpus: float, checked: str) -> None:
        """Check paths and interpreters on every other node that may run a point; waits for no room there."""
        import ray
        from ray.exceptions import RayError, RayTaskError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        share = Share.of(self._spec, gpus, self._type)
        nodes = [node for node, resources in self._by_id.items() if node != checked and share.on(resources)]
        if not nodes or not (required.paths or any(required.pythons)):
            return
        check: Any = ray.remote(num_cpus=0, max_retries=0)(requirements.lacking)  # pyright: ignore[reportCallIssue]
        tasks = [check.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)) for node in nodes]
        answers = interruptibly(lambda: [task.remote(required) for task in tasks])
        ready, late = ray.wait(answers, num_returns=len(answers), timeout=_CHECK_S)
        mistakes = []
        for answer in ready:
            try:
                mistakes += ray.get(answer)
            except RayTaskError:
                raise
            except RayError:  # the node left the cluster: it measures nothing
                continue
        if late:
            warn(f"{len(late)} nodes did not say within {_CHECK_S:.0f} s what they have")
        if mistakes:
            raise UserError("\n".join(dict.fromkeys(mistakes)))

    def slots(self, machine: Machine) -> int:
        import ray

        share = Share.of(self._spec, gpus_per_point(self._spec, machine), self._type)
        # max_calls=0: only the task's children use the GPU, so Ray need not replace the task's process.
        remote: Any = ray.remote(max_retries=0, max_calls=0, num_returns="streaming")  # pyright: ignore[reportCallIssue]
        self._planned = share
        self._cluster = Cluster(share.cpus, share.gpus, share.card_type) if share.ranks > 1 else None
        supervisor_share = replace(share, cpus=0, gpus=0) if self._cluster else share
        self._task = remote(_supervise).options(**_options(supervisor_share))
        self._gpus = None if supervisor_share.gpus else ""
        room = share.points(self._nodes)
        return max(1, min(room, self._spec.resources.workers or room))

    def submit(self, batch: int, assignments: Sequence[Assignment], conditions: Conditions) -> None:
        self._grace_s = conditions.grace_s
        with _gone():
            self._live[self._task.remote(assignments, conditions, self._gpus, self._cluster)] = batch

    def poll(self, timeout: float) -> list[tuple[int, Update | BatchEnded]]:
        import ray

        self._watch.look()
        if not self._live:
            time.sleep(timeout)
            return []
        with _gone():
            ready, _ = ray.wait(list(self._live), num_returns=1, timeout=timeout)
        return [(self._live[stream], self._next(stream)) for stream in ready]

    def cancel(self) -> None:
        """Interrupt the tasks, which end their children; the children of a slower task die with its process."""
        patience_s = _CANCEL_S + min(self._grace_s, _time_to_stop())
        cancelled = BackgroundCall(lambda: self._cancel_tasks(patience_s))
        if cancelled.done(patience_s):  # a frozen node gives no task's end
            cancelled.result()

    def _cancel_tasks(self, patience_s: float) -> None:
        import ray

        for stream in self._live:
            ray.cancel(stream)
        deadline = time.monotonic() + patience_s
        while self._live and time.monotonic() < deadline:
            for batch, update in self.poll(0.1):
                if isinstance(update, BatchEnded):
                    self._live = {stream: b for stream, b in self._live.items() if b != batch}

    def _next(self, stream: Any) -> Update | BatchEnded:
        import ray

        try:
            update: Any = ray.get(next(stream))
            return update
        except StopIteration:
            end = BatchEnded()
        except Exception as err:
            end = _batch_ended(err)
        self._live.pop(stream, None)
        return end

    def _check_room(self) -> None:
        """Check that the nodes have room for what the tasks ask Ray for, which is narrower than the spec."""
        if self._planned is not None:
            check_room(self._planned, list(_nodes().values()))


def _time_to_stop() -> float:
    """Seconds that this process may take to end beyond what it needs itself: Ray kills a stopped job's after some."""
    if provenance.submission_id() is None:
        return math.inf
    with suppress(ValueError):
        return max(0.0, float(os.environ.get("RAY_JOB_STOP_WAIT_TIME_S", "")) - _STOP_S)
    return 0.0


def _options(share: Share) -> dict[str, Any]:
    """Ray's options of a task that needs a share of a node."""
    options: dict[str, Any] = {"num_cpus": share.cpus, "num_gpus": share.gpus}
    if share.card_type:
        options["accelerator_type"] = share.card_type
    return options


def _supervise(
    assignments: Sequence[Assignment], conditions: Conditions, gpus: str | None, cluster: Cluster | None
) -> Iterator[Update]:
    """As supervisor.supervise, in a task; ranks run on the cluster of this task."""
    if cluster is not None:
        import ray

        context = ray.get_runtime_context()
        cluster = replace(cluster, address=context.gcs_address, runtime_env=dict(context.runtime_env.to_dict()))
    yield from supervisor.supervise(assignments, conditions, gpus, cluster=cluster)


def _probe(required: Requirements, gpus: str | None) -> tuple[str, dict[str | None, Machine]]:
    """The id of the node where this task runs, and the machine there. Raises UserError."""
    import ray

    return ray.get_runtime_context().get_node_id(), requirements.check(required, gpus)


def _nodes() -> dict[str, dict[str, float]]:
    """Resources of the living nodes, by node id."""
    import ray

    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def _held(job: str) -> tuple[str, dict[str, float]] | None:
    """The node of a job's entrypoint and what it holds there while it runs; None if nothing, as without options."""
    from ray.util.state import list_actors
    from ray.util.state.exception import RayStateApiException

    filters: Any = [("class_name", "=", "JobSupervisor"), ("state", "=", "ALIVE")]
    with suppress(RayStateApiException):  # the dashboard does not answer
        actors: Any = list_actors(filters=filters, detail=True)
        for actor in actors:
            if str(actor.name).endswith(job) and actor.required_resources and actor.node_id:
                return actor.node_id, actor.required_resources
    return None


def _batch_ended(err: Exception) -> BatchEnded:
    from ray import exceptions

    if isinstance(err, exceptions.OutOfMemoryError):  # Ray's memory monitor ended the task before the kernel did
        return BatchEnded(PointState.OOM, f"ended by Ray, the node was nearly out of memory: {in_brief(err)}")
    if isinstance(err, exceptions.TaskCancelledError):
        return BatchEnded(PointState.CANCELLED, "its task was cancelled")
    if isinstance(err, exceptions.RayTaskError):  # a bug of ours: show the cause without Ray's framing
        return BatchEnded(PointState.LOST, f"the supervisor failed: {type(err.cause).__name__}: {in_brief(err.cause)}")
    return BatchEnded(PointState.LOST, f"{type(err).__name__}: {in_brief(err)}")


@contextmanager
def _gone() -> Iterator[None]:
    from ray.exceptions import RayError, RayTaskError

    try:
        yield
    except RayTaskError as err:
        raise err.cause from None
    except (RayError, ConnectionError) as err:
        raise ExecutorGone(f"the Ray cluster went away: {in_brief(err)}") from None
