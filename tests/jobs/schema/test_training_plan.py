"""The arithmetic of a planned training run, and which stated throughputs agree with it."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from jobs.schema.training_plan import TrainingPlan, mode_of

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
