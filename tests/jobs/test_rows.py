"""Implementations that pass the check before they are timed and are wrong in the timed call end with the reason."""

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from travelling import CPU, H200, HEADS, NSA, QUICK, measured, values_of

from jobs import estimate
from jobs.measure import check
from jobs.measure.check import WrongResult
from jobs.measure.passes import lowest_ms
from jobs.scaling import Spec
from jobs.specs.kinds import kind_module
from nsa_core.backends import chunked, gather

LENGTH = 512  # longer than what is checked before
Branch = Callable[..., torch.Tensor]


def _case(implementation: str = "gather", **changes: Any) -> Any:
    fields = {"implementations": [implementation], "shape": HEADS, "lengths": [LENGTH], "timing": QUICK}
    fields |= {} if implementation == "dense" else {"nsa": NSA}
    return Spec.model_validate({"kind": "scaling", "name": "t", "batch": 2} | fields | changes)


def _impostor(monkeypatch: pytest.MonkeyPatch, change: Callable[[str, Branch], Branch]) -> None:
    """Replace the backend "gather" by the chunked one, each part changed at lengths that are timed."""

    def of(what: str) -> Branch:
        real = getattr(chunked, what)
        wrong = change(what, real)
        return lambda q, *rest: wrong(q, *rest) if q.shape[1] == LENGTH else real(q, *rest)

    for what in ("compressed", "selected", "window", "select"):
        monkeypatch.setattr(gather, what, of(what))
    check.check_attention.cache_clear()


def right_for_short_sequences_only(what: str, real: Branch) -> Branch:
    return real if what == "select" else lambda q, *rest: real(q, *rest) * 0


def replays_its_first_result(what: str, real: Branch) -> Branch:
    first: list[torch.Tensor] = []

    def replay(*arguments: Any) -> torch.Tensor:
        if what == "select":
            return real(*arguments)
        first[:] = first or [real(*arguments)]
        return first[0].clone()  # the sum of branches adds to it

    return replay


def right_in_its_first_call_only(what: str, real: Branch) -> Branch:
    calls = []

    def tired(*arguments: Any) -> torch.Tensor:
        calls.append(what)
        return real(*arguments) * (1 if what == "select" or len(calls) < 2 else 0)

    return tired


def chooses_other_blocks(what: str, real: Branch) -> Branch:
    return (lambda *arguments: real(*arguments).roll(1, 1)) if what == "select" else real


def gives_no_gradient(what: str, real: Branch) -> Branch:
    return (lambda q, *rest: real(q.detach(), *rest)) if what == "window" else real


@pytest.mark.parametrize(
    ("impostor", "pass_", "reason"),
    [
        (right_for_short_sequences_only, "forward", "output is off by"),
        (replays_its_first_result, "forward", "output is off by"),
        (right_in_its_first_call_only, "forward", "output is off by"),
        (chooses_other_blocks, "forward", r"row \d+ of 512 selects blocks"),
        (gives_no_gradient, "forward+backward", "gradient of q is off by"),
    ],
)
def test_an_impostor_is_found_in_the_timed_call(
    monkeypatch: pytest.MonkeyPatch, impostor: Callable[[str, Branch], Branch], pass_: str, reason: str
) -> None:
    _impostor(monkeypatch, impostor)
    (point,) = _case(passes=[pass_]).points(CPU)
    with pytest.raises(WrongResult, match=rf"^gather: {reason}"):
        measured(point)


@pytest.mark.parametrize("kind", ["scaling", "estimate", "train"])
def test_attention_that_is_wrong_at_a_models_length_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _impostor(monkeypatch, right_for_short_sequences_only)
    spec: dict[str, Any] = {"kind": kind, "name": "t", "device": "cpu", "preset": "tiny", "batch": 2}
    if kind == "train":
        spec |= {"backend": "gather", "seq_len": LENGTH, "steps": 5, "optimizer": {"warmup_steps": 1}}
    else:
        spec |= {"implementations": ["gather"], "lengths": [LENGTH], "passes": ["forward+backward"]}
        spec |= {"workload": "model"} if kind == "scaling" else {}
    monkeypatch.setattr(estimate, "predicts", lambda name: True)
    with pytest.raises(WrongResult, match=rf"^gather: .* is off by .* rows of q \(2, {LENGTH}, "):
        measured(kind_module(kind).Spec.model_validate(spec).points(CPU)[0])


def test_a_clock_that_is_replaced_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.perf_counter

    def slowed(what: str, part: Branch) -> Branch:
        def slow(*arguments: Any) -> torch.Tensor:
            monkeypatch.setattr(time, "perf_counter", lambda: real() / 1000)
            return part(*arguments)

        return slow

    _impostor(monkeypatch, slowed)
    (point,) = _case(passes=["forward"]).points(CPU)
    with pytest.raises(WrongResult, match=r"^gather: replaced the process's clock, time\.perf_counter$"):
        measured(point)


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize(("implementation", "dtype"), [("chunked", "float32"), ("dense", "bfloat16")])
def test_what_is_right_is_found_so_with_its_error(implementation: str, dtype: str, kv_heads: int) -> None:
    shape = {**HEADS, "kv_heads": kv_heads}  # as many kv heads as query heads, too
    for point in _case(implementation, dtype=dtype, lengths=[200], shape=shape).points(CPU):
        found = values_of(measured(point))
        assert 0 < found["rows_error"] <= found["rows_error_bound"] <= check.CEILING[getattr(torch, dtype)]


def test_a_card_needs_a_least_time() -> None:
    spec = Spec.model_validate(
        {"kind": "scaling", "name": "t", "implementations": ["triton", "dense"], "dtype": "bfloat16", "batch": 1}
        | {"shape": {"query_heads": 32, "kv_heads": 8, "head_dim": 128}, "lengths": [65536], "device": "cuda"}
    )
    triton, dense, *both = (lowest_ms(point.case, 989.4e12, 4.8e12) for point in spec.points(H200))
    assert 3 * dense == pytest.approx(both[1]) == pytest.approx(12e3 * 32 * 128 * 65536**2 / 2 / 989.4e12, rel=0.01)
    assert 5 < both[0] < 18.5, "42 ms are measured"
    assert 3 * triton == pytest.approx(both[0])


@pytest.mark.parametrize(
    ("chosen", "alike"),
    [
        ([0, 2, 5, -1], True),
        ([0, 3, 5, -1], True),  # ranks 0.5 and 0.4999
        ([0, 1, 5, -1], False),  # ranks 0.5 and 0.4
        ([2, 3, 5, -1], False),  # without a forced block
        ([0, 2, 6, -1], False),  # after the query
        ([0, 2, 2, 5], False),
        ([0, 5, 2, -1], False),
        ([0, 5, -1, -1], False),
    ],
)
def test_a_choice_may_differ_from_the_best_where_ranks_are_tied(chosen: list[int], alike: bool) -> None:
    ranks = [math.inf, 0.4, 0.5, 0.4999, 0.1, math.inf, -1.0]
    assert check.chooses_alike(chosen, [0, 2, 5, -1], ranks, tie=1e-3) is alike
