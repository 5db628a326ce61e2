"""Advice: what is wrong with a training or its host, each with its fix; and all that is known of it, as Markdown, in
which names, versions and values are text alone, or as text on a terminal."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from jobs.diagnosis.rank_state import FIRST_STEP, NOW, PHASES, Memory, RankState
from jobs.hardware.topology import NVLINK, Topology, members
from jobs.schema.plain_text import for_file
from nsa_core.backends import BACKENDS
from nsa_core.backends.triton import TORCH, untested

# Bounds of the rules `utilisation` and `rank-imbalance`, and of the memory that a card should keep free.
_BUSY, _UNEVEN, _FULL = 80.0, 10.0, 0.9
_HELD, _LEAST_HELD = (3.0, 4096.0)  # reserved over allocated; MiB of both apart below which it does not matter
_LOW_HOST = 1024.0  # MiB

_OF_SEVERAL = {
    "NCCL_P2P_DISABLE": "gradients go through the host's memory instead of from GPU to GPU",
    "NCCL_SHM_DISABLE": "ranks of one host talk over the network",
    "NCCL_IB_DISABLE": "ranks of several hosts do not use InfiniBand",
}
_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": "the host waits for every kernel",
    "TORCH_NCCL_BLOCKING_WAIT": "the host waits for every collective",
    "NCCL_BLOCKING_WAIT": "the host waits for every collective",
    "TORCH_CUDA_SANITIZER": "every access is checked",
}

Shown = Callable[..., str]  # makes a string plain text where it is read: `for_file` or `in_a_line`


@dataclass(frozen=True)
class Advice:
    """A warning, and what mends it."""

    what: str
    fix: str


@dataclass(frozen=True)
class Diagnosis:
    """All that is known of a training and its hosts; of a host alone, without ranks."""

    ranks: Sequence[RankState] = ()  # by number
    hosts: Sequence[Topology] = ()  # that were looked at
    variables: Mapping[str, str] | None = None  # that steer PyTorch, CUDA and NCCL; None where no process was read
    utilization: Mapping[int, float] = field(default_factory=dict)  # of ranks' GPUs, or of their cores on a CPU [%]
    imbalance: float | None = None  # of the ranks' own compute time [%]; None if unknown


def advise(found: Diagnosis) -> list[Advice]:
    """Warnings about a diagnosis, each once."""
    advice = [*_together(found)]
    for host in found.hosts:
        advice += _host(found, host)
    for rank in found.ranks:
        advice += _rank(rank, found.utilization.get(rank.rank, _BUSY))
    return list(dict.fromkeys(advice))


def _together(found: Diagnosis) -> Iterator[Advice]:
    """Advice on variables, and on ranks that differ from each other or share the cores of a host."""
    for name, effect in (_VARIABLES | (_OF_SEVERAL if len(found.ranks) > 1 else {})).items():
        value = (found.variables or {}).get(name, "")
        if value.lower() not in ("", "0", "false"):
            yield Advice(f"{name}={value}: {effect}", f"unset {name}")
    if len({tuple(sorted(rank.versions.items())) for rank in found.ranks}) > 1:
        yield Advice("the ranks have different versions of their packages", "install the same on every node")
    if len({tuple(sorted(rank.route.items())) for rank in found.ranks}) > 1:
        yield Advice("the ranks run different kernels", "use one type of card and the same versions on every node")
    if found.imbalance is not None and found.imbalance > _UNEVEN:
        text = f"the slowest rank computes {found.imbalance:.0f} % longer than the mean, more than {_UNEVEN:.0f} %"
        yield Advice(text, "look for another process, a throttled GPU or fewer cores on its node")
    for name in dict.fromkeys(rank.host for rank in found.ranks if rank.device == "cpu"):
        here = [rank for rank in found.ranks if rank.host == name]
        cores, threads = (set[int]().union(*(members(rank.cores) for rank in here)), sum(r.threads for r in here))
        if cores and threads > len(cores):
            text = f"{threads} threads of {len(here)} ranks share {len(cores)} cores of {name}"
            yield Advice(text, f"use resources.num_cpus: {len(cores)} at most, or fewer ranks")


def _host(found: Diagnosis, host: Topology) -> Iterator[Advice]:
    """The host's memory, and its GPUs: of a training those of its ranks, else all."""
    if host.memory_mib < _LOW_HOST:
        text = f"{host.host} has only {host.memory_mib:,.0f} MiB of memory left"
        yield Advice(text, "end other processes, or lower the batch")
    ranks = {rank.gpu: rank for rank in found.ranks if rank.gpu}
    for (a, b), way in host.links.items():
        if a in ranks and b in ranks and way not in (NVLINK, "unknown"):
            which = f"ranks {ranks[a].rank} and {ranks[b].rank}"
            text = f"{which} have GPUs joined by {way}, not NVLink: gradients go over PCIe"
            yield Advice(text, "use GPUs joined by NVLink, or gradient_compression: bf16 and a larger batch")
    for gpu in host.gpus:
        rank = ranks.get(gpu.uuid)
        if gpu.throttled and (rank or not ranks):
            yield Advice(f"{gpu.uuid} is throttled", "nvidia-smi -q -d PERFORMANCE says why: power or cooling")
        if rank is None:
            continue
        if gpu.processes and len(gpu.processes) > sum(each.gpu == gpu.uuid for each in found.ranks):
            yield Advice(f"{gpu.uuid} has {len(gpu.processes)} processes", "end those that are not of this run")
        if gpu.used_mib and gpu.memory_mib and gpu.used_mib > _FULL * gpu.memory_mib:
            text = f"the GPU of rank {rank.rank} is full: {gpu.used_mib:,.0f} of {gpu.memory_mib:,.0f} MiB"
            yield Advice(text, "lower micro_batch, or turn checkpointing on")
        near, cores = (members(host.numa.get(-1 if gpu.numa is None else gpu.numa, "")), members(rank.cores))
        if near and cores and not cores & near:
            text = f"rank {rank.rank} may run on cores {rank.cores} alone, its GPU is on NUMA node {gpu.numa}"
            yield Advice(text, f"start it with numactl --cpunodebind={gpu.numa} --membind={gpu.numa}")


