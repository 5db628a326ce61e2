"""Room for points on this machine or on the nodes of a cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jobs.schema.point import Machine
from jobs.specs.spec import JobSpec
from orchestrator.errors import UserError

MOST_A_CORE = 16
"""Points at a time for each core, however small a share of one they ask for: each is a process, which imports torch."""

_ACCELERATOR = "accelerator_type:"


def gpus_per_point(spec: JobSpec, machine: Machine) -> float:
    """GPUs for each point: the spec's num_gpus, else 1 on a CUDA device and 0 on a CPU."""
    num_gpus = spec.resources.num_gpus
    return num_gpus if num_gpus is not None else float(machine.device == "cuda")


def card_types(node: Mapping[str, float]) -> list[str]:
    """Ray's types of a node's accelerators; [] where Ray does not know them."""
    return [name.removeprefix(_ACCELERATOR) for name in node if name.startswith(_ACCELERATOR)]


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
