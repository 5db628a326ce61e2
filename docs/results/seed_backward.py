"""Blocks of seeds/backward-hang.md: the report on the hang of the backward pass (000)."""

from __future__ import annotations

import re

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
    shown,
    tally,
    together,
)
from tables import noted, table

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
    return noted(table(["layers", "S", "the report", *_titles()], rows), e.beside(MATRIX))


def branches(e: Evidence, preset: str, dim: int, layers: int, seq_len: int) -> str:
    """The branches one by one, as in the report and in the matrix."""
    rows = []
    for branch, then in _BRANCHES.items():
        size = f"{_BOTH} {layers} layers dim {dim} S={seq_len}"
        told = [text for figure in (PEAK, TIME) if (text := e.seed("000", figure, size, then))]
        at = matrix_axes(preset, layers, seq_len, branch)
        rows.append([branch, ", ".join(dict.fromkeys(told)), *_ways(e, at, FORWARD_MEMORY, TIME)])
    return noted(table(["branch", "the report", *_titles()], rows), e.beside(MATRIX))


def settings(e: Evidence, environments: dict[str, str | None], anomaly: str | None = None) -> str:
    """Five layers at 1,024 tokens under environment variables, and in anomaly mode as a row of the name `anomaly`."""
    places = [(title, env, "off") for title, env in environments.items()]
    places += [(anomaly, None, "on")] if anomaly else []
    rows = []
    for title, env, mode in places:
        at = {**matrix_axes("m7c_125m", 5, 1024, anomaly=mode), "env": env}
        rows.append([title, *(e.cell(MATRIX, TIME, PEAK, RESERVED, **at, implementation=way) for way in WAYS)])
    columns = ["setting", *(f"{title}: time, allocated, reserved" for title in WAYS.values())]
    return noted(table(columns, rows), e.beside(MATRIX))


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
    return noted(table(["cause", "the report", "here"], rows), search_note(e))


def smallest(e: Evidence) -> str:
    """The smallest size that fails, by implementation, with how it failed and on which card."""
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
            how = f"{_failure(e, layers, length)}on {e.card(SEARCH, **at)}, {tried:.0f} sizes tried"
            told[way] = f"{layers:,.0f} layers at {length:,.0f} ({how})"
    return together(told)


def _failure(e: Evidence, layers: float, length: float) -> str:
    """How the smallest size failed, in words with a comma behind; "" if no message tells."""
    wanted = rf"fails: {layers:.0f} layers?, S={length:.0f} \((\w+):"
    found = next((found[1] for text in e.warnings(SEARCH) if (found := re.search(wanted, text))), "")
    return f"{ {'oom': 'out of memory'}.get(found, found) }, " if found else ""


def search_note(e: Evidence) -> str:
    """A sentence on a search that ran beside other processes, with the memory that its failing size lacked."""
    if not (beside := e.beside(SEARCH, "they had less of its memory", own=2)):  # the point's, and that of a size
        return ""
    asked = r"Tried to allocate ([\d.]+ \w+)\..* of which ([\d.]+ \w+) is free"
    for text in e.warnings(SEARCH):
        if (found := re.search(asked, text)) and (others := re.findall(r"Process \d+ has ([\d.]+ \w+)", text)):
            lacking, held = _mib(found[1]) - _mib(found[2]), sum(map(_mib, others))
            alone = "would" if lacking <= held else "would not"
            missed = (
                f"The failing size asked for {found[1]} with {found[2]} free, {shown(lacking, 'MiB')} too little, when "
                f"others held {shown(held, 'MiB')}: alone on the card it {alone} have got that."
            )
            return f"{beside} {missed}"
    return beside


def _mib(size: str) -> float:
    """MiB of a size in a message, as "2.98 GiB"."""
    value, unit = size.split()
    return float(value) * {"KiB": 2**-10, "MiB": 1, "GiB": 2**10}[unit]


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
    one, step, two = _of_kernels(12, 2048), {**at, "pass_": "train"}, {**at, "batch": 2}
    size = "12 layers, dim 768, S=2,048, batch 1: a pass"
    rows = [
        [size, e.cell(MATRIX, PEAK, TIME, **one), e.mode(MATRIX, **one)],
        ["the same, a training step", e.cell(ESTIMATE, PEAK, **step), e.mode(ESTIMATE, **step)],
        ["the same, batch 2: training", e.cell(TRAIN, PEAK, THROUGHPUT, **two), e.mode(TRAIN, **two)],
    ]
    return noted(table(["configuration", "our kernels", "card, mode"], rows), e.beside(MATRIX))


def _limits(e: Evidence) -> str:
    found = {
        kept: _longest(e, {"implementation": "triton", "batch": 1, "checkpointing": kept}) for kept in ("off", "on")
    }
    rows = [
        ["longest sequence that 12 layers, dim 768 train on", "512", f"{found['off']}; checkpointing: {found['on']}"],
        ["layers at that width", "4 to 5", f"smallest failing size: {smallest(e)}"],
    ]
    return noted(table(["limit", "the report", "here"], rows), search_note(e))


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
