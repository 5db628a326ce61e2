"""Packages for uv; make targets, where they cannot work and where jobs go."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def test_uv_takes_packages_from_where_pip_does() -> None:
    listed = (
        """:env:.index-url="https://f/it's"\n:env:.no-compile='1'\nglobal.index-url='https://a/simple'\n"""
        "global.extra-index-url='\\nfile:///b\\nfile:///c'\nglobal.find-links='/d /e'\ndownload.no-deps='1'\n"
    )
    command = [sys.executable, str(ROOT / ".ci" / "uv_settings.py")]
    done = subprocess.run(command, input=listed, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "export UV_INDEX_STRATEGY=unsafe-best-match",
        "export UV_DEFAULT_INDEX='https://f/it'\"'\"'s'",
        "export UV_INDEX='file:///b file:///c'",
        "export UV_FIND_LINKS=/d,/e",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_without_a_gpu_nothing_is_started_and_the_error_names_the_fix(tmp_path: Path) -> None:
    command = ["make", "bench", f"BIN={Path(sys.executable).parent}", "RUN=", "DEV="]
    of_make = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")  # of the make that runs the tests
    env = {name: value for name, value in os.environ.items() if name not in of_make}
    env["NSA_HOME"] = str(tmp_path / "home")
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert done.stdout == ""
    assert not (tmp_path / "home").exists()
    assert "error: device: PyTorch sees no CUDA device here; run this on a GPU host" in done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
@pytest.mark.parametrize(
    ("env_file", "expected"),
    [
        ("", ("http://127.0.0.1:8265", "8501")),
        ("# NSA_DASHBOARD_PORT=1\n", ("http://127.0.0.1:8265", "8501")),
        ("NSA_RAY_DASHBOARD=http://127.0.0.1:8300\nNSA_DASHBOARD_PORT=8600\n", ("http://127.0.0.1:8300", "8600")),
        ("export NSA_RAY_DASHBOARD='http://h:1'  # x\nNSA_DASHBOARD_PORT=8600 # y\n", ("http://h:1", "8600")),
    ],
)
def test_a_job_goes_to_the_cluster_of_the_env_file(tmp_path: Path, env_file: str, expected: tuple[str, str]) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / ".env").write_text(env_file)
    env = {"PATH": os.environ["PATH"]}
    command = ["make", "--dry-run", "demo", "RUN="]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=True)
    address, port = expected
    assert f"job submit --address {address} " in done.stdout
    assert f"Dashboard: http://127.0.0.1:{port}/ " in done.stdout
