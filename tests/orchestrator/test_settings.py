"""Where settings come from: in a checkout, beside an installed package, and in a Ray job."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator import settings
from orchestrator.settings import Installation

ROOT = Path(__file__).resolve().parents[2]
SHOW = (
    "import json; from orchestrator.settings import *; found = load_settings(); "
    "print(json.dumps([installation().name, str(found.home), found.dashboard_port, example_spec()]))"
)


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


@pytest.mark.parametrize("name", ["HOME", "ARTIFACTS", "ARTIFACT_STORE"])
def test_a_folder_whose_name_is_not_utf_8_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The URL of a database of SQLite ended in a UnicodeEncodeError."""
    monkeypatch.setenv(f"NSA_{name}", os.fsdecode(bytes(tmp_path / "b") + b"\xff"))
    with pytest.raises(settings.SettingsError, match=rf"^NSA_{name}: .*b\\udcff': its name is not UTF-8, .*; name an"):
        settings.load_settings()


def test_the_address_of_a_webhook_is_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("hooks.slack.com/services/T/B/SECRET", "https://user@hooks.slack.com/services/T/B/SECRET"):
        monkeypatch.setenv("NSA_WEBHOOK", wrong)
        with pytest.raises(settings.SettingsError, match=r"^NSA_WEBHOOK: '\(withheld\)': .*; write http") as err:
            settings.load_settings()
        assert "SECRET" not in str(err.value)


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
