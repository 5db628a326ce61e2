"""The Submit page beside a stand-in for Ray that asks for a token."""

import json
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from dashboard_pages import check, show, text

SPEC = "kind: drill\nname: mine\nbehaviours: [ok, skip]\ndevice: cpu\n"


@pytest.fixture(params=["secret", None, "busy"], ids=["with token", "without", "no answer without"])
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str | None]:
    """The token of a cluster at NSA_RAY_DASHBOARD; None: it asks for none, or does not say whether it does."""

    class Ray(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            open_to_all, mode = request.param is None, self.path == "/api/authentication_mode"
            taken = mode or open_to_all or self.headers["Authorization"] == f"Bearer {request.param}"
            self.send_response(503 if mode and request.param == "busy" else 200 if taken else 401)
            self.end_headers()
            named = {"authentication_mode": "disabled" if open_to_all else "token"}
            self.wfile.write(json.dumps(named if mode else []).encode())

        def log_message(self, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Ray) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("NSA_RAY_DASHBOARD", f"http://127.0.0.1:{server.server_port}")
        yield request.param if request.param == "secret" else None
        server.shutdown()


def test_it_submits_with_the_typed_token_what_a_dry_run_accepted(
    database: str, cluster: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")  # that of who started the dashboard, which is not used
    app = show("submit", spec="drill.yaml")
    assert "nsa submit jobs/configs/drill.yaml" in text(app)
    assert "Reading needs no token" in text(app)
    assert not app.button, "a reader without a token"
    for token, refused in (("wrong", True), ("secret", cluster is None)):
        app.text_input[0].set_value(token).run()
        assert ("does not take" in text(app) or "asks for no token" in text(app)) is refused
        assert bool(check(app).button) is not refused
    if cluster is None:
        return
    app.text_area[0].set_value(SPEC).run()
    app.text_input[1].set_value("Ada").run()
    dry, submit = app.button
    assert submit.disabled
    dry.click().run()
    assert "mine (drill): 2 points on cpu" in text(check(app))
    calls = []

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess:
        calls.append((command[-1], env["RAY_AUTH_TOKEN"], env["NSA_PERSON"]))
        return subprocess.CompletedProcess(command, 0, "submitted raysubmit_1", "")

    monkeypatch.setattr(subprocess, "run", run)
    app.button[1].click().run()
    assert "submitted raysubmit_1" in text(check(app))
    assert calls == [("--no-wait", "secret", "Ada")]
    assert app.button[1].disabled, "once"
