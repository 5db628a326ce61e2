"""Room for points on this machine or on the nodes of a cluster."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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


@dataclass(frozen=True)
class Share:
    """Resources that one rank of a point needs on one node; a point of one rank needs them all there.

    Attributes:
        ranks: of the point.
        cpus, gpus: of one rank.
        card_type: Ray's type of the accelerators; None: any.
    """

    ranks: int
    cpus: float
    gpus: float
    card_type: str | None

    @classmethod
    def of(cls, spec: JobSpec, gpus: float, card_type: str | None) -> Share:
        """Share of a spec's points, which need `gpus` GPUs each."""
        ranks = spec.world_size
        return cls(ranks, spec.resources.num_cpus / ranks, gpus / ranks, card_type)

    def on(self, node: Mapping[str, float]) -> int:
        """The number of ranks that a node, its resources by Ray's names, has room for at a time."""
        if self.card_type and not node.get(_ACCELERATOR + self.card_type):
            return 0
        room = node.get("CPU", 0) / self.cpus
        if self.gpus:
            room = min(room, node.get("GPU", 0) / self.gpus)
        return int(room + 1e-9)

    def points(self, nodes: Iterable[Mapping[str, float]]) -> int:
        """The number of points that the nodes have room for at a time."""
        nodes = list(nodes)
        most = math.ceil(MOST_A_CORE * sum(node.get("CPU", 0) for node in nodes))
        return min(sum(map(self.on, nodes)) // self.ranks, max(most, 1))


def card_types(node: Mapping[str, float]) -> list[str]:
    """Ray's types of a node's accelerators; [] where Ray does not know them."""
    return [name.removeprefix(_ACCELERATOR) for name in node if name.startswith(_ACCELERATOR)]


def check_resources(spec: JobSpec, nodes: Sequence[Mapping[str, float]]) -> None:
    """Check that a node has the resources of a point, or the cluster those of its ranks; else it would wait for ever.

    Args:
        nodes: Ray resources of each node: name -> amount.

    Raises:
        UserError: names the lacking resource and the available amount.
    """
    cpus, card_type, errors = spec.resources.num_cpus, spec.resources.accelerator_type, []
    types = sorted({name for node in nodes for name in card_types(node)})
    if card_type and card_type not in types:
        has = f"has {', '.join(types)}" if types else "has no accelerators"
        errors.append(f"resources.accelerator_type: {card_type!r}: the cluster {has}; name one it has, or none")
    gpus = spec.resources.num_gpus
    if gpus is None:
        gpus = float(spec.device == "cuda")
    share = Share.of(spec, gpus, card_type)
    errors += _lacks_of_a_point(gpus, cpus, nodes) if share.ranks == 1 else _lacks_of_ranks(share, cpus, nodes)
    if not errors and not share.points(nodes):
        errors.append(
            f"resources: {gpus:g} GPUs of type {card_type or 'any'} with {cpus:g} CPU cores: no single node has them "
            "all; ask for less"
        )
    if errors:
        raise UserError("\n".join(errors))


def check_room(share: Share, nodes: Sequence[Mapping[str, float]]) -> None:
    """Check that the nodes, free or busy, have room for a point whose share is settled.

    Raises:
        UserError: says what they lack.
    """
    if share.points(nodes):
        return
    if share.ranks > 1:
        raise UserError("\n".join(_lacks_of_ranks(share, share.ranks * share.cpus, nodes)))
    raise UserError(f"no node of the cluster has the {_amounts(share)}{_on_type(share)} that a point is planned for")


def _lacks_of_a_point(gpus: float, cpus: float, nodes: Sequence[Mapping[str, float]]) -> list[str]:
    """Resources of which no node has as many as a point needs."""
    fixes = {"num_gpus": "start a worker that has (nsa up on a GPU host) or ask for fewer", "num_cpus": "ask for fewer"}
    errors = []
    for field, resource, need in (("num_gpus", "GPU", gpus), ("num_cpus", "CPU", cpus)):
        most = max((node.get(resource, 0) for node in nodes), default=0)
        if need > most:
            errors.append(f"resources.{field}: {need:g}: no node of the cluster has more than {most:g}; {fixes[field]}")
    return errors


def _lacks_of_ranks(share: Share, cpus: float, nodes: Sequence[Mapping[str, float]]) -> list[str]:
    """Lacks of a cluster for a point of several ranks, which may run on several nodes."""
    most = max((node.get("CPU", 0) for node in nodes), default=0)
    if share.cpus > most:
        return [
            f"resources.num_cpus: {cpus:g}: is {share.cpus:g} for each of {share.ranks} ranks, and no node of the "
            f"cluster has more than {most:g}; ask for fewer"
        ]
    room = sum(map(share.on, nodes))
    if room >= share.ranks:
        return []
    return [
        f"ranks: {share.ranks}: all nodes of the cluster together have room for {room}, with {_amounts(share)} each"
        f"{_on_type(share)}; start more workers or use fewer ranks"
    ]


def _amounts(share: Share) -> str:
    return f"{share.gpus:g} GPU and {share.cpus:g} CPU cores" if share.gpus else f"{share.cpus:g} CPU cores"


def _on_type(share: Share) -> str:
    return f" on {share.card_type}" if share.card_type else ""
