"""Ranks of a point as workers of Ray Train, on one node of the cluster or several, from the point's process.

That process is a Ray driver of its own: what it started on the cluster ends with it, however it ends. Restarts are the
job's, not Ray Train's, which would also repeat a training that diverged.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, ClassVar, TypeVar

from jobs.hardware.telemetry import Sample, summarise_samples
from jobs.process import post_mortem
from jobs.process.messages import Cluster, Environment, MeasurePoint
from jobs.process.reporter import interval
from jobs.schema.point import Measurement, Rank, RanksEnded, Samples
from jobs.training.rank import PROCESS_GROUP, TIMEOUT
from orchestrator.background import in_background
from orchestrator.execute.ray_connection import in_brief
from orchestrator.execute.ray_rank import Mailbox, NodeAgent, Placed, Raised, RankRaised, Returned, Work, rank_main

T = TypeVar("T")
ANSWER_S = 15.0  # seconds that a node has to answer, or Ray to say that it is gone
EXPLAIN_S = post_mortem.STACKS_S + 5.0  # that nodes have to read their ranks' stacks, with Ray's way there and back
_POLL_S = 0.2
_WAITING_S = 1.0
_STARTS = 3  # tries to start the ranks; a node may go away meanwhile
_LOG = {"RAY_COLOR_PREFIX": "0", "RAY_DEDUP_LOGS": "0"}  # what ranks print is kept as a file, all of it
_TRAIN = {  # of Ray Train, read by this process and its controller
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths of a spec are relative to the job's upload
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(7 * 24 * 3600),  # the ranks may wait long for room
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "5",  # a rank that waits for a dead one does not answer
}


class RayLauncher:
    """As jobs.schema.point.Launcher; `cluster` has the resources of each rank.

    `send` gets the point's environment, from its first rank, and samples of the ranks' hardware.
    """

    name: ClassVar[str] = "ray-train"

    def __init__(self, command: MeasurePoint, cluster: Cluster, send: Callable[[Environment | Samples], None]) -> None:
        self.agents = NodeAgents(send)
        self._command, self._cluster, self._send = command, cluster, send

    def run(
        self,
        ranks: int,
        device: str,
        main: Callable[[Rank], T],
        note: Callable[[Any], None],
        tell: Callable[[str], None],
        stop: threading.Event,
    ) -> list[T]:
        """As jobs.schema.point.Launcher. Ranks that were asked to end have no time limit but the point's deadlines.

        Raises RuntimeError: Ray Train could not start the ranks, or failed itself.
        """
        with driver(self._cluster, stop):
            import ray
            from ray.util import placement_group_table

            context = ray.get_runtime_context()
            mailbox, job = actor(Mailbox, context.get_node_id()).remote(), context.get_job_id()
            progress, work = RankProgress(), Work(main, mailbox, self._command, self._cluster)
            fit = in_background(_trainer(ranks, work).fit)
            stop_sent, looked, running = False, 0.0, True
            try:
                while running:
                    running = not fit.done()  # asked before reading: the last messages are read, too
                    self._receive(mailbox, _POLL_S if running else 0.0, progress, note)
                    if len(progress.placed) == ranks and not self.agents.actors:
                        self.agents.begin(progress.placed, self._cluster.cpus)
                    self.agents.read()
                    if stop.is_set() and not progress.placed:
                        raise RanksEnded({}, {})
                    if stop.is_set() and not stop_sent:
                        stop_sent = True
                        mailbox.stop.remote()
                    if not progress.placed and time.monotonic() - looked > _WAITING_S:
                        looked = time.monotonic()
                        groups: Mapping[str, Mapping[str, Any]] = placement_group_table()
                        mine = [group for name, group in groups.items() if name.endswith(job)]  # ends with the driver's
                        if any(group["state"] == "PENDING" for group in mine):
                            tell("room on the cluster")
            finally:
                silent = self.agents.end()
            if len(progress.results) == ranks:
                return [progress.results[number] for number in range(ranks)]
            error = None
            try:
                fit.result()
            except Exception as err:
                error = err
            raise end_of_ranks(error, progress, _lost(silent))

    def with_gpu_metrics(self, measurement: Measurement) -> Measurement:
        """The measurement with the metrics of the ranks' GPUs that it lacks, and a table of them as a file."""
        if not self.agents.samples:
            return measurement
        summary = summarise_samples(self.agents.samples)
        names = {metric.name for metric in measurement.metrics}
        added = tuple(metric for metric in summary.metrics if metric.name not in names)
        files = {**measurement.files, "telemetry.txt": summary.text}
        return replace(measurement, metrics=measurement.metrics + added, files=files)

    def _receive(self, mailbox: Any, timeout: float, progress: RankProgress, note: Callable[[Any], None]) -> None:
        """Take the ranks' new messages; waits up to `timeout` seconds for the first. Raises RanksEnded."""
        import ray
        from ray.exceptions import RayError

        try:
            messages = ray.get(mailbox.receive.remote(timeout))
        except RayError as err:  # with its actor the messages are lost, not the training
            died = dict.fromkeys(progress.placed, f"lost its mailbox: {in_brief(err)}")
            raise RanksEnded(died, progress.tails) from None
        for message in map(pickle.loads, messages):
            match message:
                case Placed(rank=number):
                    progress.placed[number] = message
                    if message.environment:
                        self._send(Environment(message.environment))
                case Returned(rank=number, result=result):
                    progress.results[number] = result
                case Raised(rank=number, tail=tail):
                    progress.tails[number] = tail
                case _:
                    note(message)


