"""Runs are found by id, by its beginning and by the Ray job."""

from __future__ import annotations

import pytest

from orchestrator.cli.lookup import find_run
from orchestrator.errors import UserError
from orchestrator.store import Store

RUN = "20261120-120000-demo-abcd"


@pytest.mark.parametrize("text", [RUN, "20261120-12", "bench-20261120-115959"])
def test_a_run_is_found_by_its_id_its_beginning_and_its_job(sqlite_store: Store, sweep, text: str):
    sqlite_store.apply_many(sweep("20261119-120000-demo-abcd"))
    head, *records = sweep(RUN)
    sqlite_store.apply_many([head.model_copy(update={"submission_id": "bench-20261120-115959"}), *records])
    assert find_run(sqlite_store, text) == RUN


def test_a_job_without_a_run_is_not_found(sqlite_store: Store, sweep):
    sqlite_store.apply_many(sweep())
    with pytest.raises(UserError, match="'bench-1': no run has this id"):
        find_run(sqlite_store, "bench-1")
