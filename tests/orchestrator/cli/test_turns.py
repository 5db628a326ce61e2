"""Submission: other servers, resumes. Turns: as a job, a signal during one; `nsa bisect`, in a throwaway repository."""

import os
import shlex
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from nsa_command import Nsa, nsa
from processes import git

from jobs.schema.states import PointState, RunState
from orchestrator.cli import interleave, services, submission
from orchestrator.cli.interleave import Sources, Turns, sources_at
from orchestrator.cli.submission import SubmissionError
from orchestrator.execute.upload import Upload
from orchestrator.judge.rules import READY_SPECS
from orchestrator.provenance import GitState
from orchestrator.report.compare import Side
from orchestrator.settings import PACKAGES, Settings, load_settings
from orchestrator.store import Store, queries
from orchestrator.store.journal import NAME, Journal
from orchestrator.store.records import MetricData, OutcomeRecord, PointRecord, RunEndRecord, RunRecord

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


FACTORS = (1.0, 1.001, 1.002, 0.0, 1.032, 1.031, 1.07, -1.0)  # the fourth measures nothing, the last other lengths


def made_up(turns: Turns, store: Store, sources: Sequence[Sources]) -> list[Side]:
    """A run of each of the sources, of two lengths whose times the sources' file says."""
    sides = []
    for each in sources:
        factor, run_id = float((each.folder / "jobs" / "factor").read_text()), f"run-{len(store_runs)}"
        drift = 1.02 ** (len(store_runs) // len(sources))  # from one step to the next, and alike for both sides
        store_runs.append(each.name)
        run: dict[str, Any] = {"run_id": run_id}
        commit = {"git_commit": each.state.commit, "git_dirty": each.state.dirty}
        begin = RunRecord(**run, **commit, name="f", kind="f", spec={}, spec_hash="5")
        points: list[Any] = []
        for number, times in enumerate((drift * np.ones(20), drift * abs(factor) * np.ones(20)) if factor else ()):
            point = {**run, "point_id": f"{run_id}/{number}"}
            axes = {"implementation": "fake", "seq_len": (2048 if factor > 0 else 8192) * (number + 1)}
            points.append(PointRecord(**point, index=number, key=f"{number}", label="p", config={}, axes=axes))
            values = tuple(times * (1 + np.arange(20) % 7 / 2000))
            metric = MetricData(name="time", unit="ms", value=float(np.median(values)), samples=values)
            points.append(OutcomeRecord(**point, attempt=1, state=PointState.OK, metrics=(metric,)))
        store.apply_many([begin, *points, RunEndRecord(**run, state=RunState.DONE)])
        sides.append(Side(each.name, (run_id,), pooled=True))
    return sides


store_runs: list[str] = []


@pytest.fixture
def commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commits of the repository, each with its factor."""
    repository = tmp_path / "repository"
    found = []

    for package in PACKAGES:
        (repository / package).mkdir(parents=True)
        (repository / package / "factor").write_text("")
    git(repository, "init", "-q")
    for number, factor in enumerate(FACTORS):
        (repository / "jobs" / "factor").write_text(str(factor))
        git(repository, "add", "-A")
        git(repository, "commit", "-q", "-m", f"{number}")
        found.append(git(repository, "rev-parse", "HEAD"))
    monkeypatch.setattr(interleave, "SOURCES", repository)
    monkeypatch.setattr(Turns, "measure", made_up)
    monkeypatch.setenv("NSA_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NSA_DATABASE_URL", raising=False)
    return found


def test_the_commit_of_a_slowdown_is_found_and_those_that_cannot_be_told_are_named(commits: list[str]) -> None:
    store_runs.clear()
    done = nsa("bisect", commits[0], commits[6], "fake.yaml")
    assert (done.code, done.out.splitlines()[-1]) == (1, f"first worse: {commits[3]} or {commits[4]}"), done
    assert len(store_runs) <= 12, "halved, not one after the other"
    done = nsa("bisect", commits[4], commits[6], "fake.yaml", "--threshold", "3")
    assert (done.code, done.out.splitlines()[-1]) == (0, f"first worse: {commits[6]}")
    done = nsa("bisect", commits[0], commits[2], "fake.yaml")
    assert (done.code, done.out.splitlines()[-1][:24]) == (3, "no cell is proven worse ")
    assert nsa("bisect", commits[2], commits[0], "fake.yaml").err.startswith("error: GOOD: ")
    assert nsa("bisect", commits[2], commits[2], "fake.yaml").err.startswith("error: GOOD: ")
    assert nsa("bisect", commits[2], "nonsense", "fake.yaml").err.startswith("error: BAD: 'nonsense': is none of ")
    refused = nsa("bisect", commits[5], commits[7], "fake.yaml").err
    assert refused.startswith(f"error: BAD: {commits[7][:7]}: has no cell in common with GOOD {commits[5][:7]}; ")


@pytest.mark.parametrize(
    "answer",
    [
        "SSH-2.0-OpenSSH_9.6",
        "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>",
        "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n[1]",
        'HTTP/1.1 200 OK\r\nContent-Length: 41\r\n\r\n{"version": "4", "ray_version": "2.60.0"}',
    ],
    ids=lambda answer: answer[:20] + answer[-8:],
)
def test_another_server_in_place_of_rays_is_told(answer: str, monkeypatch: pytest.MonkeyPatch):
    class Stranger(StreamRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                self.request.recv(1 << 16)
                self.wfile.write(answer.encode() + b"\r\n\r\n")

    monkeypatch.setattr(submission, "load_spec", lambda *_: None)
    monkeypatch.setattr(submission, "collect", lambda *_: Upload({}, "spec.yaml"))
    with ThreadingTCPServer(("127.0.0.1", 0), Stranger) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        settings = Settings(ray_dashboard=f"http://127.0.0.1:{server.server_address[1]}")
        alike = "ray_version" in answer
        assert [one.healthy for one in services.local_services(settings) if one.name == "ray"] == [alike]
        assert submission.asks_for_token(settings)
        for ask in (lambda: submission.submit(settings, Path("spec.yaml")), lambda: submission.cluster_nodes(settings)):
            with pytest.raises(SubmissionError, match=r"^NSA_RAY_DASHBOARD: 'http://127\.0\.0\.1:\d+'.*; ") as caught:
                ask()
            assert "\n" not in str(caught.value)
        server.shutdown()
        thread.join()


def test_rays_client_asks_loopback_without_a_proxy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("http_proxy", "http://proxy.invalid:3128")
    monkeypatch.setenv("no_proxy", "example.org")
    monkeypatch.setattr(submission, "local_services", lambda _: [SimpleNamespace(healthy=True)])
    with pytest.raises(SubmissionError, match="cannot list the nodes"):
        submission.cluster_nodes(Settings(ray_dashboard="http://127.0.0.1:1"))
    assert os.environ["no_proxy"] == "example.org,127.0.0.1"


@pytest.mark.parametrize("options", [(), ("--retry-failed",)])
def test_a_resume_reaches_the_job_with_the_runs_whole_id(
    nsa: Nsa, home: Path, sweep: Callable[..., list], monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
):
    with Store.open(f"sqlite:///{home / 'nsa.db'}") as store:
        store.apply_many(sweep("r1", laws={"chunked": 1.0}))
    sent: list[Sequence[str]] = []

    def submit(settings: Settings, spec: Path, overrides: Sequence[str], more: Sequence[str]) -> str:
        sent.append(more)
        return "raysubmit_1"

    monkeypatch.setattr(submission, "submit", submit)
    assert nsa("submit", str(READY_SPECS / "demo.yaml"), "--resume", "last", *options, "--no-wait").code == 0
    assert sent == [["--resume", "r1", *options]]
