"""Settings, workers and markers of all tests."""

import gc
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings

settings.register_profile("thorough", max_examples=2_500)  # make test-thorough: of four properties

# The suite is made for two cores, and more threads only fight over them: two for one process, one for each of three.
os.environ.setdefault("OMP_NUM_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else "2")

# A thread that waits for others sleeps: by default it spins, which costs those others the core that they need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

gc.disable()  # until the tests are collected: it would look at all that they import again and again

# Children keep our modules as bytecode: without, each of hundreds compiles them anew, 8 % of a driver's start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Clusters and clients of the tests share a token, and none is left in the developer's home.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

# Tests that run one after the other, each group in one worker: they start processes and have deadlines. Those with the
# marker `large` are a group, too. pytest-xdist's own marker cannot say it: 3.8's loadgroup does not reach pytest 9's
# node ids.
ON_CLUSTERS = (  # of Ray
    "tests/e2e/",
    "tests/orchestrator/cli/test_services.py",
)
IN_PROCESSES = (
    "tests/dashboard/test_browser.py",
    "tests/deploy/test_wheel.py",
    "tests/jobs/training/test_checkpoints.py",
    "tests/jobs/training/test_ranks.py",
    "tests/jobs/training/test_soak.py",
    "tests/jobs/training/test_token_data.py",
    "tests/jobs/process/",
    "tests/orchestrator/execute/",
    "tests/orchestrator/run/",
)
GROUPS = (ON_CLUSTERS, IN_PROCESSES, ("tests/nsa_core/kernels/test_aot.py",))  # the last: tests of one tracing


def _ray_folders() -> set[Path]:
    """Folders of local Ray clusters, whether of fixtures or of `nsa up`."""
    return set(Path(tempfile.gettempdir()).glob("nsa-ray-*"))


_RAY_FOLDERS_BEFORE = _ray_folders()


def _group(item: pytest.Item) -> str | None:
    """The name of a test's group; None if it may run beside any other."""
    if item.get_closest_marker("large"):
        return "large"
    return next((group[0] for group in GROUPS if item.nodeid.startswith(group)), None)


def pytest_collection_finish() -> None:
    """Look for garbage from now on, but not among what collecting has made, which stays."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where workers share the suite, tell the groups, and begin with what takes longest."""
    if (given := getattr(config, "workerinput", None)) is not None:  # a worker of xdist
        groups = {item.nodeid: group for item in items if (group := _group(item)) is not None}
        Path(given["groups"]).write_text(json.dumps(groups))
        items.sort(key=lambda item: not (item.nodeid in groups or item.get_closest_marker("long")))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where a Ray cluster's folder was left behind. One that a process names belongs to a session beside this."""
    if hasattr(session.config, "workerinput"):
        return
    deadline = time.monotonic() + 5  # in which that session may end
    while (left := _left_behind()) and time.monotonic() < deadline:
        time.sleep(0.5)
    if left and (terminal := session.config.pluginmanager.get_plugin("terminalreporter")):
        terminal.write_line(f"\nleft behind: {', '.join(map(str, sorted(left)))}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _left_behind() -> set[Path]:
    if not (new := _ray_folders() - _RAY_FOLDERS_BEFORE):
        return new
    named = "\n".join(" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
    return {folder for folder in new if str(folder) not in named}


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give a worker a file for its groups: it sends the scheduler the names of its tests alone, without markers."""
    folder = tempfile.TemporaryDirectory(prefix="nsa-groups-")
    node.config.add_cleanup(folder.cleanup)
    node.workerinput["groups"] = f"{folder.name}/groups.json"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A scheduler of groups and single tests, in the order of their collection."""
    if config.getoption("dist") != "loadscope":
        return None
    if missing := [name for group in GROUPS for name in group if not (config.rootpath / name).exists()]:
        raise pytest.UsageError(f"tests/conftest.py: GROUPS: there is no {', '.join(missing)}")
    from xdist.scheduler import LoadScopeScheduling

    class Grouped(LoadScopeScheduling):
        groups: Mapping[str, str] = {}  # by test, the same from each worker

        def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
            self.groups = json.loads(Path(node.workerinput["groups"]).read_text())
            super().add_node_collection(node, collection)

        def _split_scope(self, nodeid: str) -> str:
            return self.groups.get(nodeid, nodeid)

    return Grouped(config, log)


@pytest.fixture(autouse=True)
def _own_main(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamlit's AppTest leaves its script as `__main__`, which processes that are spawned later would run."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


@pytest.fixture(autouse=True)
def _no_outside_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own NSA_* settings must not reach the tests, nor the tests their database."""
    for name in list(os.environ):
        if name.startswith("NSA_") and name != "NSA_REQUIRE_BROWSER":
            monkeypatch.delenv(name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where a browser is required (CI), a browser test that was skipped has failed."""
    report = yield
    if report.skipped and item.get_closest_marker("browser") and os.environ.get("NSA_REQUIRE_BROWSER") == "1":
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, but NSA_REQUIRE_BROWSER=1: install Chromium"
    return report
