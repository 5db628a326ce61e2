"""The driver as a whole, on this machine: how it ends early, and odd points; e2e/test_ray.py has every failure."""

import io
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from homes import journal_of, records, stored
from processes import wait_for
from quick_driver import COMMAND

from jobs.schema.states import PointState
from orchestrator.errors import ExecutorGone
from orchestrator.execute.local import LocalExecutor
from orchestrator.run import driver
from orchestrator.run.progress import Watcher
from orchestrator.store import Store, importer, journal, queries
from orchestrator.store.records import OutcomeRecord, PointRecord, RunEndRecord, StartRecord

ROOT = Path(__file__).resolve().parents[3]


def test_a_run_that_requires_preflights_begins_nothing_without_them(
    home, spec, quick_probe, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert driver.main([str(spec("pass", more="requires_preflight: true\n")), "--local"]) == 2
    said = capsys.readouterr().err
    assert "error: requires_preflight: true: 2 of 2 GPUs of " in said
    assert said.endswith("run python -m jobs --local jobs/configs/preflight.yaml --set cards=2\n")
    monkeypatch.setattr(driver, "_executor", lambda order: SimpleNamespace(gpus=dict))
    path = spec("pass", more="requires_preflight: true\n")
    assert driver.main([str(path), "--set", "resources.accelerator_type=H200"]) == 2
    said = capsys.readouterr().err
    assert said.endswith("preflight.yaml --set cards=1 --set resources.accelerator_type=H200\n")
    assert driver.main([str(path), "--set", "device=cpu"]) == 2
    assert capsys.readouterr().err == "error: requires_preflight: True: a CPU has no preflight; leave it out\n"
    assert not list((home / "artifacts").glob("*"))


# Ending early


def test_a_cluster_that_went_away_leaves_nothing_running(home, spec, capsys, quick_probe, monkeypatch) -> None:
    def gone(self: LocalExecutor, timeout: float) -> list:
        raise ExecutorGone("the cluster went away")

    with monkeypatch.context() as patch:
        patch.setattr(LocalExecutor, "poll", gone)
        assert driver.main([str(spec("value = 1.0", "pass")), "--local"]) == 1
    row, points = stored(home)
    assert (row["state"], list(points["state"])) == ("failed", ["lost", "lost"])
    assert f"--resume {journal_of(home).parent.name}" in capsys.readouterr().out
    assert driver.main(["--local", "--resume", journal_of(home).parent.name]) == 0
    row, points = stored(home)
    assert (row["state"], list(points["state"])) == ("done", ["ok", "ok"])


@pytest.mark.usefixtures("hangs_up")
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP])
def test_a_hangup_right_after_a_signal_interrupts_no_cleanup(first: signal.Signals) -> None:
    """Neither before the first point nor at the very end: systemd sends one after SIGTERM, a shell a second one."""
    with driver._signals() as stop:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(first)
        signal.raise_signal(signal.SIGHUP)
    signal.raise_signal(signal.SIGHUP)
    assert stop.reason == first.name


@pytest.mark.usefixtures("hangs_up")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])  # SIGINT: tests/e2e/test_local_training.py
def test_a_stopped_driver_cancels_the_remaining_points(home, spec, start, number) -> None:
    path = spec("pass", "import time\nwhile True: beat('on'); time.sleep(0.1)", "pass")
    driver = start(path)
    assert driver.stdout is not None
    while not driver.stdout.readline().startswith("[1/3]"):
        assert driver.poll() is None
    wait_for(lambda: any(isinstance(r, StartRecord) and r.point_id.endswith("/1") for r in records(home)), 60)
    family = psutil.Process(driver.pid).children(recursive=True)
    driver.send_signal(number)
    if number == signal.SIGHUP:  # a closed terminal and its shell send one each
        time.sleep(0.2)
        driver.send_signal(number)
    assert driver.wait(timeout=60) == 130
    assert psutil.wait_procs(family, timeout=30)[1] == []
    end = records(home)[-1]
    assert isinstance(end, RunEndRecord)
    assert (end.state, end.reason) == ("cancelled", number.name)
    row, points = stored(home)
    assert row["state"] == "cancelled"
    assert list(points["state"]) == ["ok", "cancelled", "cancelled"]
    assert len([r for r in records(home) if isinstance(r, PointRecord)]) == 3


