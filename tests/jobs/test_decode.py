"""The decode kind, with real measurements of small cases."""

from typing import Any

import pytest
import torch
from travelling import CPU, HEADS, NSA, QUICK, measured, values_of

from jobs import decode
from jobs.decode import Spec, bytes_read
from jobs.measure.check import WrongResult
from nsa_core import NSAConfig
from nsa_core.model import PRESETS


def _spec(**changes: Any) -> Spec:
    data: dict[str, Any] = {"kind": "decode", "name": "t", "implementations": ["chunked", "dense"], "lengths": [64]}
    data |= {"batch": 2, "layers": 3, "shape": HEADS, "nsa": NSA, "timing": QUICK} | changes
    if data["implementations"] == ["dense"] and "nsa" not in changes:
        del data["nsa"]  # which would change nothing
    return Spec.model_validate(data)


@pytest.mark.parametrize("length", [1, 64, 101])
@pytest.mark.parametrize("implementation", ["chunked", "dense"])
def test_a_point_brings_time_bytes_agreement_and_its_route(implementation: str, length: int) -> None:
    result = measured(_spec(implementations=[implementation], lengths=[length]).points(CPU)[0])
    found = values_of(result)
    samples = {metric.name: metric.samples for metric in result.metrics}
    assert samples["throughput"] == pytest.approx([2 / ms * 1000 for ms in samples["time"]])
    assert found["bytes_read"] > 0
    assert 0 <= found["oracle_error"] <= found["oracle_error_bound"] < 1e-4
    assert 0 <= found["rows_error"] <= found["rows_error_bound"] < 1e-4
    sparse = {"select", "slc", "win", *(["cmp"] if length >= 8 else [])}
    assert set(result.route) == ({"dense"} if implementation == "dense" else sparse)
    assert "eager" in next(metric.method for metric in result.metrics if metric.name == "time")


@pytest.mark.parametrize("implementation", ["chunked", "dense"])
def test_every_step_sees_the_same_context(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The context stays the point's, however many steps are timed."""
    held: list[int] = []
    step = decode._step

    def watched(case: Any, token: Any, cache: Any) -> torch.Tensor:
        out = step(case, token, cache)
        held.append(cache.length)
        return out

    monkeypatch.setattr(decode, "_step", watched)
    timing = {"repeats": 20, "min_s": 0, "max_s": 2, "warmup": 1}
    measured(_spec(implementations=[implementation], lengths=[77], timing=timing).points(CPU)[0])
    assert held.count(77) >= 20 * 3  # beside the few steps of the check
    assert set(held[-60:]) == {77}


def test_bytes_are_those_of_the_tokens_read() -> None:
    """Counted by hand for the shape of the acceptance test: 64K tokens, 8 sequences, 12 layers, bf16."""
    model, rows = PRESETS["m7c_125m"], 8 * 12 * 2
    dense = bytes_read(model.__class__(**{**vars(model), "attention": "dense"}), 8, 65_536, 2)
    assert dense == rows * 65_536 * 256
    seen, scores = (65_536 - 32) // 16 + 1, 4 * 6 * ((65_536 - 32) // 16 + 1)
    sparse = bytes_read(model, 8, 65_536, 2)
    assert sparse == rows * ((seen + 16 * 64 + 512 + 2) * 256 + scores)
    assert dense / sparse > 10


@pytest.mark.parametrize("workload", ["attention", "model"])
@pytest.mark.parametrize("implementation", ["chunked", "dense"])
def test_a_step_that_is_right_in_small_caches_only_is_found(
    implementation: str, workload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def impostor(case: Any, token: dict[str, torch.Tensor], cache: Any) -> torch.Tensor:
        return right(case, token, cache) * (0.9 if cache.length > 1500 else 1)

    right = decode._step
    monkeypatch.setattr(decode, "_step", impostor)
    changes = {"workload": "model", "preset": "tiny", "shape": None, "nsa": None} if workload == "model" else {}
    (point,) = _spec(implementations=[implementation], lengths=[2000], layers=1, **changes).points(CPU)
    with pytest.raises(WrongResult, match=rf"^{implementation}: output of sequence \d, kv head \d is off by.* S=2000"):
        measured(point)


def test_a_step_that_replays_its_first_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def replay(case: Any, token: dict[str, torch.Tensor], cache: Any) -> torch.Tensor:
        length = cache.length
        return first.setdefault(length, right(case, token, cache))

    right, first = decode._step, dict[int, torch.Tensor]()
    monkeypatch.setattr(decode, "_step", replay)
    with pytest.raises(WrongResult, match=r"^chunked: output of sequence \d, kv head \d is off by"):
        measured(_spec(implementations=["chunked"], lengths=[500], layers=1).points(CPU)[0])


def test_choices_of_blocks_that_tie_are_all_right() -> None:
    config = NSAConfig(cmp_block=1, cmp_stride=1, slc_block=1, slc_count=4, init_blocks=1, local_blocks=1)
    keys = torch.tensor([0, 3, 1, 2, 2.0001, 1, 0]).log1p().view(1, 7, 1, 1).expand(1, 7, 1, 4)  # two tie
    chosen = decode._choices(config, torch.full((1, 1, 1, 4), 0.5), keys, 6)
    assert [blocks.flatten().tolist() for blocks in chosen] == [[0, 1, 3, 6], [0, 1, 4, 6]]
