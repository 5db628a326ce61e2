"""The kinds profile and capacity, on small models."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs import capacity, profile
from jobs.capacity import NothingFits, search
from jobs.point import Machine, Measurement, Point

CPU = Machine("cpu", "test processor", 8 * 2**30)


def _quiet(phase: str, done: int = 0, total: int = 0) -> None:
    pass


def _values(result: Measurement) -> dict[str, float]:
    return {metric.name: metric.value for metric in result.metrics}


def _travelled(point: Point) -> dict[str, Any]:
    return json.loads(json.dumps(point.config))


def test_a_profile_keeps_tables_and_a_trace_with_the_branches() -> None:
    timing = {"repeats": 2, "min_s": 0, "max_s": 2, "warmup": 1}
    data: dict[str, Any] = {"kind": "profile", "name": "t", "preset": "tiny", "implementations": ["chunked"]}
    spec = profile.Spec.model_validate(
        data | {"passes": ["forward+backward"], "lengths": [64], "timing": timing},
    )
    (point,) = spec.points(CPU)
    result = profile.measure(_travelled(point), _quiet)
    values = _values(result)
    assert values["busy_time"] > 0
    assert {"range_cmp", "range_slc", "range_win"} <= set(values)
    assert "aten::" in str(result.files["by_time.txt"])
    trace = Path(result.files["trace.json.gz"])
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"nsa_core.cmp", "nsa_core.slc", "nsa_core.win"} <= names


@pytest.mark.parametrize("guess", range(5))
@pytest.mark.parametrize("last", [None, 0, 2, 4])
def test_the_search_ends_at_the_last_that_fits(guess: int, last: int | None) -> None:
    tried: list[int] = []

    def fits(place: int) -> bool:
        tried.append(place)
        return last is not None and place <= last

    assert search(fits, 5, guess) == last
    assert len(tried) == len(set(tried))
    if last is not None and last < 4:
        assert last + 1 in tried  # shown to fail


def _capacity(monkeypatch: pytest.MonkeyPatch, train: Callable[[Any], Any], **changes: Any) -> dict[str, float]:
    data: dict[str, Any] = {"kind": "capacity", "name": "t", "preset": "tiny", "implementations": ["dense"]}
    spec = capacity.Spec.model_validate(data | {"lengths": [32, 64, 128], "checkpointing": [False]} | changes)
    (point,) = spec.points(CPU)
    monkeypatch.setattr(capacity, "_train", train)
    return _values(capacity.measure(_travelled(point), _quiet))


def test_capacity_shows_the_next_longer_one_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    real = capacity._train

    def scarce(config: Any) -> Any:
        if config["seq_len"] > 64:
            raise MemoryError
        return real(config)

    found = _capacity(monkeypatch, scarce)
    assert (found["longest"], found["longest_predicted"], found["shortest_failed"]) == (64, 128, 128)
    assert found["throughput"] > 0
    assert found["peak_memory"] > 0


def test_capacity_of_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce(config: Any) -> Any:
        raise MemoryError

    with pytest.raises(NothingFits, match="lengths: 32: the shortest runs out of memory"):
        _capacity(monkeypatch, scarce)
