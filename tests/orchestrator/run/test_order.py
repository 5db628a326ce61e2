"""Bad input ends with one line a mistake before a file is made; a dry run makes none either."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.run import driver

ROOT = Path(__file__).resolve().parents[3]
NSA_SUBMIT = ["-c", "from orchestrator.cli.entry import main; main()", "submit"]


@pytest.mark.parametrize("dry", [True, False], ids=["dry", "real"])
@pytest.mark.parametrize(
    ("given", "env", "fields"),
    [
        ({"workers": 0}, {}, ["resources.workers: 0"]),
        ({"isolation": "cold", "more": "lenghts: [1]\n"}, {}, ["isolation: 'cold'", "lenghts"]),
        ("kind: nonsense\n", {}, ["kind: 'nonsense'"]),
        (None, {}, ["spec: "]),
        ({}, {"NSA_DATABASE_URL": "mysql://x/y"}, ["NSA_DATABASE_URL"]),
        ("kind: nonsense\n", {"NSA_DATABASE_URL": "sqlite://"}, ["NSA_DATABASE_URL", "kind"]),
        ({}, {"NSA_DASHBOARD_PORT": "x"}, ["NSA_DASHBOARD_PORT"]),
        ({}, {"NSA_GATES": "missing.yaml"}, ["gates: 'missing.yaml'"]),
    ],
)
def test_every_mistake_is_a_line_and_no_file_is_made(
    home, spec, tmp_path, capsys, monkeypatch, quick_probe, given: dict | str | None, env, fields, dry
) -> None:
    """`given`: arguments of the fixture `spec`, the text of a spec, or None for a missing file."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "spec.yaml"
    if isinstance(given, str):
        path.write_text(given)
    elif given is not None:
        spec("pass", **given)
    assert driver.main([str(path), "--local", *(["--dry-run"] if dry else [])]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(fields)
    for line, field in zip(lines, fields, strict=True):
        assert re.match(rf"error: {re.escape(field)}", line), line
    assert not home.exists()


@pytest.mark.parametrize("command", [["-m", "jobs", "--local"], NSA_SUBMIT])
def test_a_current_folder_that_was_deleted_is_a_mistake_in_one_line(home, spec, tmp_path, command) -> None:
    """PyTorch's math library would end the process there, with a complaint about a library."""
    told = "error: current folder: cannot be used (No such file or directory); change to another (cd)\n"
    gone = (
        f"import os; os.mkdir({str(tmp_path / 'gone')!r}); os.chdir({str(tmp_path / 'gone')!r}); os.rmdir(os.getcwd())"
    )
    start = f"{gone}; os.execv({sys.executable!r}, {[sys.executable, *command, str(spec('pass'))]!r})"
    env = os.environ | {"PYTHONPATH": str(ROOT), "NSA_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-c", start], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)
    assert not home.exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "arguments: SPEC is missing"),
        (["--bogus"], "arguments: "),
        (["--resume", "nope"], "--resume: 'nope': no journal of this run in "),
        (["--resume", "../../etc"], "--resume: '../../etc': no journal of this run in "),
        (["x.yaml", "--retry-failed"], "arguments: --retry-failed"),
        (["x.yaml", "--resume", "nope"], "spec: 'x.yaml' cannot be read"),
    ],
)
def test_wrong_arguments_are_named(home, capsys, args, message) -> None:
    assert driver.main([*args, "--local"]) == 2
    assert capsys.readouterr().err.splitlines()[0].startswith(f"error: {message}")
    assert not home.exists()


def test_asking_for_more_than_this_machine_has_is_an_error(home, spec, capsys, snippet_kind) -> None:
    args = [str(spec("pass")), "--local"]
    for setting in ("resources.num_cpus=4096", "resources.num_gpus=64", "resources.accelerator_type=H100"):
        args += ["--set", setting]
    assert driver.main(args) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in errors] == [
        "resources.num_cpus",
        "resources.num_gpus",
        "resources.accelerator_type",
    ]
    assert not home.exists()


def test_a_missing_cluster_is_an_error_with_a_fix(home, spec, capsys, monkeypatch, snippet_kind) -> None:
    monkeypatch.setenv("NSA_RAY_ADDRESS", "127.0.0.1:1")
    assert driver.main([str(spec("pass"))]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: NSA_RAY_ADDRESS: '127.0.0.1:1': no Ray cluster answers")
    assert "nsa up" in line
    assert "--local" in line
    assert not home.exists()


def test_a_dry_run_lists_the_points_and_makes_no_file(home, capsys) -> None:
    assert driver.main(["jobs/configs/drill.yaml", "--dry-run", "--set", "behaviours=[ok, skip]"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^ +0  ok$", out, re.MULTILINE)
    assert re.search(r"^ +1  skip  skipped: skipped on purpose$", out, re.MULTILINE)
    assert not home.exists()
