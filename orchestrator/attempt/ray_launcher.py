"""Ranks of a point as workers of Ray Train, on one node of the cluster or several.

The point's process is a Ray driver of its own: what it started on the cluster ends with it, however it ends. Restarts
are the job's, not Ray Train's, which would also repeat a training that diverged.
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
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from jobs.hardware.telemetry import summarise_samples
from jobs.schema.launcher import Rank, RanksEnded
from jobs.schema.plain_text import in_a_line
from jobs.schema.point import Measurement, Reading
from jobs.training.rank import TIMEOUT, missing_variables
from orchestrator.attempt import protocol
from orchestrator.attempt.description import described
from orchestrator.attempt.mailbox import Mailbox
from orchestrator.attempt.ray_rank import Placed, Raised, RankRaised, Returned, Work, rank_main
from orchestrator.attempt.ray_watches import ANSWER_S, Watches, actor

T = TypeVar("T")

_POLL_S = 0.2
_WAITING_S = 1.0
_REASON = 400  # characters
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
    """As jobs.schema.launcher.Launcher.

    Args:
        cluster: the cluster, and what each rank gets of it.
        tell: takes the point's environment, as its first rank finds it, and samples of the ranks' hardware.
    """

    name = "ray-train"

    def __init__(
        self,
        run: protocol.Run,
        cluster: protocol.Cluster,
        tell: Callable[[protocol.Environment | protocol.Samples], None],
    ) -> None:
        self._run = run
        self._cluster = cluster
        self._tell = tell
        self._watches = Watches(lambda reading: tell(_samples(reading)))

    def run(
        self,
        ranks: int,
        device: str,
        main: Callable[[Rank], T],
        note: Callable[[Any], None],
        tell: Callable[[str], None],
        stop: threading.Event,
    ) -> list[T]:
        """As jobs.schema.launcher.Launcher. Ranks that were asked to end have no time limit but the point's deadlines.

        Raises:
            RuntimeError: Ray Train could not start the ranks, or failed itself.
        """
        with _driver(self._cluster, stop):
            import ray

            mailbox = actor(Mailbox, ray.get_runtime_context().get_node_id()).remote()
            describe = partial(described, settings=self._run.settings)
            work = Work(main, mailbox, self._run.device, self._run.memory_bytes, self._cluster.card, describe)
            fit = _Fit(ranks, work, self._cluster)
            found = _Found(ranks, note)
            fit.start()
            try:
                self._follow(fit, found, mailbox, stop, tell)
            finally:
                silent = self._watches.end()
            if len(found.results) == ranks:
                return [found.results[number] for number in range(ranks)]
            raise _ended(fit.error, found, _dead(silent))

    def metered(self, measurement: Measurement) -> Measurement:
        """The measurement with the metrics of the ranks' GPUs that it lacks, and a table of them as a file."""
        if not self._watches.samples:
            return measurement
        summary = summarise_samples(self._watches.samples)
        known = {metric.name for metric in measurement.metrics}
        added = tuple(metric for metric in summary.metrics if metric.name not in known)
        files = {**measurement.files, "telemetry.txt": summary.text}
        return replace(measurement, metrics=measurement.metrics + added, files=files)

    def explain(self) -> dict[str, str]:
        """Stacks of the ranks and their flight recorders, now: text by file name. May be called by another thread."""
        return self._watches.explain()

    def _follow(
        self, fit: _Fit, found: _Found, mailbox: Any, stop: threading.Event, tell: Callable[[str], None]
    ) -> None:
        """Take the ranks' messages until Ray Train has ended; pass on the word to stop. Raises RanksEnded."""
        import ray
        from ray.exceptions import RayError

        asked, looked = False, 0.0
        running = True
        while running:
            running = fit.is_alive()  # asked before reading: the last messages are read, too
            try:
                messages = ray.get(mailbox.taken.remote(_POLL_S if running else 0.0))
            except RayError as err:  # with its actor the messages are lost, not the training
                raise RanksEnded(
                    dict.fromkeys(found.placed, f"lost its mailbox: {_in_words(err)}"), found.tails
                ) from None
            for message in map(pickle.loads, messages):
                found.note(message)
                if isinstance(message, Placed) and message.environment:
                    self._tell(protocol.Environment(message.environment))
            if found.all_placed and not self._watches:
                self._watches.begin(found.placed, self._cluster.cpus)
            self._watches.read()
            if stop.is_set() and not found.placed:
                raise RanksEnded({}, {})
            if stop.is_set() and not asked:
                asked = True
                mailbox.stop.remote()
            if not found.placed and time.monotonic() - looked > _WAITING_S:
                looked = time.monotonic()
                if _waiting_for_room():
                    tell("room on the cluster")


def _dead(silent: Collection[str]) -> set[str]:
    """The nodes that have left the cluster, of those that are silent; it takes some time until Ray says so."""
    import ray

    deadline = time.monotonic() + ANSWER_S * bool(silent)
    while True:
        living = {str(node["NodeID"]) for node in ray.nodes() if node["Alive"]}
        if time.monotonic() >= deadline or living.isdisjoint(silent):
            return set(silent) - living
        time.sleep(_POLL_S)


