"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest

# The suite is made for two cores, and more threads only fight over them: two for one process, one for each of two.
os.environ.setdefault("OMP_NUM_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else "2")

HERE = Path(__file__).parent
# Tests that start processes and have deadlines run one after the other, in one worker: by mark, and by folder.
ALONE = ("ray", "browser")
ALONE_IN = (HERE / "orchestrator" / "attempt", HERE / "orchestrator" / "run")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", default="1/1", metavar="I/N", help="run every N-th test only, from the I-th on")


@pytest.hookimpl(wrapper=True)  # so that it comes before xdist's own, which reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    """Keep this process's share; where workers share the suite, begin with what takes longest."""
    share, shares = map(int, config.getoption("--share").split("/"))
    items[:] = items[share - 1 :: shares]
    if hasattr(config, "workerinput"):  # of xdist's workers
        _group(items)
    yield


def _group(items: list[pytest.Item]) -> None:
    for item in items:
        if any(map(item.get_closest_marker, ALONE)) or any(map(item.path.is_relative_to, ALONE_IN)):
            item.add_marker(pytest.mark.xdist_group("alone"))
    items.sort(key=lambda item: not any(map(item.get_closest_marker, ("xdist_group", "long"))))


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
