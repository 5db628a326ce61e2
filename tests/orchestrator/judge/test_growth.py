"""Laws of growth recover known exponents through overhead and noise; each stored series has its fit, if any.

Change points are where apache-otava's own test series have theirs; few false alarms, steps told from slow changes.
"""

from pathlib import Path

import numpy as np
import pytest

from orchestrator.judge.analysis import scaling_fits
from orchestrator.judge.change_points import SURE, change_points, shifts
from orchestrator.judge.growth import Growth, fit_growth, local_slopes
from orchestrator.store import Store, queries

LENGTHS = (512, 1024, 2048, 4096)
OCTAVES = np.array([512 * 2**n for n in range(8)])  # 512 to 65,536
SWEEP = np.array([*OCTAVES[:-1], 46_336, 65_536, 92_672, 131_072, 185_344, 262_144])


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_values_that_are_not_measurements_are_refused(bad: float):
    with pytest.raises(ValueError, match="positive and finite"):
        fit_growth(LENGTHS, [1.0, 2.0, 3.0, bad])


def test_slopes_between_neighbours_show_a_bend():
    slopes = local_slopes([512, 1024, 2048, 512], [1, 2, 8, 1])
    assert [(slope.low, slope.high) for slope in slopes] == [(512, 1024), (1024, 2048)]
    assert [slope.exponent for slope in slopes] == [pytest.approx(1), pytest.approx(2)]
    assert [str(slope) for slope in slopes] == ["1K 1.0", "2K 2.0"]
    assert local_slopes([512], [1.0]) == ()


def test_a_scattered_length_is_joined_with_its_neighbours_and_weighs_less():
    lengths = 1024 * 2.0 ** np.arange(6)
    values = lengths.copy()
    values[3] *= 1.5
    known = local_slopes(lengths, values)
    assert [round(slope.exponent, 2) for slope in known] == [1.0, 1.0, 1.58, 0.42, 1.0]
    joined = local_slopes(lengths, values, [0.01] * 3 + [0.5] + [0.01] * 2)
    assert [(slope.low, slope.high) for slope in joined] == [(1024, 2048), (2048, 4096), (4096, 16384), (16384, 32768)]
    assert [slope.exponent for slope in joined] == pytest.approx([1.0] * 4, abs=0.02)


def test_the_interval_of_a_slope_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(3)
    slopes = [
        slope
        for _ in range(100)
        for slope in local_slopes(OCTAVES, OCTAVES**1.4 * np.exp(rng.normal(0, 0.05, 8)), [0.05] * 8)
    ]
    covered = [abs(slope.exponent - 1.4) <= slope.error for slope in slopes]
    assert 0.93 < np.mean(covered) < 0.97
    assert str(slopes[0]).endswith(" ± 0.2")
    assert len(slopes) == 700


def drawn(seed: int, lengths: np.ndarray, true: np.ndarray, noise: float = 0.03) -> list[Growth]:
    """The laws of 100 draws."""
    rng = np.random.default_rng(seed)
    laws = [fit_growth(lengths, true * np.exp(rng.normal(0, noise, len(lengths)))) for _ in range(100)]
    return [law for law in laws if law]


def covering(laws: list[Growth], exponent: float) -> int:
    return sum(law.ci_low <= exponent <= law.ci_high for law in laws)


@pytest.mark.parametrize(("exponent", "equal_at", "lengths"), [(1.0, 8192, OCTAVES), (2.0, 600, SWEEP)])
def test_an_overhead_is_told_from_growth(exponent: float, equal_at: int, lengths: np.ndarray):
    """In 95 of 100 draws, with 3 % noise and an overhead that equals the work at `equal_at`."""
    laws = drawn(7, lengths, (equal_at / lengths[-1]) ** exponent + (lengths / lengths[-1]) ** exponent)
    assert min(covering(laws, exponent), sum(law.overhead > 0 for law in laws)) >= 95
    assert np.median([law.ci_high - law.ci_low for law in laws]) < 0.3


@pytest.mark.parametrize(("exponent", "factor", "lengths"), [(1.0, 32, 4 * OCTAVES[:7]), (2.0, 2, OCTAVES[1:7])])
def test_few_lengths_do_not_hide_an_overhead_from_the_interval(exponent: float, factor: float, lengths: np.ndarray):
    """With 3 % noise; the overhead equals the work at `factor` times the shortest length (32: half of the longest)."""
    laws = drawn(9, lengths, (factor * lengths[0]) ** exponent + lengths.astype(float) ** exponent)
    assert covering(laws, exponent) >= 92


@pytest.mark.parametrize("exponent", [1.0, 2.0])
def test_without_an_overhead_the_plain_law_is_chosen(exponent: float):
    laws = drawn(8, SWEEP, SWEEP**exponent)
    assert min(covering(laws, exponent), sum(law.overhead == 0 for law in laws)) >= 95
    assert sum(law.refused for law in laws) <= 5


