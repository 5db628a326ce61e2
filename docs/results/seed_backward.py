"""Blocks of seeds/backward-hang.md: the report on the hang of the backward pass (000)."""

from __future__ import annotations

from seed_evidence import (
    ANY,
    CAPACITY,
    ESTIMATE,
    EXTRA,
    FORWARD_MEMORY,
    MATRIX,
    PEAK,
    RESERVED,
    SCALING,
    SEARCH,
    THROUGHPUT,
    TIME,
    TRAIN,
    WAYS,
    Evidence,
    matrix_axes,
    tally,
    together,
)
from tables import table

SPECS = (MATRIX, SEARCH, SCALING, CAPACITY, ESTIMATE, TRAIN)

_BOTH = "forward+backward"
_SMALL = [(5, 128), (12, 128)]
_LARGE = [(4, 128), (5, 128), (5, 512), (5, 1024), (4, 2048), (12, 2048)]
_BRANCHES = {"win": "win", "slc": "sel", "cmp": "cmp", "all": ""}  # and the seeds' names
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,max_split_size_mb:256"
BLOCKING = "CUDA_LAUNCH_BLOCKING=1"


def blocks(e: Evidence) -> dict[str, str]:
    return {
        "summary": _summary(e),
        "growth": _growth(e),
        "small": _matrix(e, "small_128", 128, _SMALL),
        "large": _matrix(e, "m7c_125m", 768, _LARGE),
        "branches-small": branches(e, "small_128", 128, 5, 128),
        "branches-large": branches(e, "m7c_125m", 768, 5, 1024),
        "allocator": settings(e, {"default": None, "expandable, splits of 256 MB": ALLOCATOR}),
        "scaling": _scaling(e),
        "causes": _causes(e),
        "hypotheses": _hypotheses(e),
        "production": _production(e),
        "limits": _limits(e),
        "conclusion": _summary(e),
    }


def _summary(e: Evidence) -> str:
    """Whether anything hangs, and whether the kernels pass the sizes that hung."""
    points = e.points(MATRIX, env=ANY)
    if not points:
        return f"Does it hang? {MATRIX.not_measured}."
    hung = [row for row in points if row["state"] == "hang"]
    sizes = [(layers, seq_len) for layers, seq_len in _LARGE if seq_len >= 1024]
    of_kernels = {size: e.state(MATRIX, **_of_kernels(*size)) for size in sizes}
    passed = [f"{layers} layers at {seq_len:,}" for (layers, seq_len), state in of_kernels.items() if state == "ok"]
    first = f", the first {hung[0]['label']}: {hung[0]['reason']}" if hung else ""
    return (
        f"{len(hung) or 'None'} of {len(points)} points hung{first} ({tally(points)}). Of the sizes that hung then, "
        f"our kernels pass {', '.join(passed) or 'none'}."
    )


def _growth(e: Evidence) -> str:
    rows = [
        [f"{seq_len:,}", _then(e, 5, seq_len, 768), *_ways(e, matrix_axes("m7c_125m", 5, seq_len), FORWARD_MEMORY)]
        for seq_len in (128, 512, 1024)
    ]
    return table(["S, 5 layers", "the report", *_titles()], rows)


def _matrix(e: Evidence, preset: str, dim: int, sizes: list[tuple[int, int]]) -> str:
    rows = [
        [f"{layers}", f"{seq_len:,}", _then(e, layers, seq_len, dim), *_ways(e, at, FORWARD_MEMORY, TIME)]
        for layers, seq_len in sizes
        for at in [matrix_axes(preset, layers, seq_len)]
    ]
    return table(["layers", "S", "the report", *_titles()], rows)


def branches(e: Evidence, preset: str, dim: int, layers: int, seq_len: int) -> str:
    """The branches one by one, as in the report and in the matrix."""
    rows = []
    for branch, then in _BRANCHES.items():
        size = f"{_BOTH} {layers} layers dim {dim} S={seq_len}"
        told = [text for figure in (PEAK, TIME) if (text := e.seed("000", figure, size, then))]
        at = matrix_axes(preset, layers, seq_len, branch)
        rows.append([branch, ", ".join(dict.fromkeys(told)), *_ways(e, at, FORWARD_MEMORY, TIME)])
    return table(["branch", "the report", *_titles()], rows)


def settings(e: Evidence, environments: dict[str, str | None], anomaly: str = "off") -> str:
    """Five layers at 1,024 tokens under environment variables."""
    at = matrix_axes("m7c_125m", 5, 1024, anomaly=anomaly)
    rows = [
        [title, *(e.cell(MATRIX, TIME, PEAK, RESERVED, **at, implementation=way, env=env) for way in WAYS)]
        for title, env in environments.items()
    ]
    return table(["setting", *(f"{title}: time, allocated, reserved" for title in WAYS.values())], rows)


