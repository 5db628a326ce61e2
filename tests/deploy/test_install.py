"""docker/install.sh: which versions an environment gets, on a host with and without an NVIDIA driver.

The environment is real, but empty: its pip writes down what it is asked to install. uv does the same in .ci/run.
"""

import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from nsa_core.backends.triton import TORCH, TRITON

ROOT = Path(__file__).resolve().parents[2]
CPU = {"torch": "2.13.0", "triton": "3.9.0"}
GPU = {"torch": "2.11.0", "triton": "3.6.0"}
PIP = '''
import sys
from pathlib import Path

TORCH = """
__version__ = "{}+cu130"
class cuda: is_available = staticmethod(lambda: False)
class version: cuda = "13.0"
"""
arguments = sys.argv[1:]
site = Path(__file__).resolve().parents[1]
with (site / "asked").open("a") as asked:
    print(*arguments, file=asked)
if "-c" in arguments:
    (site / "constraints").write_text(Path(arguments[arguments.index("-c") + 1]).read_text())
if "-e" in arguments:
    (site / "project.pth").write_text(arguments[-1].partition("[")[0])
for one in arguments:
    if one.startswith("torch=="):
        version = one.removeprefix("torch==")
        (site / "torch").mkdir()
        (site / "torch" / "__init__.py").write_text(TORCH.format(version))
        (site / f"torch-{version}.dist-info").mkdir()
        (site / f"torch-{version}.dist-info" / "METADATA").write_text(f"Name: torch\\nVersion: {version}\\n")
'''
OLD_DRIVER = """
class NVMLError(Exception): ...
def nvmlInit(): ...
def nvmlShutdown(): ...
def nvmlSystemGetDriverVersion(): return "535.183.01"
def nvmlSystemGetCudaDriverVersion_v2(): return 12020
"""
needs_no_driver = pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="there is a driver here")


@dataclass(frozen=True)
class Environment:
    """An environment without packages; `path` comes first on PATH."""

    folder: Path
    path: Path

    @property
    def site(self) -> Path:
        return next(self.folder.glob("lib/python*/site-packages"))

    def has(self, name: str, version: str, requires: str | None = None) -> None:
        """Let a package be installed."""
        (self.site / name).mkdir()
        (self.site / name / "__init__.py").touch()
        info = self.site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Name: {name}\nVersion: {version}\n" + (f"Requires-Dist: {requires}\n" if requires else "")
        )

    def install(self, *extras: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(ROOT / "docker" / "install.sh"), str(self.folder / "bin" / "python"), *extras]
        env = {"PATH": f"{self.path}:/usr/bin:/bin", "HOME": str(self.folder)}
        done = subprocess.run(command, env=env, cwd=self.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done

    @property
    def asked(self) -> list[str]:
        """Arguments of pip, a line a call."""
        return (self.site / "asked").read_text().splitlines()

    @property
    def pins(self) -> dict[str, str]:
        return pins((self.site / "constraints").read_text())


def pins(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if line and not line.startswith(("#", "-c "))]
    names = [line.split("==")[0] for line in lines]
    assert len(names) == len(set(names)), "a package is pinned twice"
    return dict(line.split("==") for line in lines)


SHARED = pins((ROOT / "constraints-shared.txt").read_text())


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    made = Environment(tmp_path / "environment", tmp_path / "path")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made.folder)], check=True)
    (made.site / "pip").mkdir()
    (made.site / "pip" / "__main__.py").write_text(PIP)
    made.path.mkdir()
    return made


def with_driver(environment: Environment, works: bool = True) -> None:
    """Put an nvidia-smi on the path."""
    program = environment.path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nexit {0 if works else 9}\n")
    program.chmod(0o755)


@needs_no_driver
def test_without_a_driver_the_versions_are_those_of_the_cpu(environment: Environment) -> None:
    with_driver(environment, works=False)  # the program without a driver, which fails
    environment.install("dev")
    first, second = environment.asked
    assert first.endswith("install --no-deps torch==2.13.0")
    assert second.endswith(f"-e {ROOT}[dev]")
    assert environment.pins == SHARED | CPU


def test_with_a_driver_the_versions_are_those_that_ran_on_the_card(environment: Environment) -> None:
    with_driver(environment)
    (environment.site / "pynvml.py").write_text(OLD_DRIVER)
    done = environment.install("dev")
    assert environment.asked[0].endswith("install --no-deps torch==2.11.0")
    assert environment.asked[1].endswith(f"-e {ROOT}[dev,gpu]")
    assert environment.pins == SHARED | GPU
    assert "warning: device: the NVIDIA driver 535.183.01 supports CUDA 12.2, the installed PyTorch 2.11.0+cu130" in (
        done.stderr
    )
    assert "install PyTorch's build cu126" in done.stderr


def test_a_pytorch_that_is_there_is_kept_with_its_triton(environment: Environment) -> None:
    environment.has("torch", "2.12.1+cu126")
    environment.has("triton", "3.7.0")
    done = environment.install("gpu")
    assert len(environment.asked) == 1
    assert environment.pins == SHARED | {"torch": "2.12.1+cu126"}
    assert "PyTorch 2.12.1+cu126 is kept; the pinned one is 2.11.0" in done.stderr


def test_the_files_of_pins_differ_in_pytorch_and_triton_alone() -> None:
    for name, own in (("constraints.txt", CPU), ("constraints-gpu.txt", GPU)):
        text = (ROOT / name).read_text()
        assert "-c constraints-shared.txt" in text.splitlines()
        assert pins(text) == own
        assert not own.keys() & SHARED.keys()
        assert own["torch"] in TORCH
        assert own["triton"] in TRITON


def test_the_bounds_of_pyproject_are_the_tested_ranges() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert TORCH.requirement in project["dependencies"]
    assert extras["gpu"] == [TRITON.requirement]
    assert f"{TRITON.requirement}; platform_system == 'Linux'" in extras["dev"]
    operator = tomllib.loads((ROOT / "nsa_core" / "pyproject.toml").read_text())["project"]
    assert operator["dependencies"] == [TORCH.requirement, f"{TRITON.requirement}; platform_system == 'Linux'"]
