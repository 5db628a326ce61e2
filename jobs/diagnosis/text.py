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
    parts = [_warnings(advice, shown)]
    if found.ranks:
        parts += [_memory(found.ranks, shown), _ranks(found, shown)]
    parts += [_host(host, shown) for host in found.hosts]
    parts += [_variables(found, shown)]
    return "\n".join("\n".join(part) + "\n" for part in parts)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], shown: Shown) -> Iterator[str]:
    """Lines of a Markdown table, whose cells are text alone."""
    cells = ([shown(cell) for cell in row] for row in rows)
    for line in (columns, ["---"] * len(columns), *cells):
        yield f"| {' | '.join(line)} |"


def _warnings(advice: Sequence[Advice], shown: Shown) -> Iterator[str]:
    yield "## Warnings\n"
    if not advice:
        yield "none"
    for each in advice:
        yield f"- {shown(f'{each.what}; {each.fix}')}"


def _memory(ranks: Sequence[RankState], shown: Shown) -> Iterator[str]:
    gpu = any(rank.gpu for rank in ranks)
    yield f"## Memory [MiB]: {'most allocated / reserved / resident' if gpu else 'resident'}\n"
    rows = ([str(rank.rank), *(_sizes(rank.memory.get(phase), gpu) for phase in PHASES)] for rank in ranks)
    yield from _table(["rank", *PHASES.values()], rows, shown)


def _sizes(memory: Memory | None, gpu: bool) -> str:
    if memory is None:
        return "-"
    sizes = (memory.allocated, memory.reserved, memory.resident) if gpu else (memory.resident,)
    return " / ".join("-" if size is None else f"{size:,.0f}" for size in sizes)


def _ranks(found: Diagnosis, shown: Shown) -> Iterator[str]:
    yield "## Ranks\n"
    columns = ["rank", "host", "pid", "GPU", "cores", "threads", "busy", "route"]
    yield from _table(columns, (_rank(found, rank) for rank in found.ranks), shown)
    if found.imbalance is not None:
        yield f"\nThe slowest rank computes {found.imbalance:.1f} % longer than the mean."
    versions = {f"{name} {version}": 0 for rank in found.ranks for name, version in rank.versions.items()}
    yield f"\nVersions: {shown(', '.join(versions)) or 'unknown'}"


def _rank(found: Diagnosis, rank: RankState) -> list[str]:
    route = ", ".join(f"{branch}: {kernel}" for branch, kernel in rank.route.items()) or "-"
    busy = found.utilization.get(rank.rank)
    use = "-" if busy is None else f"{busy:.0f} %"
    place = (rank.gpu or "-", rank.cores or "-", str(rank.threads))
    return [str(rank.rank), rank.host, str(rank.pid), *place, use, route]


def _host(host: Topology, shown: Shown) -> Iterator[str]:
    yield f"## Host {shown(host.host)}\n"
    yield from (f"- {shown(fact)}" for fact in _facts(host))


def _facts(host: Topology) -> Iterator[str]:
    yield f"{host.cpu}, cores {host.cores or 'unknown'}, {host.memory_mib:,.0f} MiB of memory left"
    nodes = "; ".join(f"node {node}: cores {cores}" for node, cores in host.numa.items())
    yield f"NUMA: {nodes or 'unknown'}"
    if host.problem:
        yield f"no GPUs: {host.problem}"
    elif not host.gpus:
        yield "no GPU is visible"
    else:
        yield f"driver {host.driver or 'unknown'}"
    for gpu in host.gpus:
        node = "unknown" if gpu.numa is None else str(gpu.numa)
        used = "unknown" if gpu.used_mib is None else f"{gpu.used_mib:,.0f} of {gpu.memory_mib or 0:,.0f} MiB used"
        yield f"GPU {gpu.id}: {gpu.name}, {gpu.uuid}, NUMA node {node}, {used}"
    names = {gpu.uuid: gpu.id for gpu in host.gpus}
    for (a, b), way in host.links.items():
        yield f"GPU {names[a]} to GPU {names[b]}: {way}"


def _variables(found: Diagnosis, shown: Shown) -> Iterator[str]:
    yield "## Environment variables\n"
    if found.variables is None:
        yield "unknown: no process of the training was read on this host"
        return
    yield from (f"- {shown(f'{name}={value}')}" for name, value in sorted(found.variables.items()))
    if not found.variables:
        yield "none of PyTorch, CUDA, NCCL or their libraries is set"
