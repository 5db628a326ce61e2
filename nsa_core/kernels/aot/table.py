"""Resources of launches that were compiled before, kept as CSV: kernels that did not change are not compiled again."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, fields
from multiprocessing import get_context
from pathlib import Path

from .cases import CASES, DTYPES, ON_A100, CompileCase, launches
from .resources import Usage, compile_for
from .sources import launch_key

_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


def read(path: Path) -> dict[str, Usage]:
    """Resources by the launch's key; none where there is no file."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {row["key"]: _usage(row) for row in csv.DictReader(file)}


def write(path: Path, known: Mapping[str, Usage]) -> None:
    """Write resources in the order of devices, cases and kernels."""
    rows = [{"key": key} | _row(usage) for key, usage in known.items()]
    rows.sort(key=lambda row: (row["arch"], row["dtype"], row["dim"], row["heads"], row["kernel"], row["key"]))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def wanted(cases: Iterable[CompileCase], archs: Iterable[int], kernel: str = "") -> dict[str, tuple[CompileCase, int]]:
    """The case and compute capability of each distinct launch, by its key.

    Args:
        kernel: a part of the names of the kernels.
    """
    found = dict[str, tuple[CompileCase, int]]()
    pairs = [(case, arch) for arch in archs for case in cases]
    for case, arch in pairs:
        for launch in launches(case, arch):
            if kernel in launch.kernel.__name__:
                found.setdefault(launch_key(launch, arch), (case, arch))
    return found


def all_wanted(archs: Iterable[int], kernel: str = "") -> dict[str, tuple[CompileCase, int]]:
    """As `wanted`, of all cases that are kept."""
    return wanted(ON_A100, {80}.intersection(archs), kernel) | wanted(CASES, archs, kernel)


def compiled(missing: Mapping[str, tuple[CompileCase, int]]) -> Iterator[dict[str, Usage]]:
    """Resources of launches by their keys, compiled in a process for each core, one case after another."""
    keys = dict[tuple[CompileCase, int], set[str]]()
    for key, pair in missing.items():
        keys.setdefault(pair, set()).add(key)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(_compile, *pair, some) for pair, some in keys.items()]):
            yield done.result()


def _compile(case: CompileCase, arch: int, keys: set[str]) -> dict[str, Usage]:
    given = {launch_key(launch, arch): launch for launch in launches(case, arch)}
    return {key: compile_for(case, given[key], arch) for key in keys}


def _row(usage: Usage) -> dict[str, object]:
    row = asdict(usage)
    case = row.pop("case")
    return {"arch": row.pop("arch")} | case | {"dtype": DTYPES[usage.case.dtype]} | row


def _usage(row: Mapping[str, str]) -> Usage:
    numbers = {one.name: int(row[one.name]) for one in fields(CompileCase) if one.name != "dtype"}
    case = CompileCase(**numbers, dtype=_DTYPES[row["dtype"]])
    rest = {one.name: int(row[one.name]) for one in fields(Usage) if one.name not in ("case", "kernel", "serialized")}
    return Usage(case=case, kernel=row["kernel"], serialized=row["serialized"] == "True", **rest)