class NodeAgents:
    """Actors that sample and explain the ranks on their nodes, however often these are started.

    `send` gets readings of the ranks' hardware, about one a second and then fewer.
    """

    def __init__(self, send: Callable[[Samples], None]) -> None:
        self.actors: dict[str, Any] = {}  # handles of NodeAgent, by node, while ranks run
        self.samples: list[Sample] = []  # of the GPUs of all ranks that have ended
        self._send = send
        self._questions: list[Any] = []  # without an answer yet
        self._number = 0  # of the reading that they ask for, through all starts of the ranks
        self._begun: float | None = None  # when ranks were first watched
        self._asked = 0.0

    def begin(self, placed: Mapping[int, Placed], cores: float) -> None:
        """Sample ranks, each of which has a number of processor cores."""
        nodes: dict[str, list[Placed]] = {}
        for number in sorted(placed):
            nodes.setdefault(placed[number].node, []).append(placed[number])
        self._begun = time.monotonic() if self._begun is None else self._begun
        self.actors = {node: actor(NodeAgent, node).remote(here, cores) for node, here in nodes.items()}

    def explain(self) -> dict[str, str]:
        """Stacks of the ranks and their flight recorders, now: text by file name. May be called by another thread."""
        questions = {node: agent.explain.remote() for node, agent in self.actors.items()}
        return {name: text for files in answers(questions, EXPLAIN_S).values() for name, text in files.items()}

    def read(self) -> None:
        """Ask for readings if it is time, and send those that were answered; waits for nothing."""
        import ray
        from ray.exceptions import RayError

        if self._questions:
            answered, self._questions = ray.wait(self._questions, num_returns=len(self._questions), timeout=0)
            for answer in answered:
                with contextlib.suppress(RayError):  # a node went away
                    for reading in ray.get(answer):
                        self._send(replace(reading, step=self._number))
        elif self._begun is not None and (clock := time.monotonic()) - self._asked >= interval(clock - self._begun):
            self._asked, self._number = clock, self._number + 1
            self._questions = [agent.readings.remote() for agent in self.actors.values()]

    def end(self) -> set[str]:
        """Collect the samples of ranks that have ended. Returns the nodes that do not answer."""
        questions = {node: agent.samples.remote() for node, agent in self.actors.items()}
        self.actors, self._questions = {}, []
        answered = answers(questions, ANSWER_S)
        self.samples += chain.from_iterable(answered.values())
        return questions.keys() - answered.keys()


@dataclass
class RankProgress:
    """Reports of the ranks, by rank."""

    placed: dict[int, Placed] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)
    tails: dict[int, str] = field(default_factory=dict)  # ends of tracebacks


def _trainer(ranks: int, work: Work) -> Any:
    """Ray Train's trainer of the ranks."""
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    class Trainer(TorchTrainer):
        """Without two actors, each a process that has to start before the ranks.

        Private in Ray 2.60, which has no setting for it: the cleaner of placement groups outlives a killed driver
        (Ray removes a driver's groups with it), and the manager of Ray's datasets has none to manage.
        """

        def _create_default_callbacks(self) -> list[Any]:
            unused = ("PlacementGroupCleanerCallback", "DatasetsCallback")
            return [one for one in super()._create_default_callbacks() if type(one).__name__ not in unused]

    cluster = work.cluster
    resources = {"CPU": cluster.cpus, "GPU": cluster.gpus}
    return Trainer(
        rank_main,
        train_loop_config={"work": work},
        torch_config=TorchConfig(
            backend="nccl" if work.command.device == "cuda" else "gloo", timeout_s=int(TIMEOUT.total_seconds())
        ),
        scaling_config=ScalingConfig(
            num_workers=ranks,
            use_gpu=cluster.gpus > 0,
            resources_per_worker={name: amount for name, amount in resources.items() if amount},
            accelerator_type=cluster.accelerator_type,
        ),
        run_config=RunConfig(
            name=f"ranks-{uuid.uuid4().hex[:12]}",
            storage_path=tempfile.gettempdir(),
            failure_config=FailureConfig(
                max_failures=0, max_preemption_failures=0, controller_failure_limit=_STARTS - 1
            ),
            logging_config=LoggingConfig("ERROR"),
        ),
    )