@pytest.mark.parametrize("redirection", ["| head -1; exit ${PIPESTATUS[0]}", ">/dev/full"])
def test_a_sweep_goes_on_without_its_display(home, spec, kinds_path, redirection: str) -> None:
    path = spec("value = 1.0", "import time; time.sleep(0.5)", "value = 3.0")
    command = ["bash", "-c", f'"$@" --local {redirection}', "bash", *COMMAND, path]
    env = {**os.environ, **kinds_path, "NSA_HOME": str(home)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert ("(No space left on device); the rest is not shown" in done.stderr) == ("full" in redirection)
    row, points = stored(home)
    assert row["state"] == "done"
    assert list(points["state"]) == ["ok"] * 3


RETURNS = "import jobs.snippet as s, jobs.schema.point as p; s.Measurement = lambda *a: p.Measurement"
ODD = {
    r"raise ValueError('caf\udcff \x00')": "error",
    "files['..'] = 'x'; files['good.txt'] = 'y'": "ok",
    r"beat('caf\udcff', 10**30, 10**30); import time; time.sleep(0.4)": "ok",
    rf"t, e={{'a': '\udcff'}}, {{'\udcff': [float('nan')]}}; {RETURNS}((s.Metric('time', 'ms', 1),), t, e, {{}})": "ok",
    f"{RETURNS}((s.Metric('time', 'ms', 1.0),) * 2, {{}}, {{}}, {{}})": "error",
    f"{RETURNS}((s.Metric('time', 'ms', 1.0),), {{}}, {{'gpu': {{'name': [1, chr(0)]}}, 'x': 10**400}}, {{}})": "ok",
    "value = 7.0": "ok",
}


def run(*args: str | Path) -> int:
    return driver.main(["--local", *map(str, args)])


@pytest.mark.parametrize("new_database", ["postgres"], indirect=True)
def test_no_odd_point_costs_another(home, spec, database_url, tmp_path, monkeypatch, quick_probe, capsys) -> None:
    monkeypatch.setenv("NSA_DATABASE_URL", database_url)
    assert run(spec(*ODD)) == 1
    told = capsys.readouterr()
    assert told.err == ""
    assert "nsa import" not in told.out
    assert re.search(r"^warning: snippet 1: file not kept: '\.\.': is no plain file name", told.out, re.M)
    path = journal_of(home)
    run_id = path.parent.name
    assert run("--resume", run_id) == 1
    assert sum(isinstance(record, StartRecord) for record in journal.read(path)) == len(ODD)  # all are settled
    other = f"sqlite:///{tmp_path}/other.db"
    with Store.open(other) as store:
        importer.import_file(store, path)
    for url in (database_url, other):
        with Store.open(url) as store:
            found = queries.run(store, run_id)
            assert found is not None
            assert found["state"] == "done"
            assert list(queries.points(store, run_id)["state"]) == list(ODD.values())
            assert queries.measurements(store, run_ids=[run_id]).value.tolist() == [1.0, 1.0, 1.0, 1.0, 7.0]


def ended(state: PointState = PointState.OK, **fields: Any) -> OutcomeRecord:
    return OutcomeRecord(run_id="r", point_id="r/0", attempt=1, state=state, **fields)


def test_a_terminal_that_lacks_a_character_shows_its_code() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with Watcher({"r/0": "é"}, 0, [], out) as watching:
        watching.ended(ended(PointState.ERROR, reason="日本"))
    out.seek(0)
    assert out.read() == "[1/1] error \\xe9: \\u65e5\\u672c\n"
