"""Fits of stored rows: each series apart, with the points that the law rests on; none with too little data."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.judge.analysis import scaling_fits
from orchestrator.store import Store, queries

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
