"""The executor for a Ray cluster: checks its resources, runs batches as tasks."""

from __future__ import annotations

import math
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from jobs.process.messages import Cluster
from jobs.schema.point import Machine
from jobs.schema.states import PointState
from jobs.specs.spec import JobSpec, card_of
from orchestrator import provenance
from orchestrator.background import in_background, interruptibly
from orchestrator.errors import ExecutorGone, UserError
from orchestrator.execute import requirements, supervisor
from orchestrator.execute.ray_connection import ClusterWatch, connect, in_brief
from orchestrator.execute.requirements import MOST_A_CORE, Requirements, gpus_per_point
from orchestrator.execute.supervisor import Assignment, BatchEnded, Conditions, Update
from orchestrator.settings import Settings
from orchestrator.terminal import warn

_CANCEL_S = 1.5
_STOP_S = 3.0  # that a driver needs to end, and that Ray gives it where nothing is set
_PATIENCE_S = 15.0
_PROBES = 3
_ANSWER_S = 1.0
_ONE_ID = uuid.UUID("a0f5e0f8-2c4e-4d55-9d0b-6a1f3c1c8f11")
ACCELERATOR = "accelerator_type:"


class RayExecutor:
    """Measures on a Ray cluster: one streaming task a batch, with the GPUs and cores of one point.

    The task of a point with several ranks has neither: Ray Train places the ranks, on one node or several.
    """

    def __init__(self, spec: JobSpec, settings: Settings) -> None:
        """Connect; raises UserError if no cluster answers, or no node (for ranks: the cluster) has room for a point."""
        self._spec = spec
        if spec.world_size > 1 and (python := next(filter(None, spec.python), None)):
            raise UserError(
                f"python: {python!r}: on a cluster, ranks run under the interpreter of its workers; leave it out, or "
                "use --local"
            )
        head = connect(spec, settings)
        self._nodes = interruptibly(_nodes)
        self._type = spec.resources.accelerator_type  # of all points: the requested one, else the one probed
        if self._type and not any(self._type in card_types(node) for node in self._nodes.values()):
            self._type = card_of(self._type)[0]  # Ray does not tell A100 of 40 GB and of 80 GB apart: `probe` does
        gpus = spec.resources.num_gpus
        self._share = Share.of(spec, float(spec.device == "cuda") if gpus is None else gpus, self._type)
        self._share.check([*self._nodes.values()])
        if (job := provenance.submission_id()) and (held := interruptibly(lambda: _held(job))):
            self._share.check_beside(self._nodes, *held)
        self._task: Any = None
        self._live: dict[Any, int] = {}  # ray.ObjectRefGenerator -> batch
        # Once a card was probed, tasks request that type only, which may be narrower than the spec.
        self._watch = ClusterWatch(head, lambda: self._share.check([*_nodes().values()]))

    def gpus(self) -> Mapping[str, int]:
        import ray

        found: Counter[str] = Counter()
        for node in interruptibly(ray.nodes):
            if node["Alive"] and self._share.on(node["Resources"]):
                found[node["NodeManagerHostname"]] += math.ceil(node["Resources"].get("GPU", 0))
        return found

    def probe(self) -> Mapping[str | None, Machine]:
        """As LocalExecutor, once a slot is free; also pins the points to the type of the card that was probed."""
        import ray

        required = Requirements.of(self._spec)
        has_gpu = any(node.get("GPU", 0) >= 1 for node in self._nodes.values())
        gpus = required.gpus if required.gpus is not None else float(has_gpu and self._spec.device != "cpu")
        share = self._share = Share.of(self._spec, gpus, self._type)
        # A probe whose worker or node is lost says nothing about the spec: another is tried.
        task = _task(share.cpus, share.gpus, share.card_type, retries=_PROBES - 1)
        with _gone():
            answer = interruptibly(lambda: task.remote(_probe, required, None if gpus else ""))  # the head hears of it
            if not ray.wait([answer], timeout=_PATIENCE_S)[0]:
                warn("waiting for the cluster to have room for a point")
            while not ray.wait([answer], timeout=_ANSWER_S)[0]:
                self._watch.look()
            node, machines = ray.get(next(answer))
        if (reason := self._spec.resources.misfit(machines[self._spec.python[0]])) is not None:
            raise UserError(reason)
        if self._type is None and gpus_per_point(self._spec, machines[self._spec.python[0]]):
            self._type = next(iter(card_types(self._nodes.get(node, {}))), None)
        return machines

    def slots(self, machine: Machine) -> int:
        share = self._share = Share.of(self._spec, gpus_per_point(self._spec, machine), self._type)
        cpus, gpus = (0, 0) if share.ranks > 1 else (share.cpus, share.gpus)
        self._task = _task(cpus, gpus, share.card_type)
        room = share.points([*self._nodes.values()])
        return max(1, min(room, self._spec.resources.workers or room))

    def submit(self, batch: int, assignments: Sequence[Assignment], conditions: Conditions) -> None:
        share = self._share
        cluster = Cluster(share.cpus, share.gpus, share.card_type) if share.ranks > 1 else None
        with _gone():
            visible = None if share.gpus and cluster is None else ""
            self._live[self._task.remote(_supervise, assignments, conditions, visible, cluster)] = batch

    def poll(self, timeout: float) -> list[tuple[int, Update | BatchEnded]]:
        import ray

        self._watch.look()
        if not self._live:
            time.sleep(timeout)
            return []
        with _gone():
            ready: list[Any] = ray.wait(list(self._live), num_returns=1, timeout=timeout)[0]
        updates = []
        for stream in ready:
            batch = self._live[stream]
            try:
                update: Any = ray.get(next(stream))
            except Exception as err:
                update = _batch_ended(err)
                del self._live[stream]
            updates.append((batch, update))
        return updates

    def cancel(self, grace_s: float) -> None:
        """Interrupt the tasks, which end their children; the children of a slower task die with its process."""
        patience_s = _CANCEL_S + min(grace_s, _time_to_stop())
        cancelled = in_background(lambda: self._cancel_tasks(patience_s))
        if wait([cancelled], patience_s).done:  # a frozen node gives no task's end
            cancelled.result()

    def _cancel_tasks(self, patience_s: float) -> None:
        import ray

        for stream in self._live:
            ray.cancel(stream)
        deadline = time.monotonic() + patience_s
        while self._live and time.monotonic() < deadline:
            self.poll(0.1)


