"""The check's command line."""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from . import table
from .cases import CompileCase
from .resources import SHARED


def main() -> int:
    """Returns 1 if a kernel does not fit its device."""
    parser = argparse.ArgumentParser(prog="python -m nsa_core.kernels.aot", description="Compile without a device.")
    parser.add_argument("--heads", metavar="H/KV", help="these query and kv heads alone, in bf16")
    parser.add_argument("--dim", type=int, default=128, help="head dim of --heads")
    parser.add_argument("--kernel", default="", metavar="PART", help="kernels with this in their names alone")
    parser.add_argument("--arch", type=int, nargs="+", default=sorted(SHARED), help="compute capabilities")
    parser.add_argument("--table", type=Path, metavar="CSV", help="take from it what is known, and write it again")
    options = parser.parse_args()
    if options.heads:
        heads, kv_heads = map(int, options.heads.split("/"))
        case = CompileCase(heads, kv_heads, options.dim, options.dim, torch.bfloat16)
        pairs = [(case, arch) for arch in options.arch]
    else:
        pairs = [(case, arch) for case, arch in table.ALL if arch in options.arch]
    known = table.read(options.table) if options.table else {}
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        keys = table.wanted(pairs, options.kernel, pool)
        found = {key: usage for key, usage in known.items() if key in keys}
        for some in table.compiled({key: pair for key, pair in keys.items() if key not in found}, pool):
            found |= some
            print(*some.values(), sep="\n", flush=True)
            if options.table:
                table.write(options.table, known | found)
    if options.table:
        table.write(options.table, found)
    bad = [usage for usage in found.values() if not usage.fits]
    print(f"{len(found)} kernels, {len(bad)} that do not fit", *bad, sep="\n")
    return int(bool(bad))


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    sys.exit(main())
