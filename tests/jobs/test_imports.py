"""Package jobs runs without the cluster, database and dashboard packages, and nobody imports what is long in vain."""

from __future__ import annotations

import subprocess
import sys

import torch

CODE = """
import sys
from jobs.specs.kinds import kinds
assert {"scaling", "train", "drill"} <= set(kinds())
import jobs.hardware.telemetry, jobs.hardware.machine
print([name for name in ("ray", "sqlalchemy", "streamlit", "orchestrator", "dashboard") if name in sys.modules])
import orchestrator.judge.analysis, orchestrator.judge.branches
long = ("scipy", "sympy", "torch.distributed.checkpoint", "torch.distributed.fsdp")
print([name for name in long if name in sys.modules])
"""


CPU = """
import sys
from jobs.hardware.machine import probe
print(probe("cpu").fingerprint["torch"], "torch" in sys.modules)
"""


def test_the_probe_of_a_cpu_does_not_import_pytorch() -> None:
    done = subprocess.run([sys.executable, "-c", CPU], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [torch.__version__, "False"]


def test_jobs_import_none_of_the_packages_above_them_nor_what_few_runs_need() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "[]"]
