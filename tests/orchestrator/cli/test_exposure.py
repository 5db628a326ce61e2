"""Who else reaches the cluster: addresses on which a real process and its children listen."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.cli.exposure import exposures
from orchestrator.settings import Settings, load_settings

LISTEN = """
import socket, subprocess, sys
if sys.argv[1] == "child":
    sys.exit(subprocess.run([sys.executable, __file__, *sys.argv[2:]]).returncode)
listening = [socket.create_server((address, 0)) for address in sys.argv[1:]]
print(*(one.getsockname()[1] for one in listening), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("NSA_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))  # for the token
    monkeypatch.setenv("NSA_RAY_DASHBOARD", "http://127.0.0.1:1")  # nothing answers there
    return load_settings()


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
    (found,) = exposures(settings, pid)
    assert found.what == f"Ray listens on other addresses than loopback (ports {everywhere})"
    assert found.fix == "nsa down; nsa up"


@pytest.mark.parametrize("listener", [["0.0.0.0"]], indirect=True)
def test_of_a_cluster_on_a_named_address_it_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, listener: tuple[int, list[int]]
) -> None:
    """Starting it again would open the same ports."""
    monkeypatch.setenv("NSA_RAY_HOST", "192.0.2.7")
    (found,) = exposures(load_settings(), listener[0])
    assert found.fix == "let only the cluster's hosts through a firewall"


@pytest.mark.parametrize("listener", [["127.0.0.1", "127.0.0.2"]], indirect=True)
def test_ports_of_loopback_are_not(settings: Settings, listener: tuple[int, list[int]]) -> None:
    pid, _ = listener
    assert exposures(settings, pid) == []


def test_of_a_process_that_is_gone_nothing_is_told(settings: Settings) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    assert exposures(settings, process.pid) == []
