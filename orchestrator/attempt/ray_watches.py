"""Watches of a point's ranks on a Ray cluster, from the point's process: an actor on each of their nodes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

from jobs.hardware.gpu_samples import Sample, bounded
from jobs.schema.point import Reading
from orchestrator.attempt import diagnostics
from orchestrator.attempt.ray_rank import NodeWatch, Placed
from orchestrator.attempt.sampling import interval

ANSWER_S = 15.0
"""Seconds that a node has to answer, or Ray to say that it is gone."""
EXPLAIN_S = diagnostics.STACKS_S + 5.0
"""Seconds that nodes have to explain their ranks: to read stacks, with Ray's way there and back."""


class Watches:
    """Watches of the ranks, however often these are started.

    Args:
        tell: takes each reading of the ranks' hardware, about one a second and then fewer.

    Attributes:
        samples: samples of the GPUs of all ranks that have ended, merged if there are many; [] on CPUs.
    """

    def __init__(self, tell: Callable[[Reading], None]) -> None:
        self.samples: list[Sample] = []
        self._tell = tell
        self._actors: dict[str, Any] = {}  # handles of NodeWatch, by node
        self._asked: list[Any] = []
        self._begun: float | None = None  # when ranks were first watched
        self._read = 0.0
        self._last = -1  # number of the last reading

    def __bool__(self) -> bool:
        """Whether ranks are watched."""
        return bool(self._actors)

    def begin(self, placed: Mapping[int, Placed], cores: float) -> None:
        """Watch ranks, each of which has a number of processor cores."""
        nodes: dict[str, list[Placed]] = {}
        for number in sorted(placed):
            nodes.setdefault(placed[number].node, []).append(placed[number])
        self._begun = time.monotonic() if self._begun is None else self._begun
        self._actors = {node: actor(NodeWatch, node).remote(here, cores, self._last) for node, here in nodes.items()}

    def read(self) -> None:
        """Ask for readings if it is time, and pass on what was answered; waits for nothing."""
        import ray
        from ray.exceptions import RayError

        clock = time.monotonic()
        if self._asked:
            done, self._asked = ray.wait(self._asked, num_returns=len(self._asked), timeout=0)
            for answer in done:
                with contextlib.suppress(RayError):  # a node went away
                    for reading in ray.get(answer):
                        self._last = max(self._last, reading.number)
                        self._tell(reading)
        elif self._begun is not None and clock - self._read >= interval(clock - self._begun):
            self._read = clock
            self._asked = [watch.readings.remote() for watch in self._actors.values()]

    def explain(self) -> dict[str, str]:
        """Stacks of the ranks and their flight recorders, now: text by file name. May be called by another thread."""
        files: dict[str, str] = {}
        asked = {node: watch.explain.remote() for node, watch in self._actors.items()}
        for answer in _answers(asked, EXPLAIN_S).values():
            files |= answer
        return files

    def end(self) -> set[str]:
        """Take in the samples of ranks that have ended. Returns the nodes that are silent."""
        asked = {node: watch.samples.remote() for node, watch in self._actors.items()}
        self._actors, self._asked = {}, []
        found = _answers(asked, ANSWER_S)
        self.samples = bounded([*self.samples, *chain.from_iterable(found.values())])
        return asked.keys() - found.keys()


def _answers(asked: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """The answers of actors by node; without those that do not answer in time."""
    import ray
    from ray.exceptions import RayError

    in_time = set(ray.wait([*asked.values()], num_returns=len(asked), timeout=timeout)[0]) if asked else set()
    found = {}
    for node, answer in asked.items():
        with contextlib.suppress(RayError):
            if answer in in_time:
                found[node] = ray.get(answer)
    return found


def actor(cls: type, node: str) -> Any:
    """Ray's class of an actor on a node, which takes none of its resources."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    found: Any = ray.remote(num_cpus=0)(cls)
    return found.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
