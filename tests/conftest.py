"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

# Two threads: the suite is made for two cores, and more only fight over them.
os.environ.setdefault("OMP_NUM_THREADS", "2")


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
