"""Blocks of seeds/which-part-hangs.md: the ten tasks of the plan to find the part that hangs (001)."""

from __future__ import annotations

from seed_backward import ALLOCATOR, BLOCKING, branches, search_note, settings, smallest
from seed_evidence import (
    ANY,
    BRANCHES,
    EXTRA,
    FORWARD_MEMORY,
    HANG,
    MATRIX,
    PEAK,
    PROFILE,
    SEARCH,
    TIME,
    WAYS,
    Evidence,
    matrix_axes,
    tally,
)
from tables import noted, table

from jobs.schema.plain_text import for_file

SPECS = (MATRIX, SEARCH, HANG, BRANCHES, PROFILE)

_BOTH = "forward+backward"
BACKENDS = {
    "naive": "masked",
    "packed": "packed",
    "gather": "gather",
    "chunked": "gather, in chunks",
    "flash": "flash",
    "triton": "our kernels",
}
"""The backends of kind branches, by the reports' names; that in chunks is ours alone."""
OF_ALL = tuple(name for name in BACKENDS if name != "flash")
"""Backends that compute every branch."""
_PLANNED = (32, 64, 128, 512)  # the plan's lengths


def blocks(e: Evidence) -> dict[str, str]:
    settings_of = {"default": None, "expandable, splits of 256 MB": ALLOCATOR}
    return {
        "summary": _summary(e),
        "branches-small": branches(e, "small_128", 128, 5, 128),
        "branches-large": branches(e, "m7c_125m", 768, 5, 1024),
        "selection": backends(e, "slc", OF_ALL),
        "compressed": backends(e, "cmp", OF_ALL),
        "sliding": backends(e, "win", tuple(BACKENDS)),
        "lengths": noted(f"Smallest failing size: {smallest(e)}. {_searched(e)}", search_note(e)),
        "anomaly": _anomaly(e),
        "profile": _profile(e),
        "allocator": settings(e, settings_of),
        "breadcrumbs": _breadcrumbs(e),
        "toy": _toy(e),
    }


def _summary(e: Evidence) -> str:
    points = e.points(MATRIX, env=ANY)
    if not points:
        return f"Which part hangs? {MATRIX.not_measured}."
    hung = [str(row["label"]) for row in points if row["state"] == "hang"]
    return f"{'; '.join(hung) or 'No part'} hung, of {len(points)} points ({tally(points)})."


def backends(e: Evidence, branch: str, names: tuple[str, ...], seq_len: int = 2048) -> str:
    """A branch by its backends: time and memory at two lengths."""
    rows = []
    for name in names:
        at = {"branch": branch, "implementation": name, "batch": 1}
        cells = [
            e.cell(BRANCHES, TIME, EXTRA, **at, seq_len=length, pass_=pass_)
            for length in (seq_len, 8 * seq_len)
            for pass_ in ("forward", _BOTH)
        ]
        rows.append([BACKENDS[name], f"`{name}`", *cells, _error(e, {**at, "seq_len": seq_len})])
    columns = [f"{pass_}, {length:,}" for length in (seq_len, 8 * seq_len) for pass_ in ("forward", _BOTH)]
    return table(["the report's name", "backend", *columns, "error, of its bound"], rows)


def _error(e: Evidence, at: dict[str, object]) -> str:
    """The error against the oracle, forward and backward, in percent of what is allowed."""
    error, bound = (e.value(BRANCHES, name, **at, pass_=_BOTH) for name in ("oracle_error", "oracle_error_bound"))
    return e.cell(BRANCHES, **at, pass_=_BOTH) if error is None or bound is None else f"{100 * error / bound:.0f} %"


def _searched(e: Evidence) -> str:
    """The lengths of the search, and those of the plan that are not among them."""
    cases = next((run["spec"]["cases"] for run in e.of(SEARCH)), [])
    lengths = sorted({length for case in cases for length in case["lengths"]})
    if not lengths:
        return f"Lengths searched: {SEARCH.not_measured}."
    left = [f"{length}" for length in _PLANNED if length not in lengths]
    untried = f"; of the plan's, {' and '.join(left)} were not tried" if left else ""
    return f"Lengths searched: {', '.join(f'{length:,}' for length in lengths)}{untried}."


def _anomaly(e: Evidence) -> str:
    return settings(e, {"default": None, "blocking launches": BLOCKING}, anomaly="anomaly mode")


def _profile(e: Evidence) -> str:
    """A pass under the profiler: device time, waits, memory."""
    rows = []
    for pass_ in ("forward", "train"):
        for way in ("triton", "dense"):
            for seq_len in (2048, 8192):
                at = {"implementation": way, "pass_": pass_, "seq_len": seq_len, "batch": 2}
                figures = (TIME, ("busy_time", "ms"), ("synchronizations", "1"), PEAK)
                rows.append([way, pass_, f"{seq_len:,}", *(e.cell(PROFILE, figure, **at) for figure in figures)])
    return table(["implementation", "pass", "S", "time", "device busy", "waits for the device", "memory"], rows)


def _breadcrumbs(e: Evidence) -> str:
    """Where the hang of the drill was found, and whether the next point ran."""
    points = e.points(HANG)
    if not points:
        return f"The layer of a hang: {HANG.not_measured}."
    rows = [[for_file(str(row["label"])), str(row["state"]), for_file(str(row["reason"] or ""))] for row in points]
    return noted(table(["point", "state", "reason"], rows), _left(e), e.beside(HANG, "what was in use may be theirs"))


def _left(e: Evidence) -> str:
    """The run's own warnings, for a process that was killed may leave something behind."""
    warnings = [for_file(text) for text in e.warnings(HANG)]
    return f"Warnings of the run: {'; '.join(warnings)}." if warnings else ""


def _toy(e: Evidence) -> str:
    rows = []
    for branch in ("cmp", "slc", "win"):
        at = matrix_axes("m7c_125m", 1, 1024, branch, repeats=12)
        rows.append([branch, *(e.cell(MATRIX, FORWARD_MEMORY, TIME, **at, implementation=way) for way in WAYS)])
    return noted(table(["branch, twelve times in one layer", *WAYS.values()], rows), e.beside(MATRIX))
