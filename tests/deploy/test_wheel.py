"""The wheels in empty environments, outside any checkout: init, up, submit, report, down; the operator alone."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest
from processes import free_ports, wait_for

import nsa_core
from orchestrator import provenance
from orchestrator.execute.upload import PACKAGES, sources
from orchestrator.store import Store, queries

ROOT = Path(__file__).resolve().parents[2]
OUR_RUNS = ROOT / "docs" / "results" / "data"
CORPUS = "the wheel is small. " * 200
SHORT = ("attention=[nsa]", "seq_len=16", "batch=2", "steps=12", "optimizer.warmup_steps=2", "plan=null")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
ALONE = """
import sys

class OnlyTorch:
    def find_spec(self, name, path=None, target=None):
        if name in {"jobs", "orchestrator", "pandas", "pydantic", "ray", "rich", "sqlalchemy", "streamlit"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, OnlyTorch())
"""


@dataclass(frozen=True)
class User:
    """A shell in an empty folder, with the environment that the wheel was installed into."""

    here: Path
    env: dict[str, str]
    venv: Path
    ray: Path

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=self.here, env=self.env, capture_output=True, text=True, timeout=200, check=False
        )

    def uploads(self) -> list[dict[str, int]]:
        """The files of each upload as Ray unpacked it: name -> bytes."""
        folders = self.ray.glob("nsa-ray-*/r/session_2*/runtime_resources/working_dir_files/_ray_pkg_*/")
        return [
            {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
            for folder in folders
        ]

    def newest(self, kind: str) -> tuple[dict, pd.DataFrame]:
        """The newest stored run of a kind and its points."""
        with Store.open(f"sqlite:///{self.env['HOME']}/.nsa/nsa.db", create=False, readonly=True) as store:
            row = queries.runs(store, kind=kind, origin="measured", limit=1).to_dict("records")[0]
            return dict(queries.run(store, row["run_id"]) or {}), queries.points(store, row["run_id"])


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheels, built as users do, from a copy with what an earlier build of older sources has left."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("nsa_core", "jobs", "orchestrator", "dashboard", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (left := copy / "build" / "lib" / "jobs").mkdir(parents=True)
    (left / "gone.py").touch()
    for name in ("pyproject.toml", "README.md", "LICENSE", "Makefile"):
        shutil.copy(ROOT / name, copy)
    command = ["make", "wheel", f"BIN={Path(sys.executable).parent}", "RUN="]
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    if _setuptools() >= 77:  # as pyproject.toml requires; else pip downloads one
        env["PIP_NO_BUILD_ISOLATION"] = "0"  # pip reads it as the option --no-build-isolation
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return copy / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    [built] = dist.glob("nsa_bench-*.whl")
    return built


@pytest.fixture(scope="module")
def user(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    """A user who has installed the wheel and run `nsa init` and `nsa up`."""
    folder = tmp_path_factory.mktemp("user")
    venv, here, home = folder / "venv", folder / "here", folder / "home"
    python = _environment(venv, wheel)
    here.mkdir()
    home.mkdir()
    ray = Path(tempfile.mkdtemp(prefix="nsa-ray-"))  # short: Ray's socket paths must fit 107 characters
    outside = ("RAY_", "NSA_", "PYTHON", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if not name.startswith(outside)}
    env |= {"HOME": str(home), "PATH": f"{python.parent}{os.pathsep}/usr/bin{os.pathsep}/bin"}
    env |= {"RAY_TMPDIR": str(ray), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    ray_port, dashboard_port = free_ports(2)
    ports = f"NSA_RAY_DASHBOARD=http://127.0.0.1:{ray_port}\nNSA_DASHBOARD_PORT={dashboard_port}\n"
    (here / ".env").write_text(ports)  # read from the current folder
    user = User(here, env, venv, ray)
    try:
        for command in (("nsa", "init"), ("nsa", "up", "--num-cpus", "2")):
            done = user.run(*command)
            assert done.returncode == 0, done.stdout + done.stderr
        yield user
    finally:
        done = user.run("nsa", "down")
        shutil.rmtree(ray, ignore_errors=True)
    assert done.stdout == "stopped: dashboard, ray\n"
    assert not list(here.glob("var")), "results belong into ~/.nsa"


def _environment(venv: Path, wheel: Path) -> Path:
    """Make an environment of the wheel and, by path, this environment's other packages. Returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=60)
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-index", "--no-deps", str(wheel)]
    subprocess.run(pip, check=True, timeout=120)  # before the path: pip must not see what is installed there
    [packages] = (venv / "lib").glob("python*/site-packages")
    # A folder in a .pth file is searched, but its own .pth files, among them an editable install's, are not read.
    (packages / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return python


def test_the_wheel_has_the_data_and_the_licence_but_no_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    journals = {f"orchestrator/reference_data/journals/{path.name}" for path in OUR_RUNS.glob("*.jsonl.gz")}
    assert {name for name in names if name.startswith(PACKAGES)} == {name for name, _ in sources(ROOT)} | journals
    assert journals
    assert {
        "dashboard/app.py",
        "dashboard/icon.svg",
        "dashboard/style.css",
        "dashboard/.streamlit/config.toml",
    } <= names
    assert {name.split("/")[0] for name in names} - {"nsa_core", "jobs", "orchestrator", "dashboard"} == {
        name.split("/")[0] for name in names if ".dist-info/" in name
    }
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_operators_runs_the_examples_of_the_pages_where_only_torch_is_installed(dist: Path, tmp_path: Path) -> None:
    [wheel] = dist.glob("nsa_core-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        folders = {name.split("/")[0] for name in archive.namelist()}
        assert folders == {"nsa_core", f"nsa_core-{nsa_core.__version__}.dist-info"}
        assert "nsa_core/py.typed" in archive.namelist()
        archive.extractall(tmp_path / "installed")
    pages = "".join((ROOT / name).read_text() for name in ("docs/operator.md", "README.md"))
    examples = re.findall(r"```python\n(import torch\n.*?)```", pages, re.DOTALL)
    assert len(examples) == 5
    with_transformers = [each for each in examples if "transformers" in each]
    programs = [[ALONE, *(each for each in examples if each not in with_transformers)]]
    programs += [with_transformers] if find_spec("transformers") else []
    env = os.environ | {"PYTHONPATH": str(tmp_path / "installed"), "PYTHONSAFEPATH": "1"}
    for program in programs:
        text = "\n".join([*program, "import nsa_core", "print(nsa_core.__file__)"])
        done = subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True, timeout=200)
        assert done.stdout.splitlines()[-1:] == [f"{tmp_path}/installed/nsa_core/__init__.py"], done.stderr


def test_jobs_have_the_installed_code_and_what_their_specs_name(user: User) -> None:
    """Two jobs beside each other: one by `nsa submit`, one by `ray job submit`."""
    (user.here / "corpus").mkdir()
    for number in range(8):
        (user.here / "corpus" / f"{number}.txt").write_text(f"{number} {CORPUS}")
    (user.here / "private.txt").write_text("not to be sent")
    changes = [item for change in (*SHORT, "data.path=corpus") for item in ("--set", change)]
    done = user.run("nsa", "submit", "specs/train_smoke.yaml", "--no-wait", *changes)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = re.search(r"^submitted \S+ \(upload: ([\d.]+) MiB\)$", done.stdout, re.MULTILINE)
    assert printed is not None
    assert float(printed[1]) < 1

    address = re.search(r"http://\S+", (user.here / ".env").read_text())
    assert address is not None
    ray = f"env RAY_AUTH_MODE=token python -m ray.scripts.scripts job submit --address {address[0]} --working-dir ."
    done = user.run(*ray.split(), "--", "python", "-m", "jobs", "specs/drill.yaml", "--set", "behaviours=[ok, raise]")
    assert done.returncode == 1, done.stdout + done.stderr  # a point failed, on purpose
    run, points = user.newest("drill")
    assert list(points["state"]) == ["ok", "error"]
    files = re.findall(r'File "([^"]+)"', user.run("nsa", "logs", run["run_id"], "--point", "1").stdout)
    assert any(file.endswith("jobs/drill.py") for file in files)
    assert all(Path(file).is_relative_to(user.venv) for file in files), files
    report = user.run("nsa", "report", run["run_id"], "--out", "report.html")
    assert report.returncode == 0, report.stdout + report.stderr
    assert "drill" in (user.here / "report.html").read_text()

    wait_for(lambda: user.newest("train")[0]["state"] == "done", 120, lambda: str(user.newest("train")), pause=0.5)
    run, points = user.newest("train")
    assert list(points["state"]) == ["ok"]
    assert run["code_hash"] == provenance.code_hash()  # as from the checkout: the wheel has all sources
    assert run["git_commit"] is None
    ours, whole = sorted(user.uploads(), key=len)
    assert set(ours) == {"specs/train_smoke.yaml", *(f"corpus/{number}.txt" for number in range(8))}
    assert ".env" not in whole, "`nsa init` has written a .rayignore"


def _setuptools() -> int:
    try:
        return int(importlib.metadata.version("setuptools").split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return 0
