"""Branches of stages, their shares at each length, and where the compressed branch takes over."""

import math
import re
from importlib.util import find_spec

import pandas as pd
import pytest

from nsa_core import NSAConfig
from orchestrator.judge.analysis import series_columns
from orchestrator.judge.branches import Branch, branch_of, branch_shares, take_overs

LENGTHS = (8192, 16_384, 32_768, 65_536, 131_072)
# Milliseconds of docs/results/bench.md: one H200, forward+backward, 12/2 heads of 64, 32,768 tokens or one sequence.
H200 = {
    "compressed_backward_kv": (0.154, 0.285, 0.461, 1.55, 6.09),
    "compressed_window_forced_backward_q": (0.328, 0.401, 0.543, 1.51, 4.88),
    "compressed_window_forced": (0.369, 0.428, 0.543, 1.52, 4.77),
    "scores": (0.067, 0.120, 0.220, 0.830, 3.23),
    "selected_backward": (0.557, 0.612, 0.641, 1.19, 2.34),
    "selected": (0.357, 0.377, 0.403, 0.770, 1.61),
    "window_forced_backward_kv": (0.292, 0.272, 0.275, 0.538, 1.06),
    "merge": (0.227, 0.248, 0.251, 0.474, 0.899),
    "topk": (0.055, 0.066, 0.084, 0.234, 0.805),
    "merge_backward": (0.171, 0.186, 0.193, 0.366, 0.713),
    "gates_backward": (0.070, 0.070, 0.071, 0.134, 0.261),
    "sum_items_backward": (0.058, 0.077, 0.080, 0.108, 0.182),
    "other": (0.052, 0.057, 0.059, 0.089, 0.144),
}