@pytest.mark.parametrize(
    ("quadratic", "noise", "lengths"), [(0.0, 0.01, SWEEP), (0.2, 0.01, OCTAVES), (0.2, 0.03, OCTAVES)]
)
def test_the_share_of_the_quadratic_part_holds_the_truth(quadratic: float, noise: float, lengths: np.ndarray):
    """In 95 of 100 draws, on overhead + linear + quadratic as on overhead + linear."""
    at = lengths / lengths[-1]
    laws = drawn(11, lengths, 0.02 + (0.98 - quadratic) * at + quadratic * at**2, noise)
    mixes = [law.mix for law in laws if law.mix]
    missed = 100 - len(mixes)
    assert sum(mix.share_low <= quadratic <= mix.share_high for mix in mixes) + missed >= 95
    assert missed <= 5
    if quadratic and noise < 0.02:
        assert sum(law.refused for law in laws) >= 95, "no power law, and no exponent"
    elif not quadratic:
        assert covering([law for law in laws if not law.refused], 1) >= 92


def test_a_sum_of_parts_has_shares_and_no_exponent():
    """A power law through these lengths fits to 2 %, as S^1.3, and goes wrong beyond them."""
    law = fit_growth(SWEEP, 0.05 + SWEEP / 65_536 + (SWEEP / 131_072) ** 2)
    assert law is not None
    assert law.refused
    assert law.mix is not None
    assert law.mix.share == pytest.approx(4 / 8.05, abs=0.001)
    assert law.mix.takes_over == pytest.approx(265_400, rel=0.01)
    assert law.at(2**20) == pytest.approx(80.05, rel=0.001)
    assert str(law) == "1% overhead, 50% linear, 50% quadratic (50% to 50%) at 256K; mostly quadratic from 259K"


def test_lengths_at_which_another_law_holds_are_left_out():
    """A launch hides the work behind it: the greater of the two is seen, and the sum of both is no law of that."""
    law = fit_growth(SWEEP, np.maximum(0.09, 3.4e-9 * SWEEP**2.0))
    assert law is not None
    assert 1.85 <= law.ci_low <= law.exponent <= law.ci_high <= 2.15
    assert 2048 < law.lengths[0] <= 8192
    assert law.lengths[-1] == 262_144


def test_a_value_of_wide_spread_weighs_less():
    values = 1e-3 * OCTAVES.astype(float)
    values[-1] *= 1.3
    spread = [0.0] * 7 + [0.3]
    law, alike = fit_growth(OCTAVES, values, spread), fit_growth(OCTAVES, values)
    assert law is not None
    assert alike is not None
    assert abs(law.exponent - 1) < 0.01 < abs(alike.exponent - 1)


def test_an_exact_law_at_long_lengths_precedes_one_that_only_holds_on_more():
    """Extra memory (MiB) of the chunked backend, forward+backward, on a CPU: steps up to 2,048 tokens, then linear."""
    lengths = [256, 512, 1024, 2048, 3072, 4096, 6144, 8192]
    values = [1.882332, 2.728439, 5.447112, 10.993790, 16.493790, 21.993790, 32.993790, 43.993790]
    law = fit_growth(lengths, values)
    assert law is not None
    assert law.exponent == pytest.approx(1.0, abs=0.002)
    assert (law.ci_low, law.ci_high) == pytest.approx((0.998, 1.002), abs=0.002)
    assert law.lengths == (2048, 3072, 4096, 6144, 8192)


RUN = "20261120-120000-demo-abcd"


def test_each_series_of_a_run_gets_its_fit(store: Store, sweep):
    store.apply_many(sweep(laws={"chunked": 1.0, "naive": 2.0}, batch=4))
    fits = {(fit.series["implementation"], fit.metric): fit for fit in scaling_fits(queries.scaling(store))}
    assert set(fits) == {(i, m) for i in ("chunked", "naive") for m in ("time", "peak_extra_memory")}
    memory = fits["naive", "peak_extra_memory"]
    assert memory.exponent == pytest.approx(2.0)
    assert (memory.series["pass"], memory.series["query_heads"], memory.series["layers"], memory.n) == (
        "forward+backward",
        12,
        None,
        4,
    )
    assert memory.at(512) == pytest.approx(3.0)  # per sequence, not for the batch of four
    assert set(memory.point_ids) == {f"{RUN}/{n}" for n in range(4, 8)}


