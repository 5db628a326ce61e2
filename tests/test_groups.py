"""Groups of tests: conftest.py keeps each in one worker."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUITE = """
import time
import pytest

@pytest.mark.parametrize("number", range(8))
def test_small(number):
    time.sleep(0.02)

@pytest.mark.large
@pytest.mark.parametrize("number", range(8))
def test_large(number):
    time.sleep(0.02)

class TestMore:
    pytestmark = pytest.mark.large

    def test_more(self):
        pass
"""


def test_what_is_large_on_a_gpu_runs_in_one_worker_and_first(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-v", "-n", "2"]
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "--dist", "loadscope"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env["PYTHONPATH"] = f"{ROOT / 'tests'}{os.pathsep}{ROOT}"
    done = subprocess.run(
        [*command, "--no-loadscope-reorder", str(tmp_path)], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ran = re.findall(r"^\[(gw\d)\] .* PASSED .*::(test_\w+)", done.stdout, re.MULTILINE)
    assert len(ran) == 17
    assert len({worker for worker, name in ran if name in ("test_large", "test_more")}) == 1, ran
    assert {worker for worker, _ in ran} == {"gw0", "gw1"}, "the others share the rest"
    by_large = [name for worker, name in ran if (worker, "test_more") in ran]
    assert by_large[:9] == ["test_large"] * 8 + ["test_more"]