def rows(stages: dict[str, tuple[float, ...]], lengths: tuple[int, ...] = LENGTHS, heads: int = 12) -> pd.DataFrame:
    """Rows of v_metrics: the stages of calls of 32,768 tokens, or of one sequence; a point per length."""
    found = [
        {"run_id": "r", "implementation": "triton", "pass": "forward+backward", "query_heads": heads}
        | {"seq_len": length, "batch": max(1, 32_768 // length), "point_id": f"r/{heads}/{place}"}
        | {"metric": f"stage_{stage}", "unit": "ms", "value": times[place]}
        for stage, times in stages.items()
        for place, length in enumerate(lengths)
        if not math.isnan(times[place])
    ]
    frame = pd.DataFrame(found)
    return frame.assign(**{name: None for name in series_columns(frame.columns) if name not in frame})


def per_call(exponent: float, at_32k: float, lengths: tuple[int, ...] = LENGTHS) -> tuple[float, ...]:
    """Milliseconds of calls whose time per sequence grows with this exponent."""
    return tuple(at_32k * (length / 32_768) ** exponent * max(1, 32_768 // length) for length in lengths)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("compresses", [True, False])
def test_every_stage_that_the_operator_launches_has_a_branch(arch: int, compresses: bool):
    """The launches of forward and backward tell their stages themselves: a new or renamed one must be declared."""
    import torch

    from nsa_core.kernels import operators
    from nsa_core.kernels.runtime.launch import record
    from nsa_core.kernels.runtime.tiles import assume

    def made(heads: int, dim: int) -> torch.Tensor:
        return torch.empty(1, 8192, heads, dim, dtype=torch.bfloat16, device="meta", requires_grad=True)

    with assume(arch), record() as launches:
        call = operators.Call(NSAConfig(), ("cmp", "slc", "win"), 0, 0.125, shared=compresses, compresses=compresses)
        q, gates, given = made(12, 64), made(12, 3), [(made(2, 64), made(2, 64)) for _ in range(1 if compresses else 3)]
        pairs = given * 2 if compresses else [operators.compress(*given[0], call.config), *given[1:]]
        out = operators.attend(q, gates, None, pairs, call)
        torch.autograd.grad(out, [q, gates, *(x for pair in given for x in pair)], torch.empty_like(out))
    stages = {launch.stage for launch in launches}
    found = {branch_of(stage) for stage in stages}
    assert {stage for stage in stages if branch_of(stage) is Branch.OTHER} == set()
    assert {Branch.COMPRESSED, Branch.SELECTED, Branch.WINDOW, Branch.REST} <= found
    assert len(stages) > 10


def test_the_shares_of_an_h200():
    shares = branch_shares(rows(H200))
    assert [(one.seq_len, one.batch) for one in shares] == list(zip(LENGTHS, (4, 2, 1, 1, 1), strict=True))
    last = shares[-1]
    assert sum(last.milliseconds.values()) == pytest.approx(sum(times[-1] for times in H200.values()))
    assert sum(map(last.share, Branch)) == pytest.approx(1)
    assert last.share(Branch.COMPRESSED) == pytest.approx(0.64, abs=0.02)
    assert last.milliseconds[Branch.SELECTED] == pytest.approx(2.34 + 1.61 + 0.182)
    assert last.milliseconds[Branch.REST] == pytest.approx(0.899 + 0.713 + 0.261)
    assert last.milliseconds[Branch.OTHER] == pytest.approx(0.144)
    assert last.unknown == ()
    assert list(last.milliseconds) == [Branch.COMPRESSED, Branch.SELECTED, Branch.WINDOW, Branch.REST, Branch.OTHER]


def test_the_take_over_on_an_h200():
    (taken,) = take_overs(branch_shares(rows(H200)))
    assert re.match(r"The compressed branch grows as S\^1\.[89].*, the rest as S\^1\.0.*", taken.sentence)
    assert "tokens (between the measured 16,384 and 32,768);" in taken.sentence
    assert "from about 71,000 tokens (between the measured 65,536 and 131,072)." in taken.sentence


def test_a_shared_stage_is_split_as_it_was_put_together():
    window, compressed = per_call(1, 0.3), per_call(2, 0.25)
    shared = tuple(a + b for a, b in zip(window, compressed, strict=True))
    stages = {"compressed_window_forced": shared, "window_forced_backward_kv": per_call(1, 1.0)}
    for place, one in enumerate(branch_shares(rows(stages))):
        assert one.milliseconds[Branch.COMPRESSED] == pytest.approx(compressed[place])
        assert one.milliseconds[Branch.WINDOW] == pytest.approx(window[place] + per_call(1, 1.0)[place])
        assert Branch.SHARED not in one.milliseconds


@pytest.mark.parametrize("times", [per_call(1, 0.3)[:2], (0.3, 9.0, 0.5, 30.0, 2.0)], ids=["two lengths", "no law"])
def test_a_shared_stage_that_cannot_be_split_stays_shared(times: tuple[float, ...]):
    lengths = LENGTHS[: len(times)]
    shares = branch_shares(rows({"compressed_window_forced": times, "merge": times}, lengths))
    assert [one.milliseconds[Branch.SHARED] for one in shares] == list(times)
    assert all(Branch.COMPRESSED not in one.milliseconds for one in shares)
    (taken,) = take_overs(shares)
    assert taken.sentence.count("at no known length: the compressed branch runs in stages with the window") == 2


def test_an_unknown_stage_counts_as_other_and_is_named():
    shares = branch_shares(rows(H200 | {"brand_new": per_call(1, 0.5)}))
    assert {one.unknown for one in shares} == {("brand_new",)}
    assert shares[2].milliseconds[Branch.OTHER] == pytest.approx(0.059 + 0.5)


def taken_over(compressed: tuple[float, ...], rest: tuple[float, ...], lengths: tuple[int, ...] = LENGTHS) -> str:
    (taken,) = take_overs(branch_shares(rows({"scores": compressed, "selected": rest}, lengths)))
    return taken.sentence


def test_a_crossing_beyond_the_longest_length_is_extrapolated():
    sentence = taken_over(per_call(2, 0.125), per_call(1, 1.0))
    assert sentence.count("from about 260,000 tokens (extrapolated: 260,000 to 260,000)") == 2


@pytest.mark.parametrize(
    ("compressed", "rest", "lengths", "reason"),
    [
        (per_call(2, 0.01), per_call(1, 1.0), LENGTHS, "it lies beyond 524,288, 4 times the longest length measured"),
        (per_call(1, 0.5), per_call(1, 1.0), LENGTHS, "beyond 131,072, and the growth of both is not told apart"),
        (per_call(2, 0.1)[:2], per_call(1, 1.0)[:2], LENGTHS[:2], "fewer than 3 lengths were measured, all below it"),
        ((0.1, 0.01, 0.3, 0.02, 0.4), per_call(1, 9.0), LENGTHS, "it lies beyond 131,072, and no law of growth holds"),
        (
            (0.1, math.nan, 0.3, 0.5, 0.9),
            per_call(1, 9.0),
            LENGTHS,
            "no stage of the compressed branch was measured at",
        ),
    ],
)
def test_what_the_fits_do_not_allow_is_none_with_the_reason(
    compressed: tuple[float, ...], rest: tuple[float, ...], lengths: tuple[int, ...], reason: str
):
    sentence = taken_over(compressed, rest, lengths)
    assert "costs as much as all the rest at no known length: " in sentence
    assert reason in sentence
