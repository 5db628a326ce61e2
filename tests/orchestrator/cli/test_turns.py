"""Turns as a job: what it is told and holds, and its exit code; a turn's environment, and a signal during one."""

from __future__ import annotations

import os
import shlex
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nsa_command import Nsa

from orchestrator.cli import submission
from orchestrator.cli.interleave import Sources, Turns, sources_at
from orchestrator.judge.rules import READY_SPECS
from orchestrator.provenance import GitState
from orchestrator.settings import load_settings
from orchestrator.store import Store, queries
from orchestrator.store.journal import NAME, Journal

SPEC = str(READY_SPECS / "bench_smoke.yaml")
DRIVER = """
import os, pathlib, shutil, signal, sys, time

got = []


def note(number, frame):
    got.append(number)
    signal.signal(number, signal.SIG_DFL)


for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, note)
processes = [os.getppid(), *([os.getpid()] if os.environ["BOTH"] else [])]
for process in processes:
    os.kill(process, signal.SIGTERM)
until = time.monotonic() + 20
while len(got) < len(processes) and time.monotonic() < until:
    time.sleep(0.01)
here = pathlib.Path(__file__).parent
(here / "told").write_text(os.environ["PYTHONPATH"] + "\\n" + os.environ["NSA_WEBHOOK"] + str(len(got)))
folder = pathlib.Path(os.environ["NSA_ARTIFACTS"]) / "r1"
folder.mkdir(parents=True)
shutil.copy(here / "journal", folder / "NAME")
sys.exit(130)
"""


class Client:
    """Ray's job client, of a cluster whose jobs end with exit code 3."""

    def __init__(self) -> None:
        self.jobs: list[dict[str, Any]] = []

    def submit_job(self, **job: Any) -> str:
        self.jobs.append(job)
        return "raysubmit_1"

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        yield "log\n"

    def get_job_info(self, job: str) -> SimpleNamespace:
        return SimpleNamespace(status="FAILED", driver_exit_code=3)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    found = Client()
    monkeypatch.setattr(submission, "_client", lambda _: found)
    monkeypatch.setattr(submission, "asks_for_token", lambda _: True)
    return found


def test_a_job_of_turns_gets_the_options_holds_one_point_and_gives_its_exit_code(nsa: Nsa, client: Client) -> None:
    order = ("compare", "--interleave", SPEC, "--at", "HEAD")
    assert nsa(*order, "--format", "md", "--turns", "2", "--set", "resources.num_cpus=2").code == 3
    [job] = client.jobs
    told = shlex.split(job["entrypoint"])
    for option, value in (("--format", "md"), ("--turns", "2"), ("--threshold", "2.0"), ("--metric", "time")):
        assert told[told.index(option) + 1] == value
    assert told[-4:] == ["--set", "resources.num_cpus=2", "--set", "resources.workers=1"]
    assert (job["entrypoint_num_cpus"], job["entrypoint_num_gpus"]) == (2, 0)
    refused = nsa(*order, "--set", "device=auto")
    assert (refused.code, len(client.jobs)) == (2, 1)
    assert refused.err == "error: device: 'auto': a job of turns must hold what it measures on; use cuda or cpu\n"
    missing = nsa("compare", "--interleave", SPEC, "--at", "nonsense", "--set", "resources.num_cpus=2")
    assert missing.err.startswith("error: --at: 'nonsense': is none of the checkout")


@pytest.mark.parametrize("stray", [("--turns", "3"), ("--set", "device=cpu"), ("--local",)], ids=lambda each: each[0])
def test_options_of_turns_are_refused_where_stored_runs_are_compared(nsa: Nsa, stray: tuple[str, ...]) -> None:
    done = nsa("compare", "a", "b", *stray)
    assert done.err == f"error: {stray[0]}: without --interleave nothing is measured; give it, or remove this\n"


@pytest.mark.parametrize("both", ["", "as `ray job stop` does"])
def test_a_signal_during_a_turn_ends_its_run_whose_journal_is_stored(
    home: Path, sqlite_store: Store, sweep: Callable[..., list], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    both: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("BOTH", both)
    folder = tmp_path / "sources"
    (folder / "jobs").mkdir(parents=True)
    (folder / "jobs" / "__init__.py").touch()
    (folder / "jobs" / "__main__.py").write_text(DRIVER.replace("NAME", NAME))
    with Journal(folder / "jobs" / "journal") as journal:
        journal.append(sweep("r1", laws={"chunked": 1.0}))
    monkeypatch.setenv("PYTHONPATH", "/of/the/user")
    monkeypatch.setenv("NSA_WEBHOOK", "http://127.0.0.1:1/")
    turns = Turns(load_settings(), Path(SPEC), (), 2)
    with pytest.raises(KeyboardInterrupt), sources_at({"--at": "HEAD"}):
        turns.measure(sqlite_store, [Sources("one", folder, GitState("c0ffee", dirty=False))])
    assert list(queries.runs(sqlite_store)["run_id"]) == ["r1"]
    assert (folder / "jobs" / "told").read_text() == f"{folder}{os.pathsep}/of/the/user\n{2 if both else 1}"


def test_an_empty_webhook_wins_over_that_of_the_env_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text("NSA_WEBHOOK=http://127.0.0.1:1/\n")
    monkeypatch.setattr("orchestrator.settings.env_file", lambda: tmp_path / ".env")
    assert load_settings().webhook is not None
    monkeypatch.setenv("NSA_WEBHOOK", "")
    assert load_settings().webhook is None
