"""The check's command line, and its table: kernels that did not change are not compiled again."""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

from .cases import CASES, CompileCase
from .resources import SHARED, Usage, compile_for, kernel_names


def main() -> int:
    """Returns 1 if a kernel does not fit its device."""
    parser = argparse.ArgumentParser(prog="python -m nsa_core.kernels.aot", description="Compile without a device.")
    parser.add_argument("--heads", metavar="H/KV", help="these query and kv heads alone, in bf16")
    parser.add_argument("--dim", type=int, default=128, help="head dim of --heads")
    parser.add_argument("--kernel", default="", metavar="PART", help="kernels with this in their names alone")
    parser.add_argument("--arch", type=int, nargs="+", default=sorted(SHARED), help="compute capabilities")
    parser.add_argument("--table", type=Path, metavar="CSV", help="take from it what is known, and write it again")
    options = parser.parse_args()
    cases = [case for case in CASES if case.arch in options.arch]
    if options.heads:
        heads, kv_heads = map(int, options.heads.split("/"))
        cases = [CompileCase(arch, heads, kv_heads, options.dim, options.dim, "bf16") for arch in options.arch]
    known = read(options.table) if options.table else {}
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        keys = wanted(cases, pool, options.kernel)
        found = {key: usage for key, usage in known.items() if key in keys}
        for key, usage in compiled({key: case for key, case in keys.items() if key not in found}, pool):
            found[key] = usage
            print(usage, flush=True)
            if options.table:
                write(options.table, known | found)
    if options.table:
        write(options.table, found)
    bad = [usage for usage in found.values() if not usage.fits]
    print(f"{len(found)} kernels, {len(bad)} that do not fit", *bad, sep="\n")
    return int(bool(bad))


def read(path: Path) -> dict[str, Usage]:
    """Resources by the launch's key; none where there is no file."""
    known: dict[str, Usage] = {}
    for row in csv.DictReader(path.read_text().splitlines() if path.exists() else []):
        key, texts = row.pop("key"), {name: row.pop(name) for name in ("dtype", "kernel")}
        serialized = row.pop("serialized") == "True"
        known[key] = Usage(**texts, serialized=serialized, **{name: int(value) for name, value in row.items()})
    return known


def write(path: Path, known: Mapping[str, Usage]) -> None:
    """Write resources in the order of devices, cases and kernels."""
    rows = [{"key": key} | asdict(usage) for key, usage in known.items()]
    rows.sort(key=lambda row: [row[name] for name in ("arch", "dtype", "dim", "heads", "kernel", "key")])
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def wanted(cases: Sequence[CompileCase], pool: Executor, kernel: str = "") -> dict[str, CompileCase]:
    """The case of each distinct launch, by its key; of kernels with `kernel` in their names."""
    found: dict[str, CompileCase] = {}
    for case, names in zip(cases, pool.map(kernel_names, cases), strict=True):
        found = {key: case for key, name in names.items() if kernel in name} | found
    return found


def compiled(missing: Mapping[str, CompileCase], pool: Executor) -> Iterator[tuple[str, Usage]]:
    """Keys of launches and their resources, one after the other."""
    under_way = {pool.submit(compile_for, case, key): key for key, case in missing.items()}
    for done in as_completed(under_way):
        yield under_way[done], done.result()


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    sys.exit(main())
