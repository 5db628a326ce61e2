"""Two sweeps of 300 points in all over a cluster of three nodes while everything fails: `make test-chaos`.

Which faults, when and what they befall follows from the seed alone. At the end every point is accounted for exactly
once, and no process, handle or temporary folder is left.
"""

import argparse
import os
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

from chaos.schedule import schedule

TESTS = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test-chaos")
    parser.add_argument("--seed", type=int, default=1, help="decides on the faults; the same seed has the same faults")
    parser.add_argument("--minutes", type=float, default=10, help="in which the faults happen")
    parser.add_argument("--points", type=int, default=300, help="of both sweeps together")
    parser.add_argument("--schedule", action="store_true", help="print the faults and end")
    asked = parser.parse_args()
    faults = schedule(asked.seed, asked.minutes)
    print(f"seed {asked.seed}, {asked.minutes:g} minutes, {asked.points} points:")
    print(*faults, sep="\n", flush=True)
    if asked.schedule:
        return 0
    folder = Path(
        tempfile.mkdtemp(prefix="nsa-chaos-", dir="/tmp")
    )  # short: Ray's socket paths must fit 107 characters
    _settle_in(folder)
    from chaos.run import Run  # after the environment is set

    problems = Run(folder, faults, asked.minutes, asked.points).problems()
    again = f"make test-chaos SEED={asked.seed} MINUTES={asked.minutes:g}"
    if problems:
        print(*(f"FAILED: {line}" for line in problems), f"logs: {folder}; again: {again}", sep="\n")
        return 1
    shutil.rmtree(folder)
    print(f"passed: every point is accounted for exactly once, nothing is left ({again})")
    return 0


def _settle_in(folder: Path) -> None:
    """Set what all processes of this run inherit: a temporary folder, a token, and the kinds of the tests."""
    (folder / "tmp").mkdir()
    outside = [name for name in os.environ if name.startswith(("NSA_", "RAY_"))]
    for name in outside:
        del os.environ[name]
    os.environ |= {"TMPDIR": str(folder / "tmp"), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    kinds = TESTS / "orchestrator" / "kinds"
    os.environ |= {"PYTHONPATH": f"{kinds}{os.pathsep}{TESTS.parent}", "OMP_NUM_THREADS": "1"}
    tempfile.tempdir = None


if __name__ == "__main__":
    sys.exit(main())
