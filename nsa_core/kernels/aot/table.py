"""Resources of launches that were compiled before, kept as CSV: kernels that did not change are not compiled again."""

from __future__ import annotations

import csv
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, as_completed
from dataclasses import asdict, fields
from pathlib import Path

from .cases import CASES, DTYPES, ON_A100, CompileCase, launches
from .resources import SHARED, Usage, compile_for, launch_key

_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


def read(path: Path) -> dict[str, Usage]:
    """Resources by the launch's key; none where there is no file."""
    known, texts = dict[str, Usage](), ("key", "dtype", "kernel", "serialized")
    for row in csv.DictReader(path.read_text().splitlines() if path.exists() else []):
        numbers = {name: int(value) for name, value in row.items() if name not in texts}
        heads = {one.name: numbers.pop(one.name) for one in fields(CompileCase) if one.name != "dtype"}
        case, serialized = CompileCase(**heads, dtype=_DTYPES[row["dtype"]]), row["serialized"] == "True"
        known[row["key"]] = Usage(case=case, kernel=row["kernel"], serialized=serialized, **numbers)
    return known


def write(path: Path, known: Mapping[str, Usage]) -> None:
    """Write resources in the order of devices, cases and kernels."""
    rows = []
    for key, usage in known.items():
        row = asdict(usage)
        rows.append({"key": key, "arch": row.pop("arch")} | row.pop("case") | {"dtype": DTYPES[usage.case.dtype]} | row)
    rows.sort(key=lambda row: (row["arch"], row["dtype"], row["dim"], row["heads"], row["kernel"], row["key"]))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


Pairs = list[tuple[CompileCase, int]]
ALL: Pairs = [(case, 80) for case in ON_A100] + [(case, arch) for arch in sorted(SHARED) for case in CASES]


def wanted(pairs: Pairs, kernel: str = "", pool: Executor | None = None) -> dict[str, tuple[CompileCase, int]]:
    """The case and compute capability of each distinct launch, by its key.

    Args:
        kernel: a part of the names of the kernels.
        pool: where launches are traced; None: here.
    """
    found = dict[str, tuple[CompileCase, int]]()
    traced = (map if pool is None else pool.map)(_keys, pairs)
    for pair, named in zip(pairs, traced, strict=True):
        found = {key: pair for key, name in named.items() if kernel in name} | found
    return found


def compiled(missing: Mapping[str, tuple[CompileCase, int]], pool: Executor) -> Iterator[dict[str, Usage]]:
    """Resources of launches by their keys, a part of a case after another."""
    keys = defaultdict[tuple[tuple[CompileCase, int], int], set[str]](set)
    parts = -(-3 * (os.cpu_count() or 1) // max(1, len(set(missing.values()))))
    for i, (key, pair) in enumerate(missing.items()):
        keys[pair, i % parts].add(key)
    for done in as_completed([pool.submit(compile_for, *pair, some) for (pair, _), some in keys.items()]):
        yield done.result()


def _keys(pair: tuple[CompileCase, int]) -> dict[str, str]:
    """Kernels' names by the keys of their launches."""
    case, arch = pair
    return {launch_key(launch, arch): launch.kernel.__name__ for launch in launches(case, arch)}
