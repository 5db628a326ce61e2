"""A Ray job whose order is refused is a failed run without points, with its log, in every list of runs."""

import json
import re
from pathlib import Path

import pytest
from dashboard_pages import show, text
from typer.testing import CliRunner

from orchestrator.cli import submission
from orchestrator.cli.commands import app
from orchestrator.run import driver
from orchestrator.store import Store, queries

JOB = "raysubmit_1"
BAD = "kind: drill\nname: typo\nbehaviours: [ok]\nlenghts: [1]\nseed: x\n"


@pytest.fixture(autouse=True)
def submitted(monkeypatch: pytest.MonkeyPatch, home) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"metadata": {"job_submission_id": JOB}}))
    monkeypatch.setenv("NSA_RAY_DASHBOARD", "http://127.0.0.1:1")  # no cluster


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    path = tmp_path / "bad spec.yaml"
    path.write_text(BAD)
    return path


def stored(home: Path) -> list[dict]:
    with Store.open(f"sqlite:///{home / 'nsa.db'}", create=False) as store:
        runs = [queries.run(store, run_id) for run_id in queries.runs(store)["run_id"]]
        return [{**run, "events": queries.events(store, run["run_id"])} for run in runs if run]


def nsa(*args: str) -> str:
    done = CliRunner().invoke(app, args)
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.output


def test_a_bad_spec_is_a_failed_run_with_its_reason(home, bad, capsys) -> None:
    assert driver.main([str(bad)]) == 2
    said = capsys.readouterr().err
    [run] = stored(home)
    assert (run["name"], run["kind"], run["state"], run["points"]) == ("bad-spec", "unknown", "failed", 0)
    assert (run["submission_id"], run["spec"]) == (JOB, {})
    assert "".join(f"error: {line}\n" for line in run["reason"].split("\n")) == said
    [(level, message)] = run["events"][["level", "message"]].itertuples(index=False)
    assert (level, message) == ("error", f"ended before its first point: {run['reason']}")
    assert not (home / "artifacts").exists()


@pytest.mark.parametrize(
    ("args", "content", "name", "reason"),
    [
        (["odd name.yml"], "[", "odd-name", "spec: 'odd name.yml' is not YAML"),
        (["gone.yaml"], None, "gone", "spec: 'gone.yaml' cannot be read"),
        (["x.yaml"], "kind: nonsense\nname: [1]\n", "x", "kind: 'nonsense'"),
        (["--resume", "nope"], None, "resume", "--resume: 'nope': no journal of this run in "),
        (["--resume", "../../etc"], None, "resume", "--resume: '../../etc'"),
        (["--bogus"], None, "job", "arguments: "),
    ],
)
def test_any_refused_order_is_a_run(home, tmp_path, monkeypatch, args, content, name, reason) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(args[0]).write_text(content)
    assert driver.main(args) == 2
    [run] = stored(home)
    assert re.fullmatch(r"\d{8}-\d{6}-" + run["name"] + "-[0-9a-f]{4}", run["run_id"])
    assert (run["name"].rstrip("-"), run["kind"], run["state"]) == (name, "unknown", "failed")
    assert run["reason"].startswith(reason)


def test_it_is_in_every_list_of_runs_and_in_no_result(home, bad, monkeypatch) -> None:
    monkeypatch.setattr(submission, "log", lambda settings, job, follow: [f"the log of {job}\n"])
    assert driver.main([str(bad)]) == 2
    [run] = stored(home)
    assert run["run_id"] in nsa("runs", "--state", "failed")
    assert "lenghts" in nsa("show", "last")
    assert nsa("logs", run["run_id"]) == nsa("logs", JOB) == f"the log of {JOB}\n"
    assert "has ended already: failed" in nsa("cancel", "last")
    assert "failed before it began" in nsa("status")
    assert "| unknown | measured | failed | 0 of 0 ok |" in nsa("report", "last")
    assert "UNKNOWN" in nsa("gate", "--run", "last")
    page = text(show("runs", run=run["run_id"]))
    assert "lenghts" in page
    assert "It ended before its first point." in page
    assert "bad-spec" in text(show("runs"))


def test_there_is_nothing_to_go_on_with(home, bad, monkeypatch, capsys) -> None:
    assert driver.main([str(bad)]) == 2
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR")
    run_id = stored(home)[0]["run_id"]
    assert driver.main(["--resume", run_id, "--local"]) == 2
    assert CliRunner().invoke(app, ["export", run_id, "--journal"]).exit_code == 0
    assert driver.main(["--resume", run_id, "--local"]) == 2
    assert "its order was refused" in capsys.readouterr().err
    assert len(stored(home)) == 1


def test_only_a_job_that_was_to_measure_leaves_a_run(home, bad, monkeypatch) -> None:
    assert driver.main([str(bad), "--dry-run"]) == 2
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR")
    assert driver.main([str(bad)]) == 2
    assert not home.exists()


@pytest.mark.parametrize("url", ["postgresql+psycopg://nsa:secret@127.0.0.1:1/nsa", "mysql://x", "sqlite:////proc/x/y"])
def test_a_database_that_cannot_be_used_hides_no_mistake(bad, monkeypatch, capsys, url) -> None:
    monkeypatch.setenv("NSA_DATABASE_URL", url)
    assert driver.main([str(bad)]) == 2
    said = capsys.readouterr().err
    assert "error: lenghts" in said
    assert "Traceback" not in said
    assert "secret" not in said


def test_a_resume_beside_a_living_driver_is_a_failed_run_of_its_own(home, spec, quick_probe, lease_to_another) -> None:
    assert driver.main([str(spec("pass")), "--local"]) == 0
    [first] = stored(home)
    with Store.open(f"sqlite:///{home / 'nsa.db'}") as store:
        lease_to_another(store, first["run_id"])
    assert driver.main(["--local", "--resume", first["run_id"]]) == 2
    second, again = stored(home)
    assert (again["run_id"], again["state"], again["points"]) == (first["run_id"], "done", 1)
    assert (second["name"], second["state"], second["points"]) == ("resume", "failed", 0)
    assert first["run_id"] in second["reason"]
