"""Checks of `nsa up` and `nsa down` before they act; tests/e2e/test_nsa.py starts real clusters."""

import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest
from processes import free_ports

from orchestrator.cli import services
from orchestrator.errors import UserError
from orchestrator.execute import ray_access, ray_http
from orchestrator.settings import Settings


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    ray, dashboard = free_ports(2)
    monkeypatch.setenv("HOME", str(tmp_path))  # for the token
    made = Settings(home=tmp_path, ray_dashboard=f"http://127.0.0.1:{ray}", dashboard_port=dashboard)
    yield made
    services.down(made)


def test_a_folder_stays_while_its_cluster_answers(settings: Settings) -> None:
    """As where the file with its process was lost; the folder of one that is gone goes with the next `down`."""
    folder = ray_access.folder_of_a_new_cluster(settings)
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as head:
        (folder / "ray_current_cluster").write_text(f"127.0.0.1:{head.getsockname()[1]}")
        assert services.down(settings) == []
        assert folder.exists()
    assert services.down(settings) == []
    assert not folder.parent.exists()


@pytest.mark.parametrize("field", ["ray_dashboard", "dashboard_port"])
def test_a_port_of_a_process_that_says_nothing_is_taken_and_nothing_started(settings: Settings, field: str) -> None:
    """It could begin to answer once Ray has failed to listen there, and be sent the token."""
    port = int(str(getattr(settings, field)).rpartition(":")[2])
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(UserError, match=rf":{port} is already in use.* NSA_RAY_DASHBOARD"),
    ):
        services.up(settings)
    assert services.down(settings) == []


class _Endless(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        with suppress(OSError):  # it was asked for no more
            while True:
                self.wfile.write(bytes(4096))


def test_of_an_answer_without_an_end_the_beginning_is_read() -> None:
    with HTTPServer(("127.0.0.1", 0), _Endless) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        code, text = ray_http.get(f"http://127.0.0.1:{server.server_port}/")
        thread.join()
    assert (code, len(text)) == (200, 4096)


class _Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"ok")


class _HealthyBelowNsa(_Healthy):
    def do_GET(self) -> None:
        if self.path == "/nsa/_stcore/health":
            super().do_GET()
        else:
            self.send_error(404)


def test_loopback_is_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_ports(1)[0]}")  # where nobody answers
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with HTTPServer(("127.0.0.1", 0), _Healthy) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert services.answers(f"http://127.0.0.1:{server.server_port}/_stcore/health", "ok")


def test_a_pid_given_to_another_process_is_not_ours(settings: Settings) -> None:
    record = settings.home / "ray.pid.json"
    record.write_text(json.dumps({"pid": os.getpid(), "started": -1e6}))
    assert services.local_services(settings)[0].pid is None
    assert services.down(settings) == []  # and this process is still alive
    assert record.exists(), "another host with the same home has it"


def test_a_clock_that_is_set_makes_no_service_another(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, booted = psutil.Process().create_time(), psutil.boot_time()
    record = settings.home / "ray.pid.json"
    record.write_text(json.dumps({"pid": os.getpid(), "started": begun - booted}))
    try:
        monkeypatch.setattr(psutil, "boot_time", lambda: booted + 5)  # both follow the wall clock
        monkeypatch.setattr(psutil.Process, "create_time", lambda self: begun + 5)
        assert services.local_services(settings)[0].pid == os.getpid()
    finally:
        record.unlink()  # or the fixture would end this process


def test_the_path_of_a_proxy_is_part_of_the_address(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMLIT_SERVER_BASE_URL_PATH", "/nsa/")
    with HTTPServer(("127.0.0.1", settings.dashboard_port), _HealthyBelowNsa) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        dashboard = services.local_services(settings)[1]
        assert dashboard.url.endswith(f":{settings.dashboard_port}/nsa")
        assert dashboard.healthy


def test_a_service_keeps_the_address_that_it_was_started_with(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its path comes from a variable, which another shell has not."""
    started = psutil.Process().create_time() - psutil.boot_time()
    url = f"http://127.0.0.1:{settings.dashboard_port}/nsa"
    record = settings.home / "dashboard.pid.json"
    record.write_text(json.dumps({"pid": os.getpid(), "started": started, "url": url}))
    try:
        assert services.local_services(settings)[1].url == url
    finally:
        record.unlink()  # or the fixture would end this process
    assert services.local_services(settings)[1].url == url.removesuffix("/nsa")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate")
def test_a_path_and_a_certificate_of_the_users_own_streamlit_are_part_of_the_address(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ["openssl", "req", "-x509", "-nodes", "-newkey", "rsa:2048", "-subj", "/CN=bench.example", "-keyout", "key"]
    subprocess.run([*made, "-out", "cert"], cwd=settings.home, check=True, capture_output=True)
    (settings.home / ".streamlit").mkdir()  # HOME is the same
    own = settings.home / ".streamlit" / "config.toml"
    own.write_text('[server]\nbaseUrlPath = "nsa"\nsslCertFile = "cert"\nsslKeyFile = "key"')
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(settings.home / "cert", settings.home / "key")
    with HTTPServer(("127.0.0.1", settings.dashboard_port), _HealthyBelowNsa) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.handle_request, daemon=True).start()
        dashboard = services.local_services(settings)[1]
        assert dashboard.url == f"https://127.0.0.1:{settings.dashboard_port}/nsa"
        assert dashboard.healthy
    for text, path in (("no TOML", ""), ("server = 5", ""), ('[server]\nbaseUrlPath = "/my nsa/"', "/my%20nsa")):
        own.write_text(text)
        assert services.local_services(settings)[1].url == f"http://127.0.0.1:{settings.dashboard_port}{path}"
    monkeypatch.setenv("STREAMLIT_SERVER_SSL_CERT_FILE", "cert")
    assert services.local_services(settings)[1].url.startswith("https://")


def test_a_host_that_is_not_this_one_is_named_before_anything_is_started(settings: Settings) -> None:
    with pytest.raises(UserError, match=r"^NSA_RAY_HOST: '192\.0\.2\.77': is no address of this host; name one"):
        services.up(settings.model_copy(update={"ray_host": "192.0.2.77"}))
    assert services.down(settings) == []


LISTEN = """
import socket, subprocess, sys
if sys.argv[1] == "child":
    sys.exit(subprocess.run([sys.executable, __file__, *sys.argv[2:]]).returncode)
listening = [socket.create_server((address, 0)) for address in sys.argv[1:]]
print(*(one.getsockname()[1] for one in listening), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[int, list[int]]]:
    """The number of a process, and the ports on which it (or its child) listens at the addresses of the parameter."""
    script = tmp_path / "listen.py"
    script.write_text(LISTEN)
    command = [sys.executable, script, *request.param]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process.pid, [int(port) for port in process.stdout.readline().split()]
        process.communicate()  # its input ends, and with it the process


@pytest.mark.parametrize("listener", [["0.0.0.0", "127.0.0.1"], ["child", "0.0.0.0", "127.0.0.1"]], indirect=True)
def test_a_port_of_all_addresses_is_told(settings: Settings, listener: tuple[int, list[int]]) -> None:
    pid, (everywhere, _) = listener
    told = f"Ray listens on other addresses than loopback (ports {everywhere})"
    assert services.exposures(settings, pid) == [(told, "nsa down; nsa up")]
