"""A diagnosis as Markdown, in which names of hosts, versions and values of variables are text alone; as text on a
terminal, without the marks that Markdown needs for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from jobs.diagnosis.advice import Advice, Diagnosis
from jobs.diagnosis.rank_state import PHASES, Memory, RankState
from jobs.hardware.topology import Topology
from jobs.schema.plain_text import for_file

Shown = Callable[..., str]
"""Function that makes a string plain text where it is read: `for_file` for Markdown, `in_a_line` for a terminal."""


def describe(found: Diagnosis, advice: Sequence[Advice], shown: Shown = for_file) -> str:
    """Warnings first, then memory, routes, hosts and versions."""
    lines = ["## Warnings\n", *([f"- {shown(f'{each.what}; {each.fix}')}" for each in advice] or ["none"]), ""]
    if found.ranks:
        lines += [*_memory(found.ranks, shown), "", *_ranks(found, shown), ""]
    for host in found.hosts:
        lines += [f"## Host {shown(host.host)}\n", *(f"- {shown(fact)}" for fact in _facts(host)), ""]
    lines.append("## Environment variables\n")
    if found.variables is None:
        lines.append("unknown: no process of the training was read on this host")
    else:
        variables = [f"- {shown(f'{name}={value}')}" for name, value in sorted(found.variables.items())]
        lines += variables or ["none of PyTorch, CUDA, NCCL or their libraries is set"]
    return "\n".join(lines) + "\n"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], shown: Shown) -> list[str]:
    """Lines of a Markdown table, whose cells are text alone."""
    cells = [columns, ["---"] * len(columns), *([shown(cell) for cell in row] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in cells]


def _memory(ranks: Sequence[RankState], shown: Shown) -> list[str]:
    gpu, rows = any(rank.gpu for rank in ranks), []
    for rank in ranks:
        row = [str(rank.rank)]
        for phase in PHASES:
            memory = rank.memory.get(phase, Memory(None))
            numbers = (memory.allocated, memory.reserved, memory.resident) if gpu else (memory.resident,)
            sizes = ["-" if size is None else f"{size:,.0f}" for size in numbers]
            row.append(" / ".join(sizes) if phase in rank.memory else "-")
        rows.append(row)
    title = f"## Memory [MiB]: {'most allocated / reserved / resident' if gpu else 'resident'}\n"
    return [title, *_table(["rank", *PHASES.values()], rows, shown)]


def _ranks(found: Diagnosis, shown: Shown) -> list[str]:
    rows = []
    for rank in found.ranks:
        busy = f"{found.utilization[rank.rank]:.0f} %" if rank.rank in found.utilization else "-"
        route = ", ".join(f"{branch}: {kernel}" for branch, kernel in rank.route.items()) or "-"
        place = [rank.host, str(rank.pid), rank.gpu or "-", rank.cores or "-", str(rank.threads)]
        rows.append([str(rank.rank), *place, busy, route])
    lines = _table(["rank", "host", "pid", "GPU", "cores", "threads", "busy", "route"], rows, shown)
    if found.imbalance is not None:
        lines.append(f"\nThe slowest rank computes {found.imbalance:.1f} % longer than the mean.")
    versions = dict.fromkeys(f"{name} {version}" for rank in found.ranks for name, version in rank.versions.items())
    return ["## Ranks\n", *lines, f"\nVersions: {shown(', '.join(versions)) or 'unknown'}"]


def _facts(host: Topology) -> Iterator[str]:
    yield f"{host.cpu}, cores {host.cores or 'unknown'}, {host.memory_mib:,.0f} MiB of memory left"
    yield f"NUMA: {'; '.join(f'node {node}: cores {cores}' for node, cores in host.numa.items()) or 'unknown'}"
    if host.problem or not host.gpus:
        yield f"no GPUs: {host.problem}" if host.problem else "no GPU is visible"
    else:
        yield f"driver {host.driver or 'unknown'}"
    for gpu in host.gpus:
        node = "unknown" if gpu.numa is None else str(gpu.numa)
        used = "unknown" if gpu.used_mib is None else f"{gpu.used_mib:,.0f} of {gpu.memory_mib or 0:,.0f} MiB used"
        yield f"GPU {gpu.id}: {gpu.name}, {gpu.uuid}, NUMA node {node}, {used}"
    names = {gpu.uuid: gpu.id for gpu in host.gpus}
    for (a, b), way in host.links.items():
        yield f"GPU {names[a]} to GPU {names[b]}: {way}"