@contextlib.contextmanager
def driver(cluster: Cluster, stop: threading.Event) -> Iterator[None]:
    """Be a driver of the cluster; all that it started there ends with the block.

    Raises RanksEnded, and sets `stop`, if SIGTERM came while Ray connected.
    """
    before = signal.getsignal(signal.SIGTERM)
    if cluster.address.startswith("127."):  # where Ray itself takes loopback for the address that others reach
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ.pop("RAY_JOB_ID", None)  # of the supervising task
    os.environ.update(_TRAIN | _LOG)
    import ray

    env = dict(cluster.runtime_env)
    # Ray's variables hide a node's own, which this process has.
    missing = {name: value for name, value in PROCESS_GROUP.items() if name not in os.environ}
    env["env_vars"] = {**missing, **env.get("env_vars", {}), **_TRAIN, **cluster.env_vars}
    try:
        try:
            ray.init(address=cluster.address, runtime_env=env, log_to_driver=True, logging_level=logging.ERROR)
        except SystemExit:  # of Ray's own handler
            stop.set()
            raise RanksEnded({}, {}) from None
        signal.signal(signal.SIGTERM, before)  # Ray has put its own there
        yield
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, before)


def end_of_ranks(error: Exception | None, progress: RankProgress, lost: Collection[str] = ()) -> Exception:
    """The exception for ranks that did not all return a result.

    `lost` are nodes that have left the cluster. Where a rank elsewhere has raised first, because its connection to them
    was closed, Ray Train says nothing of their ranks.
    """
    from ray.train import ControllerError, WorkerGroupError

    if isinstance(error, ControllerError):
        return RuntimeError(f"Ray Train could not start the ranks: {in_brief(error.controller_failure)}")
    if not isinstance(error, WorkerGroupError):
        return RuntimeError(f"Ray Train failed: {'no reason given' if error is None else in_brief(error)}")
    died = {number: err for number, err in sorted(error.worker_failures.items()) if not isinstance(err, RankRaised)}
    hosts = {number: placed.host for number, placed in progress.placed.items()}
    texts = {number: f"died on node {hosts.get(number, 'unknown')}: {in_brief(err)}" for number, err in died.items()}
    for number, placed in progress.placed.items():
        if placed.node in lost and number not in progress.tails | texts:
            texts[number] = f"was lost with node {placed.host}"
    out_of_memory = [number for number, err in died.items() if "running low on memory" in str(err)]
    cards = {
        number: f"GPU {rank.gpu} of {rank.host}" for number, rank in progress.placed.items() if rank.gpu is not None
    }
    return RanksEnded(texts, progress.tails, out_of_memory, cards)


def actor(cls: type, node: str) -> Any:
    """Ray's class of an actor on a node, which uses none of its resources."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote: Any = ray.remote(num_cpus=0)(cls)
    return remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))


def answers(questions: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """The answers of actors by node; without those that do not answer in time."""
    import ray
    from ray.exceptions import RayError

    answered: dict[str, Any] = {}
    if questions:
        ray.wait([*questions.values()], num_returns=len(questions), timeout=timeout)
    for node, question in questions.items():
        with contextlib.suppress(RayError):  # also that there is no answer yet
            answered[node] = ray.get(question, timeout=0)
    return answered


def _lost(silent: Collection[str]) -> set[str]:
    """The nodes that have left the cluster, of those that are silent; it takes some time until Ray says so."""
    import ray

    deadline = time.monotonic() + ANSWER_S * bool(silent)
    while True:
        living = {str(node["NodeID"]) for node in ray.nodes() if node["Alive"]}
        if time.monotonic() >= deadline or living.isdisjoint(silent):
            return set(silent) - living
        time.sleep(_POLL_S)
