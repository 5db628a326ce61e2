"""Where settings come from: in a checkout, beside an installed package, and in a Ray job."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator import settings
from orchestrator.settings import Installation, SettingsError, installation

ROOT = Path(__file__).resolve().parents[2]
SHOW = (
    "import json; from orchestrator.settings import *; found = load_settings(); "
    "print(json.dumps([installation().name, str(found.home), found.dashboard_port, example_spec()]))"
)


@pytest.mark.parametrize(
    ("folder", "project", "expected"),
    [
        ("nsa-bench", '[project]\nname = "nsa-bench"\n', Installation.CHECKOUT),
        ("site-packages", None, Installation.INSTALLED),
        ("site-packages", '[project]\nname = "careless"\n', Installation.INSTALLED),
        ("_ray_pkg_0123", '[project]\nname = "nsa-bench"\n', Installation.UPLOADED),
        ("_ray_pkg_0123", None, Installation.UPLOADED),
    ],
)
def test_the_sort_of_place_is_told_by_what_lies_beside_the_packages(
    tmp_path: Path, folder: str, project: str | None, expected: Installation
) -> None:
    root = tmp_path / folder
    root.mkdir()
    if project is not None:
        (root / "pyproject.toml").write_text(project)
    assert installation(root) is expected


@pytest.mark.parametrize(
    ("sources", "cwd", "expected"),
    [
        ("checkout", "work", ["CHECKOUT", "{tmp}/checkout/var", 1111, "jobs/configs/demo.yaml"]),
        ("site-packages", "work", ["INSTALLED", "{tmp}/user/.nsa", 2222, "specs/demo.yaml"]),
        ("site-packages", "_ray_pkg_01", ["INSTALLED", "{tmp}/user/.nsa", 8501, "specs/demo.yaml"]),  # the submitter's
        ("_ray_pkg_02", "_ray_pkg_02", ["UPLOADED", "{tmp}/user/.nsa", 8501, "specs/demo.yaml"]),
    ],
)
def test_home_and_env_file_follow_from_it(tmp_path: Path, sources: str, cwd: str, expected: list) -> None:
    root = tmp_path / sources
    ours = ("__init__.py", "artifact_url.py", "database_url.py", "errors.py", "settings.py")
    for part in (
        "jobs/__init__.py",
        "jobs/schema/plain_text.py",
        "jobs/specs/user_files.py",
        "jobs/specs/validation.py",
        *(f"orchestrator/{name}" for name in ours),
    ):
        (root / part).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / part, root / part)
    if sources == "checkout":
        shutil.copy(ROOT / "pyproject.toml", root)
    (tmp_path / cwd).mkdir(exist_ok=True)
    (root / ".env").write_text("NSA_DASHBOARD_PORT=1111\n")
    if cwd != sources:
        (tmp_path / cwd / ".env").write_text("NSA_DASHBOARD_PORT=2222\n")
    env = os.environ | {"HOME": str(tmp_path / "user"), "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", SHOW]
    done = subprocess.run(command, cwd=tmp_path / cwd, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [one.format(tmp=tmp_path) if isinstance(one, str) else one for one in expected]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"NSA_HOME=/tmp/x\nNSA_DATABASE_URL='sqlite:////tmp/x.db\n", r"line 2: is not NAME=VALUE, or its quote"),
        ("NSA_DASHBOARD_PORT=2222\n".encode("utf-16"), r"is not UTF-8; save it as UTF-8 text$"),
    ],
)
def test_a_wrong_env_file_is_a_mistake_in_one_line(tmp_path: Path, monkeypatch, content: bytes, message: str) -> None:
    (tmp_path / ".env").write_bytes(content)
    monkeypatch.setattr(settings, "env_file", lambda: tmp_path / ".env")
    with pytest.raises(SettingsError, match=rf"^\.env: '.*\.env': {message}"):
        settings.load_settings()


def test_a_user_without_a_home_is_told_to_set_nsa_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(settings, "installation", lambda: Installation.INSTALLED)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    with pytest.raises(SettingsError, match=r"^NSA_HOME: is not set, and this user has no home; set it"):
        settings.default_home()


NO_DATABASE = """
import os, sys
from pathlib import Path
from orchestrator.settings import Settings
from orchestrator.store import Store, StoreError

def answers(home):
    there = Settings(home=home)
    try:
        Store.open(there.database, create=False, readonly=True)
    except StoreError as error:
        return there.no_database_yet, str(error).partition("': ")[2]

locked = Path(sys.argv[1])
assert answers(locked / "home")[0] is True  # what is imported on the way must be, before root gives up its rights
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    os.stat(locked / "home" / "nsa.db")
except PermissionError:
    print(answers(locked / "home"))
"""


def test_a_database_below_a_folder_that_may_not_be_read_is_said_to_be_so(tmp_path: Path) -> None:
    """A colleague's is there: no run makes it. In a process without root's rights, as root may read every folder."""
    (locked := tmp_path / "locked").mkdir(mode=0)
    command = [sys.executable, "-c", NO_DATABASE, str(locked)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    fix = "have it made readable, or name another file"
    assert ast.literal_eval(done.stdout) == (False, f"cannot be looked at (Permission denied); {fix}")


def test_the_users_home_is_meant_by_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text("NSA_HOME=~/x\nNSA_ARTIFACTS=~/y\nNSA_GATES=~/gates.yaml\n")
    monkeypatch.delenv("NSA_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(settings, "env_file", lambda: tmp_path / ".env")
    found = settings.load_settings()
    assert (found.home, found.artifacts, found.gates) == (tmp_path / "x", tmp_path / "y", tmp_path / "gates.yaml")
    monkeypatch.setenv("NSA_HOME", "~nobody-of-this-name/x")
    with pytest.raises(SettingsError, match=r"^NSA_HOME: '~nobody-of-this-name/x': begins with ~, and there is no"):
        settings.load_settings()


def test_a_variable_that_is_almost_a_setting_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "installation", lambda: Installation.INSTALLED)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("NSA_ARTIFACT=/x\nNSA_HOME=/y\n")
    assert settings.misspelled() == [
        "NSA_ARTIFACT: is no setting, and nothing reads it; write NSA_ARTIFACTS, or remove it"
    ]
    monkeypatch.setenv("NSA_DATABSE_URL", "secret")
    monkeypatch.setenv("nsa_gates", "")
    for others in ("NSA_BIND", "NSA_CHECKOUT", "NSA_DASHBOARD_PASSWORD", "NSA_GIT_COMMIT", "NASA_HOME"):
        monkeypatch.setenv(others, "x")
    told = settings.misspelled()
    assert [line.partition(":")[0] for line in told] == ["NSA_ARTIFACT", "NSA_DATABSE_URL"]
    assert "secret" not in "".join(told)


@pytest.mark.parametrize("command", [["orchestrator.cli.commands", "runs"], ["jobs", "no.yaml", "--dry-run"]])
def test_commands_warn_of_a_misspelled_variable(tmp_path: Path, command: list[str]) -> None:
    code = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_module(sys.argv[0], run_name='__main__')"
    if command[0] != "jobs":
        code = "import sys; sys.argv = sys.argv[1:]; from orchestrator.cli.commands import main; main()"
    env = {**os.environ, "NSA_HOME": str(tmp_path), "NSA_DATABSE_URL": "sqlite:////x"}
    call = [sys.executable, "-c", code, *command]
    done = subprocess.run(call, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr.startswith("warning: NSA_DATABSE_URL: is no setting, and nothing reads it; write NSA_DATABASE_U")
    assert done.stderr.count("warning") == 1