def test_a_fit_never_mixes_runs_or_origins(sqlite_store: Store, sweep, tmp_path):
    sqlite_store.apply_many(sweep(run_id="one", laws={"chunked": 1.0}, lengths=(512, 1024)))
    sqlite_store.apply_many(sweep(run_id="two", laws={"chunked": 1.0}, lengths=(2048, 4096)))
    rows = queries.scaling(sqlite_store)
    assert scaling_fits(rows) == []
    rows["run_id"] = "one"
    assert len(scaling_fits(rows)) == 2
    rows.loc[rows.seq_len > 1024, "origin"] = "reported"
    assert scaling_fits(rows) == []


@pytest.mark.parametrize(("column", "value"), [("per_sequence", 0.0), ("per_sequence", None), ("seq_len", 0)])
def test_a_series_with_a_zero_is_not_fitted(sqlite_store: Store, sweep, column: str, value: object):
    sqlite_store.apply_many(sweep(laws={"chunked": 1.0}))
    rows = queries.scaling(sqlite_store)
    rows.loc[(rows.metric == "peak_extra_memory") & (rows.seq_len == 512), column] = value
    assert [fit.metric for fit in scaling_fits(rows)] == ["time"]


def test_a_value_of_one_sample_weighs_no_more_than_one_of_many(sqlite_store: Store, sweep):
    sqlite_store.apply_many(sweep(laws={"chunked": 1.0}, lengths=tuple(512 * 2**n for n in range(8))))
    rows = queries.scaling(sqlite_store)
    rows[["ci_low", "ci_high"]] = np.outer(rows["value"], [0.9, 1.1])
    single = rows["seq_len"] == 8192
    rows.loc[single, ["ci_low", "ci_high"]] = np.nan
    rows.loc[single, "per_sequence"] *= 1.2
    alike = rows.assign(ci_low=rows["value"] * 0.9, ci_high=rows["value"] * 1.1)
    fits = [[fit.exponent for fit in scaling_fits(each)] for each in (rows, alike)]
    assert fits[0] == fits[1]


# From apache-otava 0.8.0 (Apache-2.0): tests/tigerbeetle_test.py, series_test.py, analysis_test.py and
# change_point_divisive_test.py, with the answers that these expect.
TIGERBEETLE = np.fromstring(Path(__file__).with_name("tigerbeetle.txt").read_text(), sep=" ")
STEP_DOWN = np.array([1.02, 0.95, 0.99, 1.00, 1.12, 0.90, 0.50, 0.51, 0.48, 0.48, 0.55])
SMALL_STEP = np.array([2.02, 2.03, 2.01, 2.04, 1.82, 1.85, 1.79, 1.81, 1.80, 1.76, 1.78])
HALF = np.array(
    [1.02, 0.95, 0.99, 1, 1.12, 1, 1.01, 0.98, 1.01, 0.96, 0.5, 0.51, 0.48, 0.48, 0.55, 0.5, 0.49, 0.51, 0.5]
)
TWO_STEPS = np.array([0.3, 2.4, 1.5, -0.9, -0.5, 99.7, 98.3, 99.1, 149.0, 149.7, 149.5, 149.1, 148.8, 150.0])


@pytest.mark.parametrize(
    ("series", "least", "sure", "expected"),
    [
        (np.log(TIGERBEETLE), 0.05, SURE, [15, 71]),
        (STEP_DOWN, 0.0, SURE, [6]),
        (SMALL_STEP, 0.0, SURE, [4]),
        (SMALL_STEP, 0.4, SURE, []),
        (HALF, 0.0, 0.0001, [10]),
        (TWO_STEPS, 0.0, 0.01, [5, 8]),
    ],
)
def test_otavas_series_change_where_otava_says(
    series: np.ndarray, least: float, sure: float, expected: list[int]
) -> None:
    assert change_points(series, least, sure) == expected


def test_series_without_a_change_raise_no_alarm() -> None:
    random = np.random.default_rng(7)
    lengths = [2, 3, 4, 6, 10, 20] * 60
    assert sum(bool(shifts(random.normal(0, 1, length))) for length in lengths) <= 0.01 * len(lengths)


def test_steps_are_placed_and_a_slow_change_is_one_creeping_change() -> None:
    random = np.random.default_rng(7)

    def series(levels: np.ndarray) -> np.ndarray:
        return levels + random.normal(0, 0.004, len(levels))

    for _ in range(10):
        stairs = shifts(series(np.repeat([0, 0.03, 0.06, 0.02], 10)), 0.02)
        assert [(shift.last, shift.first) for shift in stairs] == [(9, 10), (19, 20), (29, 30)]
        [slow] = shifts(series(np.linspace(0, 0.05, 12)), 0.02)
        assert slow.creeping
        assert slow.size == pytest.approx(0.05, rel=0.3)
        after = shifts(series(np.r_[np.zeros(10), 0.1 + np.linspace(0, -0.06, 20)]), 0.02)
        assert [shift.creeping for shift in after] == [False, True], "a step, then a slow way back"
