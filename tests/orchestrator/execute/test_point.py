"""The process of a point: what it makes of its measurement, and of SIGTERM before it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from jobs.process.child import Channel
from jobs.process.messages import MeasurePoint
from jobs.schema.point import Interrupted
from orchestrator.execute import point
from orchestrator.execute.point import measure_point


@pytest.fixture
def channel() -> Iterator[Channel]:
    fd = os.open(os.devnull, os.O_WRONLY)
    yield Channel(fd)
    os.close(fd)


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("value = float('nan')", ValueError, "metric time is not finite"),
        ("beat.sample(1, {'lost': 1.0})", ValueError, "series lost: is not declared by this name"),
    ],
)
@pytest.mark.usefixtures("snippet_kind")
def test_a_measurement_that_is_not_as_declared_is_an_error(
    channel: Channel, code: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        measure_point(MeasurePoint("snippet", {"code": code}, "cpu"), channel)


def test_sigterm_while_a_point_is_prepared_cancels_it(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[object] = []

    def imported(_name: str) -> SimpleNamespace:
        signal.raise_signal(signal.SIGTERM)
        return SimpleNamespace(QUANTITIES=(), measure=measured.append)

    monkeypatch.setattr(point, "kind_module", imported)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with pytest.raises(Interrupted, match="SIGTERM came before the measurement had begun: nsa submit SPEC"):
            measure_point(MeasurePoint("snippet", {}, "cpu"), channel)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert measured == []
