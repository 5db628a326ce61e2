"""Fits of stored rows: each series apart, with the points that the law rests on; none with too little data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import orchestrator
from orchestrator.judge.analysis import fits_frame, scaling_fits
from orchestrator.store import Store, queries
from orchestrator.store.importer import import_file

DATA = Path(orchestrator.__file__).parent / "reference_data"
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


def test_batches_of_one_token_count_compare_with_batch_one(store: Store, sweep):
    for number, (seq_len, batch) in enumerate([(512, 8), (1024, 4), (2048, 2), (4096, 1)]):
        store.apply_many(sweep(run_id=f"r{number}", laws={"chunked": 2.0}, lengths=(seq_len,), batch=batch))
    rows = queries.scaling(store)
    rows["run_id"] = "together"
    assert [fit.exponent for fit in scaling_fits(rows)] == pytest.approx([2.0, 2.0])


def test_a_fit_never_mixes_runs_or_origins(sqlite_store: Store, sweep, tmp_path):
    sqlite_store.apply_many(sweep(run_id="one", laws={"chunked": 1.0}, lengths=(512, 1024)))
    sqlite_store.apply_many(sweep(run_id="two", laws={"chunked": 1.0}, lengths=(2048, 4096)))
    rows = queries.scaling(sqlite_store)
    assert scaling_fits(rows) == []
    rows["run_id"] = "one"
    assert len(scaling_fits(rows)) == 2
    rows.loc[rows.seq_len > 1024, "origin"] = "reported"
    assert scaling_fits(rows) == []


def test_the_seeds_curve_is_steeper_than_linear(sqlite_store: Store):
    import_file(sqlite_store, DATA / "seed_measurements.csv")
    (fit,) = [f for f in scaling_fits(queries.scaling(sqlite_store)) if "002" in f.run_id]
    assert fit.metric == "peak_memory"
    assert fit.ci_low < 1.3 < fit.ci_high  # no law describes it: the last four lengths, and a wide interval


@pytest.mark.parametrize(("column", "value"), [("per_sequence", 0.0), ("per_sequence", None), ("seq_len", 0)])
def test_a_series_with_a_zero_is_not_fitted(sqlite_store: Store, sweep, column: str, value: object):
    sqlite_store.apply_many(sweep(laws={"chunked": 1.0}))
    rows = queries.scaling(sqlite_store)
    rows.loc[(rows.metric == "peak_extra_memory") & (rows.seq_len == 512), column] = value
    assert [fit.metric for fit in scaling_fits(rows)] == ["time"]


def test_an_interval_that_is_reversed_or_missing_has_no_weight(sqlite_store: Store, sweep):
    sqlite_store.apply_many(sweep(laws={"chunked": 1.0}))
    rows = queries.scaling(sqlite_store)
    expected = [fit.exponent for fit in scaling_fits(rows)]
    rows["ci_low"], rows["ci_high"] = rows["ci_high"], rows["ci_low"].where(rows.seq_len > 512)
    assert [fit.exponent for fit in scaling_fits(rows)] == pytest.approx(expected)


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


def test_a_fit_holds_the_local_exponents_of_all_lengths(store: Store, sweep):
    """Constant up to 4,096 tokens, then quadratic: the fit leaves short lengths out, the local exponents show them."""
    lengths = tuple(512 * 2**n for n in range(9))
    store.apply_many(sweep(laws={"naive": 2.0}, lengths=lengths))
    rows = queries.scaling(store)
    flat = (rows["metric"] == "time") & (rows["seq_len"] < 4096)
    at_4k = rows.loc[(rows["metric"] == "time") & (rows["seq_len"] == 4096), "per_sequence"].iloc[0]
    rows.loc[flat, "per_sequence"] = at_4k
    rows[["ci_low", "ci_high"]] = None
    (time,) = [fit for fit in scaling_fits(rows) if fit.metric == "time"]
    assert time.lengths[0] == 4096
    assert [slope.exponent for slope in time.local] == pytest.approx([0] * 3 + [2] * 5)
    assert time.local_text == "1K 0.0, 2K 0.0, 4K 0.0, 8K 2.0, 16K 2.0, 32K 2.0, 64K 2.0, 128K 2.0"
    assert fits_frame([time])["local_text"].tolist() == [time.local_text]


def test_the_spread_of_the_samples_makes_a_local_exponent_uncertain(sqlite_store: Store, sweep):
    sqlite_store.apply_many(sweep(laws={"chunked": 1.0}))
    rows = queries.scaling(sqlite_store)
    rows["ci_low"], rows["ci_high"] = 0.9 * rows["value"], 1.1 * rows["value"]
    (time,) = [fit for fit in scaling_fits(rows) if fit.metric == "time"]
    assert [slope.error for slope in time.local] == pytest.approx([0.2041] * len(time.local), abs=0.001)
    rows["ci_low"], rows["ci_high"] = 0.7 * rows["value"], 1.3 * rows["value"]
    (wide,) = [fit for fit in scaling_fits(rows) if fit.metric == "time"]
    assert len(wide.local) < len(time.local)


def test_fits_as_a_frame(store: Store, sweep):
    store.apply_many(sweep())
    frame = fits_frame(scaling_fits(queries.scaling(store)))
    assert {"run_id", "implementation", "pass", "metric", "exponent", "ci_low", "ci_high"} <= set(frame.columns)
    assert len(frame) == 4
    assert fits_frame([]).empty


def test_an_empty_store_has_no_fits(sqlite_store: Store):
    assert scaling_fits(queries.scaling(sqlite_store)) == []