def _rank(rank: RankState, busy: float) -> Iterator[Advice]:
    """A rank's versions, memory, kernels, and how busy its GPU is."""
    if (version := rank.versions.get("torch")) and version not in TORCH:
        yield Advice(f"PyTorch {version} is untested, this package was run with {TORCH}", f"install {TORCH}")
    last = rank.memory.get(NOW) or rank.memory.get(FIRST_STEP) or Memory(None)
    allocated, reserved = last.allocated or 0.0, last.reserved or 0.0
    if allocated and reserved - allocated > _LEAST_HELD and reserved > _HELD * allocated:
        text = f"rank {rank.rank} holds {reserved:,.0f} MiB for tensors of {allocated:,.0f} MiB at most"
        yield Advice(text, 'set env: {PYTORCH_CUDA_ALLOC_CONF: "expandable_segments:True"}')
    if rank.device != "cuda":
        return
    if (version := rank.versions.get("triton")) and (reason := untested(version)):
        what, _, fix = reason.partition(": ")
        yield Advice(what, fix)
    if slow := sorted({kernel for kernel in rank.route.values() if kernel in BACKENDS and kernel != "triton"}):
        text = f"on a GPU {', '.join(slow)} runs, not the kernels"
        yield Advice(text, "set backend: triton to be told why, or precision: bfloat16")
    if busy < _BUSY:
        text = f"the GPU of rank {rank.rank} is busy {busy:.0f} % of the time, less than {_BUSY:.0f} %"
        yield Advice(text, "raise micro_batch, set compile: true, or give the data more cores")


def imbalance(compute: Mapping[int, float]) -> float | None:
    """By how much the slowest rank's compute time is above the mean [%]; None of a single rank."""
    return 100 * (max(compute.values()) / fmean(compute.values()) - 1) if len(compute) > 1 else None


def describe(found: Diagnosis, advice: Sequence[Advice], shown: Shown = for_file) -> str:
    """Warnings first, then memory, routes, hosts and versions."""
    lines = ["## Warnings\n", *([f"- {shown(f'{each.what}; {each.fix}')}" for each in advice] or ["none"]), ""]
    if found.ranks:
        lines += [*_ranks(found, shown), ""]
    for host in found.hosts:
        lines += [f"## Host {shown(host.host)}\n", *(f"- {shown(fact)}" for fact in _facts(host)), ""]
    lines.append("## Environment variables\n")
    if found.variables is None:
        lines.append("unknown: no process of the training was read on this host")
    else:
        variables = [f"- {shown(f'{name}={value}')}" for name, value in sorted(found.variables.items())]
        lines += variables or ["none of PyTorch, CUDA, NCCL or their libraries is set"]
    return "\n".join(lines) + "\n"


def _ranks(found: Diagnosis, shown: Shown) -> list[str]:
    """Tables of the ranks' memory, and of where and how they run; their versions."""
    gpu, memories, places = any(rank.gpu for rank in found.ranks), [], []
    for rank in found.ranks:
        cells = []
        for phase in PHASES:
            memory = rank.memory.get(phase, Memory(None))
            numbers = (memory.allocated, memory.reserved, memory.resident) if gpu else (memory.resident,)
            sizes = ["-" if size is None else f"{size:,.0f}" for size in numbers]
            cells.append(" / ".join(sizes) if phase in rank.memory else "-")
        memories.append([str(rank.rank), *cells])
        busy = f"{found.utilization[rank.rank]:.0f} %" if rank.rank in found.utilization else "-"
        route = ", ".join(f"{branch}: {kernel}" for branch, kernel in rank.route.items()) or "-"
        place = [rank.host, str(rank.pid), rank.gpu or "-", rank.cores or "-", str(rank.threads)]
        places.append([str(rank.rank), *place, busy, route])
    lines = []
    for title, columns, rows in (
        (f"Memory [MiB]: {'most allocated / reserved / resident' if gpu else 'resident'}", PHASES.values(), memories),
        ("Ranks", ("host", "pid", "GPU", "cores", "threads", "busy", "route"), places),
    ):
        cells = [["rank", *columns], ["---"] * (1 + len(columns)), *([shown(cell) for cell in row] for row in rows)]
        lines += [f"## {title}\n", *(f"| {' | '.join(line)} |" for line in cells), ""]
    lines.pop()
    if found.imbalance is not None:
        lines.append(f"\nThe slowest rank computes {found.imbalance:.1f} % longer than the mean.")
    versions = dict.fromkeys(f"{name} {version}" for rank in found.ranks for name, version in rank.versions.items())
    return [*lines, f"\nVersions: {shown(', '.join(versions)) or 'unknown'}"]


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
