"""The bench kind: its points, real measurements on the CPU, and stages from hand-made profiles."""

from __future__ import annotations

import pytest

from jobs.bench import Kernel, ProfileError, by_stage, summarize_stages
from nsa_core.kernels.runtime.launch import Started


def _launches(*kernels: str, stage: str = "merge") -> list[Started]:
    return [Started(kernel, stage, {}) for kernel in kernels]


def test_kernels_are_told_apart_by_the_order_of_their_launches() -> None:
    launches = [
        *_launches("_span_backward_kv", stage="compressed_backward_kv"),
        *_launches("_new", stage="new"),
        *_launches("_span_backward_kv", stage="window_backward_kv"),
    ]
    kernels = [
        Kernel("_span_backward_kv", start=50, duration=7),  # the profiler's order is not the device's
        Kernel("sort<int>", start=20, duration=3),
        Kernel("_span_backward_kv", start=10, duration=5),
        Kernel("_new", start=30, duration=2),
    ]
    assert by_stage(kernels, launches) == {
        ("compressed_backward_kv", "_span_backward_kv"): 5,
        ("other", "sort<int>"): 3,
        ("new", "_new"): 2,
        ("window_backward_kv", "_span_backward_kv"): 7,
    }


@pytest.mark.parametrize(
    ("seen", "launched", "message"),
    [
        ([], [], "none of the project's kernels ran"),
        (["_merge"], ["_merge", "_merge"], "lacks launches of _merge"),
        (["_merge", "_merge"], ["_merge"], "has _merge more often"),
    ],
)
def test_an_incomplete_profile_is_refused(seen: list[str], launched: list[str], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        by_stage([Kernel(name, i, 1) for i, name in enumerate(seen)], _launches(*launched))


def test_stages_are_medians_longest_first() -> None:
    profiles = [
        by_stage([Kernel("_merge", 0, gate * 10**6), Kernel("fill", 1, 10**6)], _launches("_merge"))
        for gate in (3, 9, 5)
    ]
    (merge, other), text = summarize_stages(profiles)
    assert (merge.name, merge.unit, merge.value, merge.samples) == ("stage_merge", "ms", 5.0, (3.0, 9.0, 5.0))
    assert (other.name, other.value) == ("stage_other", 1.0)
    assert "5.0000 ms  merge" in text
