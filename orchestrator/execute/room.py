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
    """Resources that one rank of a point needs on one node; a point of one rank needs them all there."""

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
    most = {name: max((node.get(name, 0) for node in nodes), default=0) for name in ("GPU", "CPU")}
    if share.ranks > 1 and share.cpus > most["CPU"]:
        errors.append(
            f"resources.num_cpus: {cpus:g}: is {share.cpus:g} for each of {share.ranks} ranks, and no node of the "
            f"cluster has more than {most['CPU']:g}; ask for fewer"
        )
    elif share.ranks == 1:
        if gpus > most["GPU"]:
            fix = "start a worker that has (nsa up on a GPU host) or ask for fewer"
            errors.append(f"resources.num_gpus: {gpus:g}: no node of the cluster has more than {most['GPU']:g}; {fix}")
        if cpus > most["CPU"]:
            errors.append(
                f"resources.num_cpus: {cpus:g}: no node of the cluster has more than {most['CPU']:g}; ask for fewer"
            )
    if errors:
        raise UserError("\n".join(errors))
    check_room(share, nodes)


def check_room(share: Share, nodes: Sequence[Mapping[str, float]]) -> None:
    """Check that the nodes, free or busy, have room for a point.

    Raises:
        UserError: says what they lack.
    """
    if share.points(nodes):
        return
    amounts = f"{share.gpus:g} GPU and {share.cpus:g} CPU cores" if share.gpus else f"{share.cpus:g} CPU cores"
    on_type = f" on {share.card_type}" if share.card_type else ""
    if share.ranks == 1:
        raise UserError(f"resources: no node of the cluster has {amounts}{on_type}; ask for less")
    raise UserError(
        f"ranks: {share.ranks}: all nodes of the cluster together have room for {sum(map(share.on, nodes))}, with "
        f"{amounts} each{on_type}; start more workers or use fewer ranks"
    )
