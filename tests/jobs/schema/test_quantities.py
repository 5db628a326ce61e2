"""Values of quantities as texts, and the arithmetic of a planned training run."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from jobs.schema.quantities import Quantities, in_words, readable, readable_interval
from jobs.schema.training_plan import TrainingPlan, mode_of


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (264447.3, "tok/s", "264,447 tok/s"),
        (999.96, "1", "1000"),
        (0.123456, "ms", "0.1235 ms"),
        (0.215124, "h", "12.9 min"),
        (1.303361, "h", "1 h 18 min"),
        (1234.5, "h", "1,234 h"),
        (math.inf, "h", "inf h"),
        (150.0, "min", "2 h 30 min"),
        (8.00886, "s", "8.009 s"),
        (0.0005634, "s", "0.563 ms"),
        (12_345.0, "ms", "12.3 s"),
        (35.0, "C", "35 °C"),
        (262144.0, "token", "262,144 tokens"),
        (1.0, "token", "1 token"),
    ],
)
def test_values_are_written_to_be_read(value: float, unit: str, text: str) -> None:
    assert readable(value, unit) == text


def test_an_interval_has_its_unit_once_and_few_samples_have_a_range() -> None:
    assert readable_interval(15.48, 15.49, None, "ms") == "15.48 – 15.49 ms"
    assert readable_interval(0.9, 1.1, None, "h", to=" .. ") == "54 min .. 1 h 06 min"
    assert readable_interval(math.nan, math.nan, [2, 1, 3], "1") == "range 1 – 3"
    assert not readable_interval(None, None, [1.0] * 9, "ms")


def test_names_keep_their_acronyms() -> None:
    assert in_words("gpu_sm_clock") == "GPU SM clock"
    assert in_words("eta") == "ETA"
    assert in_words("not-slower-than-dense") == "Not slower than dense"
    assert Quantities().of("mfu").title == "MFU"


PLAN = {"steps": 50_000, "tokens_per_step": 4096, "hours": 24.0}  # needs 2,370.4 tok/s


@pytest.mark.parametrize(("stated", "agrees"), [(2340.0, False), (2350.0, True), (2720.0, True), (2740.0, False)])
def test_a_stated_throughput_may_be_rounded_down_or_have_headroom(stated: float, agrees: bool) -> None:
    if agrees:
        assert TrainingPlan.model_validate({**PLAN, "tokens_per_second": stated}).tokens_per_second == stated
    else:
        with pytest.raises(ValidationError, match="contradicts 50,000 steps of 4,096 tokens in 24 h"):
            TrainingPlan.model_validate({**PLAN, "tokens_per_second": stated})


def test_either_fix_that_a_contradiction_names_mends_it() -> None:
    with pytest.raises(ValidationError) as caught:
        TrainingPlan.model_validate({**PLAN, "tokens_per_second": 50.0})
    fix = str(caught.value).split("set tokens_per_second to ")[1].split(" [")[0]
    throughput, hours = (float(number) for number in fix.split(", or hours to "))
    for mended in ({"tokens_per_second": throughput}, {"tokens_per_second": 50.0, "hours": hours}):
        TrainingPlan.model_validate({**PLAN, **mended})


def test_only_a_training_on_packed_documents_has_that_axis() -> None:
    config = {"model": {}, "steps": 9, "batch": 1}
    whole = mode_of({**config, "data": {"pack": False}})
    assert whole == mode_of(config)
    assert mode_of({**config, "data": {"pack": True}}) == {**whole, "pack": "on"}
