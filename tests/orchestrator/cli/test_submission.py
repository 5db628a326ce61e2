"""Ray's job server refuses, or goes away in the middle: one line, whatever its client raises."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from types import SimpleNamespace

import pytest
from nsa_command import Nsa

from orchestrator.cli import services, submission
from orchestrator.cli.submission import SubmissionError
from orchestrator.execute.upload import Upload
from orchestrator.judge.rules import READY_SPECS
from orchestrator.settings import Settings
from orchestrator.store import Store


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
        assert services.asks_for_token(settings)
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