@dataclass(frozen=True)
class Share:
    """Resources that one rank of a point needs on one node. Nodes are their resources by Ray's names, free or busy."""

    ranks: int  # of the point
    cpus: float  # of one rank, as are the GPUs
    gpus: float
    card_type: str | None  # Ray's type of the accelerators; None: any

    @classmethod
    def of(cls, spec: JobSpec, gpus: float, card_type: str | None) -> Share:
        """Share of a spec's points, which need `gpus` GPUs each."""
        ranks = spec.world_size
        return cls(ranks, spec.resources.num_cpus / ranks, gpus / ranks, card_type)

    def on(self, node: Mapping[str, float]) -> int:
        """The number of ranks that a node has room for at a time."""
        if self.card_type and self.card_type not in card_types(node):
            return 0
        room = node.get("CPU", 0) / self.cpus
        if self.gpus:
            room = min(room, node.get("GPU", 0) / self.gpus)
        return int(room + 1e-9)

    def points(self, nodes: Sequence[Mapping[str, float]]) -> int:
        """The number of points that the nodes have room for at a time."""
        most = math.ceil(MOST_A_CORE * sum(node.get("CPU", 0) for node in nodes))
        return min(sum(map(self.on, nodes)) // self.ranks, max(most, 1))

    def check(self, nodes: Sequence[Mapping[str, float]]) -> None:
        """Raise UserError if the nodes have no room for a point, which would wait for ever."""
        if self.points(nodes):
            return
        needs = f"{self.gpus:g} GPU and {self.cpus:g} CPU cores" if self.gpus else f"{self.cpus:g} CPU cores"
        needs += f" on {self.card_type}" if self.card_type else ""
        gpus, cpus = (max((node.get(name, 0) for node in nodes), default=0) for name in ("GPU", "CPU"))
        types = sorted({name for node in nodes for name in card_types(node)})
        has = f"no node has more than {gpus:g} GPU and {cpus:g} CPU cores"
        has += f", the cards are {', '.join(types)}" if types else ""
        if self.ranks == 1:
            fix = "start a worker that has (nsa up on a GPU host) or ask for less"
            raise UserError(f"resources: no node of the cluster has {needs}: {has}; {fix}")
        raise UserError(
            f"ranks: {self.ranks}: all nodes of the cluster together have room for {sum(map(self.on, nodes))}, each "
            f"with {needs}: {has}; start more workers or use fewer ranks"
        )

    def check_beside(self, nodes: Mapping[str, Mapping[str, float]], node: str, held: Mapping[str, float]) -> None:
        """Check that there is room for a point beside what this job's entrypoint holds on a node: it ends after its
        points. `ray job submit --entrypoint-num-cpus 2` on a cluster of two cores waited for ever.
        """
        free = {name: amount - held.get(name, 0) for name, amount in nodes.get(node, {}).items()}
        try:
            self.check([*({**nodes, node: free}).values()])
        except UserError:
            own = ", ".join(f"{amount:g} {name}" for name, amount in held.items())
            raise UserError(
                f"entrypoint: this job itself holds {own}, which its points need; submit it without "
                "--entrypoint-num-cpus and the like"
            ) from None


def card_types(node: Mapping[str, float]) -> list[str]:
    """Ray's types of a node's accelerators; [] where Ray does not know them."""
    return [name.removeprefix(ACCELERATOR) for name in node if name.startswith(ACCELERATOR)]


def _time_to_stop() -> float:
    """Seconds that this process may take to end beyond what it needs itself: Ray kills a stopped job's after some."""
    if provenance.submission_id() is None:
        return math.inf
    with suppress(ValueError):
        return max(0.0, float(os.environ.get("RAY_JOB_STOP_WAIT_TIME_S", "")) - _STOP_S)
    return 0.0


def _task(cpus: float, gpus: float, card_type: str | None, retries: int = 0) -> Any:
    """Ray's remote function that calls a function of this module, with such resources, and yields what that yields.

    Ray has a queue for each function and resources, and may serve one of them alone while it has tasks: of three runs
    on two slots the third had to wait until another had no points left. What has the same id is one function, also in
    other drivers, and its tasks are served in their order.
    """
    import ray

    # max_calls=0: only the task's children use the GPU, so Ray need not replace the task's process.
    task: Any = ray.remote(max_retries=retries, max_calls=0, num_returns="streaming")(_call)  # pyright: ignore[reportCallIssue]
    task._uuid = _ONE_ID
    return task.options(num_cpus=cpus, num_gpus=gpus, accelerator_type=card_type)


def _call(function: Callable[..., Iterator[Any]], *arguments: Any) -> Iterator[Any]:
    yield from function(*arguments)


def _supervise(
    assignments: Sequence[Assignment], conditions: Conditions, gpus: str | None, cluster: Cluster | None
) -> Iterator[Update]:
    """As supervisor.supervise, in a task; ranks run on the cluster of this task."""
    if cluster is not None:
        import ray

        context = ray.get_runtime_context()
        cluster = replace(cluster, address=context.gcs_address, runtime_env=dict(context.runtime_env.to_dict()))
    yield from supervisor.supervise(assignments, conditions, gpus, cluster=cluster)


def _probe(required: Requirements, gpus: str | None) -> Iterator[tuple[str, dict[str | None, Machine]]]:
    """The id of the node where this task runs, with the machine there. Raises UserError."""
    import ray

    yield ray.get_runtime_context().get_node_id(), requirements.check(required, gpus)


def _nodes() -> dict[str, dict[str, float]]:
    """Resources of the living nodes, by node id."""
    import ray

    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def _held(job: str) -> tuple[str, Mapping[str, float]] | None:
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
    """The end of a batch that an exception of its task's stream means."""
    from ray import exceptions

    if isinstance(err, StopIteration):
        return BatchEnded()
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