def _scaling(e: Evidence) -> str:
    rows = [
        [title, *(e.growth(SCALING, EXTRA[0], way, pass_) for pass_ in ("forward", _BOTH))]
        for way, title in {**WAYS, "chunked": "gathered in chunks", "dense": "dense attention"}.items()
    ]
    return table(["memory of the attention grows as", "forward", _BOTH], rows)


def _causes(e: Evidence) -> str:
    alone = {branch: _state(e, matrix_axes("m7c_125m", 5, 1024, branch)) for branch in ("win", "slc", "cmp")}
    rows = [
        ["one branch", "all fail equally", together(alone)],
        ["the number of layers", "12 layers work with a small model", _state(e, matrix_axes("m7c_125m", 12, 2048))],
        ["the allocator", "no", _state(e, matrix_axes("m7c_125m", 5, 1024), ALLOCATOR)],
        ["the smallest failing size", "5 layers at 1,024", smallest(e)],
        ["memory that grows as S²", "yes, of the implementation", _two_growths(e)],
    ]
    return table(["cause", "the report", "here"], rows)


def smallest(e: Evidence) -> str:
    """The smallest size that fails, by implementation."""
    told = {}
    for way in ("triton", "chunked", "naive"):
        at = {"preset": "m7c_125m", "implementation": way}
        layers, length = (e.value(SEARCH, name, **at) for name in ("failing_layers", "failing_length"))
        tried = e.value(SEARCH, "sizes_tried", **at)
        if tried is None:
            told[way] = e.cell(SEARCH, **at)
        elif layers is None or length is None:
            told[way] = "none, the largest size passed"
        else:
            told[way] = f"{layers:,.0f} layers at {length:,.0f} ({tried:.0f} sizes tried)"
    return together(told)


def _hypotheses(e: Evidence) -> str:
    at = matrix_axes("m7c_125m", 5, 512)
    held = {title: e.cell(MATRIX, FORWARD_MEMORY, **at, implementation=way) for way, title in WAYS.items()}
    both = {title: _reserved(e, env) for title, env in (("default", None), ("expandable", ALLOCATOR))}
    rows = [
        ["H1, dense masks in SDPA", "partially confirmed", _two_growths(e)],
        ["H4, nothing pruned from autograd", "confirmed", f"held after the forward, 5 layers, 512: {together(held)}"],
        ["H6, a fragmented allocator", "rejected", f"reserved, 5 layers, 1,024, our kernels: {together(both)}"],
    ]
    return table(["hypothesis", "the report", "here"], rows)


def _production(e: Evidence) -> str:
    at = {"implementation": "triton", "layers": 12, "seq_len": 2048}
    rows = [
        ["12 layers, dim 768, S=2,048, batch 1: a pass", e.cell(MATRIX, PEAK, TIME, **_of_kernels(12, 2048))],
        ["the same, a training step", e.cell(ESTIMATE, PEAK, **at, pass_="train")],
        ["the same, batch 2, with checkpointing: training", e.cell(TRAIN, PEAK, THROUGHPUT, **at, batch=2)],
    ]
    return table(["configuration", "our kernels"], rows)


def _limits(e: Evidence) -> str:
    found = {
        kept: _longest(e, {"implementation": "triton", "batch": 1, "checkpointing": kept}) for kept in ("off", "on")
    }
    rows = [
        ["longest sequence that 12 layers, dim 768 train on", "512", f"{found['off']}; checkpointing: {found['on']}"],
        ["layers at that width", "4 to 5", f"smallest failing size: {smallest(e)}"],
    ]
    return table(["limit", "the report", "here"], rows)


def _longest(e: Evidence, at: dict[str, object]) -> str:
    """The longest sequence that fits, and whether a longer one was tried."""
    tried_all = e.value(CAPACITY, "longest", **at) is not None and e.value(CAPACITY, "shortest_failed", **at) is None
    return e.cell(CAPACITY, ("longest", "token"), **at) + (", the longest tried" if tried_all else "")


def _titles() -> list[str]:
    return list(WAYS.values())


def _ways(e: Evidence, at: dict[str, object], *figures: tuple[str, str]) -> list[str]:
    return [e.cell(MATRIX, *figures, **at, implementation=way) for way in WAYS]


def _state(e: Evidence, at: dict[str, object], env: str | None = None) -> str:
    """The states of all ways at a size."""
    return together({way: e.state(MATRIX, **at, implementation=way, env=env) for way in WAYS})


def _of_kernels(layers: int, seq_len: int) -> dict[str, object]:
    return {**matrix_axes("m7c_125m", layers, seq_len), "implementation": "triton"}


def _reserved(e: Evidence, env: str | None) -> str:
    return e.cell(MATRIX, RESERVED, **_of_kernels(5, 1024), env=env)


def _two_growths(e: Evidence) -> str:
    """The exponents of the memory of attention, forward+backward."""
    return together({title: e.growth(SCALING, EXTRA[0], way, _BOTH) for way, title in WAYS.items()})


def _then(e: Evidence, layers: int, seq_len: int, dim: int) -> str:
    return e.seed("000", PEAK, f"{_BOTH} {layers} layers dim {dim} S={seq_len}")
