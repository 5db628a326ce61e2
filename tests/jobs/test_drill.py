"""The drill kind within one process; tests/orchestrator tests the states that points end in."""

from __future__ import annotations

from jobs.drill import Behaviour, Case, Spec, measure
from jobs.schema.point import Machine

CPU = Machine("cpu", "test processor", 2**30)


def _case(behaviour: Behaviour) -> Case:
    return Case(behaviour=behaviour, number=1, slow_s=0.4, device="cpu")


def test_slow_shows_progress_and_ends_well() -> None:
    beats: list[str] = []
    result = measure(_case("slow"), lambda phase, done=0, total=0: beats.append(phase))
    assert result.metrics[0].value >= 0.4
    assert beats.count("working slowly") == 2


def test_failures_of_a_gpu_are_skipped_without_one() -> None:
    spec = Spec(kind="drill", name="t", behaviours=["spin", "fill", "assert", "ok"])
    assert [point.skip_reason is not None for point in spec.points(CPU)] == [True, True, True, False]
    gpu = Machine("cuda", "test card", 2**37)
    assert not any(point.skip_reason for point in spec.points(gpu))
    assert spec.points(CPU)[0].skip_reason == "spin is a failure of a GPU; give device: cuda"
