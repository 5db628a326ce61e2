"""Ray's job server refuses, or goes away in the middle: one line, whatever its client raises."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from nsa_command import Nsa
from ray.dashboard.modules.version import CURRENT_VERSION

from orchestrator.cli import submission
from orchestrator.cli.submission import SubmissionError, Submitted
from orchestrator.gates.rules import READY_SPECS
from orchestrator.run.upload import Upload
from orchestrator.settings import Settings
from orchestrator.store import Store


class _Server(BaseHTTPRequestHandler):
    """A job server that knows no job, and hangs up on who asks for the job "gone"."""

    def do_GET(self) -> None:
        if "/gone" in self.path:
            self.connection.close()
        elif self.path == "/api/version":
            self._say(200, json.dumps({"version": CURRENT_VERSION, "ray_version": "2.60.0", "ray_commit": ""}))
        else:
            self._say(404, "Job does not exist\nTraceback")

    do_POST = do_PUT = do_GET  # noqa: N815

    def _say(self, code: int, text: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def settings() -> Iterator[Settings]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Server) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield Settings(ray_dashboard=f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("job", ["raysubmit_1", "gone"])
@pytest.mark.parametrize(
    "ask", [lambda *of: list(submission.follow(*of)), submission.log, submission.job_status, submission.stop]
)
def test_a_job_that_the_cluster_does_not_know_is_told(settings: Settings, ask: Callable, job: str):
    with pytest.raises(SubmissionError, match=rf"^job: '{job}': .*; `ray job list` lists the jobs$") as caught:
        ask(settings, job)
    assert "\n" not in str(caught.value)


def test_a_job_that_is_not_taken_is_told(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(submission, "load_spec", lambda *_: None)
    monkeypatch.setattr(submission, "collect", lambda *_: Upload({}, "spec.yaml"))
    with pytest.raises(SubmissionError, match=r"^NSA_RAY_DASHBOARD: 'http.*': did not take the job: .*`nsa status`$"):
        submission.submit(settings, Path("spec.yaml"))


@pytest.mark.parametrize("options", [(), ("--retry-failed",)])
def test_a_resume_reaches_the_job_with_the_runs_whole_id(
    nsa: Nsa, home: Path, sweep: Callable[..., list], monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
):
    with Store.open(f"sqlite:///{home / 'nsa.db'}") as store:
        store.apply_many(sweep("r1", laws={"chunked": 1.0}))
    sent: list[Sequence[str]] = []

    def submit(settings: Settings, spec: Path, overrides: Sequence[str], more: Sequence[str]) -> Submitted:
        sent.append(more)
        return Submitted("raysubmit_1", 0)

    monkeypatch.setattr(submission, "submit", submit)
    assert nsa("submit", str(READY_SPECS / "demo.yaml"), "--resume", "last", *options, "--no-wait").code == 0
    assert sent == [["--resume", "r1", *options]]
