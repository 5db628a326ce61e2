"""Advice: what is wrong with a training or its host, each with its fix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from jobs.diagnosis.rank_state import FIRST_STEP, NOW, Memory, RankState
from jobs.hardware.topology import NVLINK, Gpu, Topology, members
from nsa_core.backends import BACKENDS, TORCH, untested

# Bounds of the rules `utilisation` and `rank-imbalance`, and of the memory that a card should keep free.
_BUSY, _UNEVEN, _FULL = 80.0, 10.0, 0.9
_HELD, _LEAST_HELD = 3.0, 4096.0  # reserved over allocated; MiB of both apart below which it does not matter
_LOW_HOST = 1024.0  # MiB

_VARIABLES = {
    "NCCL_P2P_DISABLE": "gradients go through the host's memory instead of from GPU to GPU",
    "NCCL_SHM_DISABLE": "ranks of one host talk over the network",
    "NCCL_IB_DISABLE": "ranks of several hosts do not use InfiniBand",
    "CUDA_LAUNCH_BLOCKING": "the host waits for every kernel",
    "TORCH_NCCL_BLOCKING_WAIT": "the host waits for every collective",
    "NCCL_BLOCKING_WAIT": "the host waits for every collective",
    "TORCH_CUDA_SANITIZER": "every access is checked",
}
_ONLY_SEVERAL = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")
_OFF = ("", "0", "false")


@dataclass(frozen=True)
class Advice:
    """A warning, and what mends it."""

    what: str
    fix: str


@dataclass(frozen=True)
class Diagnosis:
    """All that is known of a training and its hosts; of a host alone, without ranks.

    Attributes:
        ranks: states of the ranks, by number.
        hosts: topology of the hosts that were looked at.
        variables: environment variables that steer PyTorch, CUDA and NCCL; None where no process was read.
        utilization: of each rank's GPU, or of its cores on a CPU [%].
        imbalance: of the ranks' own compute time [%]; None if unknown.
    """

    ranks: Sequence[RankState] = ()
    hosts: Sequence[Topology] = ()
    variables: Mapping[str, str] | None = None
    utilization: Mapping[int, float] = field(default_factory=dict)
    imbalance: float | None = None


def advise(found: Diagnosis) -> list[Advice]:
    """Warnings about a diagnosis, each once."""
    checks = (_variables, _links, _places, _versions, _routes, _memory, _hosts, _balance)
    return list(dict.fromkeys(advice for check in checks for advice in check(found)))


def _variables(found: Diagnosis) -> Iterator[Advice]:
    for name, effect in _VARIABLES.items():
        value = (found.variables or {}).get(name, "")
        if value.lower() not in _OFF and (name not in _ONLY_SEVERAL or len(found.ranks) > 1):
            yield Advice(f"{name}={value}: {effect}", f"unset {name}")


def _links(found: Diagnosis) -> Iterator[Advice]:
    """GPUs of two ranks that are not joined by NVLink."""
    own = {rank.gpu: rank.rank for rank in found.ranks if rank.gpu}
    for host in found.hosts:
        for (a, b), way in host.links.items():
            if a in own and b in own and way not in (NVLINK, "unknown"):
                text = f"ranks {own[a]} and {own[b]} have GPUs joined by {way}, not NVLink: gradients go over PCIe"
                yield Advice(text, "use GPUs joined by NVLink, or gradient_compression: bf16 and a larger batch")


def _places(found: Diagnosis) -> Iterator[Advice]:
    """Ranks whose cores are far from their GPU, or fewer than their threads."""
    for rank in found.ranks:
        cores = members(rank.cores)
        gpu, host = _gpu_of(found, rank)
        near = members(host.numa.get(gpu.numa, "")) if gpu and host and gpu.numa is not None else set[int]()
        if gpu and near and cores and not cores & near:
            text = f"rank {rank.rank} may run on cores {rank.cores} alone, its GPU is on NUMA node {gpu.numa}"
            yield Advice(text, f"start it with numactl --cpunodebind={gpu.numa} --membind={gpu.numa}")
    for name in dict.fromkeys(rank.host for rank in found.ranks):
        here = [rank for rank in found.ranks if rank.host == name]
        cores, threads = set[int]().union(*(members(rank.cores) for rank in here)), sum(r.threads for r in here)
        if here[0].device == "cpu" and cores and threads > len(cores):
            text = f"{threads} threads of {len(here)} ranks share {len(cores)} cores of {name}"
            yield Advice(text, f"use resources.num_cpus: {len(cores)} at most, or fewer ranks")


def _versions(found: Diagnosis) -> Iterator[Advice]:
    for rank in found.ranks:
        if (version := rank.versions.get("torch")) and version not in TORCH:
            yield Advice(f"PyTorch {version} is untested, this package was run with {TORCH}", f"install {TORCH}")
        version = rank.versions.get("triton")
        if rank.device == "cuda" and version and (reason := untested(version)):
            what, _, fix = reason.partition(": ")
            yield Advice(what, fix)
    if len({tuple(sorted(rank.versions.items())) for rank in found.ranks}) > 1:
        yield Advice("the ranks have different versions of their packages", "install the same on every node")


def _routes(found: Diagnosis) -> Iterator[Advice]:
    for rank in found.ranks:
        slow = sorted({kernel for kernel in rank.route.values() if kernel in BACKENDS and kernel != "triton"})
        if rank.device == "cuda" and slow:
            text = f"on a GPU {', '.join(slow)} runs, not the kernels"
            yield Advice(text, "set backend: triton to be told why, or precision: bfloat16")
    if len({tuple(sorted(rank.route.items())) for rank in found.ranks}) > 1:
        yield Advice("the ranks run different kernels", "use one type of card and the same versions on every node")


def _memory(found: Diagnosis) -> Iterator[Advice]:
    for rank in found.ranks:
        last = rank.memory.get(NOW) or rank.memory.get(FIRST_STEP) or Memory(None)
        if last.allocated and last.reserved:
            apart = last.reserved - last.allocated
            if apart > _LEAST_HELD and last.reserved > _HELD * last.allocated:
                text = (
                    f"rank {rank.rank} holds {last.reserved:,.0f} MiB for tensors of {last.allocated:,.0f} MiB at most"
                )
                yield Advice(text, 'set env: {PYTORCH_CUDA_ALLOC_CONF: "expandable_segments:True"}')
        gpu, _ = _gpu_of(found, rank)
        if gpu and gpu.used_mib and gpu.memory_mib and gpu.used_mib > _FULL * gpu.memory_mib:
            text = f"the GPU of rank {rank.rank} is full: {gpu.used_mib:,.0f} of {gpu.memory_mib:,.0f} MiB"
            yield Advice(text, "lower micro_batch, or turn checkpointing on")


def _hosts(found: Diagnosis) -> Iterator[Advice]:
    own = {rank.gpu for rank in found.ranks if rank.gpu}
    for host in found.hosts:
        if host.memory_mib < _LOW_HOST:
            text = f"{host.host} has only {host.memory_mib:,.0f} MiB of memory left"
            yield Advice(text, "end other processes, or lower the batch")
        for gpu in host.gpus:
            if own and gpu.uuid not in own:
                continue
            if gpu.throttled:
                yield Advice(f"{gpu.uuid} is throttled", "nvidia-smi -q -d PERFORMANCE says why: power or cooling")
            if own and gpu.processes and len(gpu.processes) > sum(rank.gpu == gpu.uuid for rank in found.ranks):
                yield Advice(f"{gpu.uuid} has {len(gpu.processes)} processes", "end those that are not of this run")


def _balance(found: Diagnosis) -> Iterator[Advice]:
    for rank in found.ranks:
        busy = found.utilization.get(rank.rank)
        if rank.device == "cuda" and busy is not None and busy < _BUSY:
            text = f"the GPU of rank {rank.rank} is busy {busy:.0f} % of the time, less than {_BUSY:.0f} %"
            yield Advice(text, "raise micro_batch, set compile: true, or give the data more cores")
    if found.imbalance is not None and found.imbalance > _UNEVEN:
        text = f"the slowest rank computes {found.imbalance:.0f} % longer than the mean, more than {_UNEVEN:.0f} %"
        yield Advice(text, "look for another process, a throttled GPU or fewer cores on its node")


def imbalance(compute: Mapping[int, float]) -> float | None:
    """By how much the slowest rank's compute time is above the mean [%]; None of a single rank."""
    return 100 * (max(compute.values()) / fmean(compute.values()) - 1) if len(compute) > 1 else None


def _gpu_of(found: Diagnosis, rank: RankState) -> tuple[Gpu | None, Topology | None]:
    for host in found.hosts:
        for gpu in host.gpus:
            if rank.gpu and gpu.uuid == rank.gpu:
                return gpu, host
    return None, None