class _Found:
    """Messages of the ranks so far; the job's own are passed on."""

    def __init__(self, ranks: int, note: Callable[[Any], None]) -> None:
        self.placed: dict[int, Placed] = {}
        self.results: dict[int, Any] = {}
        self.tails: dict[int, str] = {}
        self._ranks = ranks
        self._pass_on = note

    @property
    def all_placed(self) -> bool:
        return len(self.placed) == self._ranks

    def note(self, message: Any) -> None:
        match message:
            case Placed(rank=number):
                self.placed[number] = message
            case Returned(rank=number, result=result):
                self.results[number] = result
            case Raised(rank=number, tail=tail):
                self.tails[number] = tail
            case _:
                self._pass_on(message)


class _Fit(threading.Thread):
    """Ray Train's `fit`, in a thread.

    Attributes:
        error: the exception that ended it, if any.
    """

    def __init__(self, ranks: int, work: Work, cluster: protocol.Cluster) -> None:
        super().__init__(name="ray-train", daemon=True)
        from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig

        self.error: Exception | None = None
        own = {"CPU": cluster.cpus, "GPU": cluster.gpus}
        self._trainer = _trainer_class()(
            rank_main,
            train_loop_config={"work": work},
            torch_config=TorchConfig(
                backend="nccl" if work.device == "cuda" else "gloo", timeout_s=int(TIMEOUT.total_seconds())
            ),
            scaling_config=ScalingConfig(
                num_workers=ranks,
                use_gpu=cluster.gpus > 0,
                resources_per_worker={name: amount for name, amount in own.items() if amount},
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

    def run(self) -> None:
        try:
            self._trainer.fit()
        except Exception as err:
            self.error = err


def _trainer_class() -> Any:
    """Ray Train's trainer without two of its actors, each a process that has to start before the ranks.

    The cleaner of placement groups outlives a killed driver, and may not end where a host has several clusters; Ray
    removes a driver's placement groups with the driver. The manager of Ray's datasets has none to manage.
    """
    from ray.train.torch import TorchTrainer

    class Trainer(TorchTrainer):
        def _create_default_callbacks(self) -> list[Any]:
            unused = ("PlacementGroupCleanerCallback", "DatasetsCallback")
            return [one for one in super()._create_default_callbacks() if type(one).__name__ not in unused]

    return Trainer


def _samples(reading: Reading) -> protocol.Samples:
    values = {quantity.name: value for quantity, value in reading.values.items()}
    units = {quantity.name: quantity.unit for quantity in reading.values}
    return protocol.Samples(reading.rank, reading.number, reading.at, values, units)


@contextlib.contextmanager
def _driver(cluster: protocol.Cluster, stop: threading.Event) -> Iterator[None]:
    """Be a driver of the cluster; all that it started there ends with the block.

    Raises:
        RanksEnded: SIGTERM came while Ray connected; sets `stop`.
    """
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    if cluster.address.startswith("127."):  # where Ray itself takes loopback for the address that others reach
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ.pop("RAY_JOB_ID", None)  # of the supervising task
    os.environ.update(_TRAIN | _LOG)
    import ray

    env = dict(cluster.runtime_env)
    # Ray's variables hide a node's own, which this process has.
    env["env_vars"] = {**missing_variables(), **env.get("env_vars", {}), **_TRAIN, **cluster.env_vars}
    try:
        try:
            ray.init(address=cluster.address, runtime_env=env, log_to_driver=True, logging_level=logging.ERROR)
        except SystemExit:  # of Ray's own handler
            stop.set()
            raise RanksEnded({}, {}) from None
        if main:
            signal.signal(signal.SIGTERM, before)  # Ray has put its own there
        yield
    finally:
        ray.shutdown()
        if main:
            signal.signal(signal.SIGTERM, before)


def _waiting_for_room() -> bool:
    """Whether a placement group of this driver, whose number ends the group's id, waits for resources."""
    import ray
    from ray.util import placement_group_table

    job = ray.get_runtime_context().get_job_id()
    groups: Mapping[str, Mapping[str, Any]] = placement_group_table()
    return any(group["state"] == "PENDING" for name, group in groups.items() if name.endswith(job))


def _ended(error: Exception | None, found: _Found, lost: Collection[str] = ()) -> Exception:
    """The exception for ranks that did not all return a result.

    Args:
        lost: nodes that have left the cluster. Ray Train tells nothing of their ranks where a rank elsewhere has raised
            first, because its connection to them was closed.
    """
    from ray.train import ControllerError, WorkerGroupError

    if isinstance(error, ControllerError):
        return RuntimeError(f"Ray Train could not start the ranks: {_in_words(error.controller_failure)}")
    if not isinstance(error, WorkerGroupError):
        return RuntimeError(f"Ray Train failed: {'no reason given' if error is None else _in_words(error)}")
    died = {number: err for number, err in sorted(error.worker_failures.items()) if not isinstance(err, RankRaised)}
    texts = {number: f"died on node {_host(found, number)}: {_in_words(err)}" for number, err in died.items()}
    unheard = [number for number, at in found.placed.items() if at.node in lost and number not in found.tails | texts]
    texts |= {number: f"was lost with node {_host(found, number)}" for number in unheard}
    memory = [number for number, err in died.items() if "running low on memory" in str(err)]
    return RanksEnded(texts, found.tails, memory)


def _host(found: _Found, number: int) -> str:
    return found.placed[number].host if number in found.placed else "unknown"


def _in_words(err: BaseException) -> str:
    """The message of an exception, shortened, on one line; without one its kind."""
    inner = getattr(err, "health_check_failure", err)  # Ray Train wraps the death of a worker
    return in_a_line(inner, _REASON) or type(inner).__name__
