"""The pages on every kind of database, the Overview, and runs and points in detail; none may show an exception."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pandas as pd
import pytest
import streamlit as st
from dashboard_pages import check, markdown, show, text
from made_up_runs import ENDED, GOING, LIVE, planned, small_sweep, store_hostile_runs, sweep
from streamlit.testing.v1 import AppTest

import orchestrator
from dashboard import data
from jobs.schema.files import File
from jobs.schema.states import PointState, RunState
from orchestrator.execute.artifacts import ArtifactError, ArtifactStore
from orchestrator.store import Store, upgrade
from orchestrator.store.importer import import_file
from orchestrator.store.records import (
    ArtifactRecord,
    OutcomeRecord,
    Progress,
    RunEndRecord,
    StartRecord,
)

DATA = Path(orchestrator.__file__).parent / "reference_data"
RUN, HALF = "20261121-100000-demo-ab12", "20261121-113000-m7c-cd34"
PAGES = ("overview", "results", "now", "scaling", "history", "runs")


@pytest.mark.parametrize("page", PAGES)
def test_an_empty_database_says_how_to_begin(page: str, database: str):
    upgrade(database)
    said = text(show(page))
    assert "No results yet" in said
    assert "nsa submit jobs/configs/demo.yaml" in said
    assert "nsa import" in said


def test_results_say_where_nsa_pays_and_open_a_cell(database: str):
    upgrade(database)
    with Store.open(database) as store:
        import_file(store, DATA / "journals" / "20261128-105241-bench-3dc2.jsonl.gz")
        import_file(store, DATA / "peers_h200.csv")
    assert "NSA pays from" not in text(show("results", against="the best other NSA")), "it is about dense attention"
    app = show("results")
    (chart,) = [json.loads(each.proto.spec) for each in app.get("vega_lite_chart")]
    assert "below 1, green: NSA is faster" in chart["title"]
    cell = "attention of 12/2 heads of 64, 32,768 tokens a call, S = 8K"
    said = text(show("results", cell=cell))
    assert f"{cell}: 0.7757 times dense attention" in said
    assert "NSA (Triton)" in said
    assert "of the card's 989" in said
    assert {"Time by length", "TFLOP/s under the card's roofline"} <= {*said.splitlines()}


def test_a_point_that_is_measured_again_is_shown_with_what_counts(complete: str):
    first, planned, *_ = sweep()
    with Store.open(complete) as store:
        again = {"attempt": 1, "resumed": 1, "key": "new"}
        store.apply_many([first.model_copy(update={"resumed": 1}), planned.model_copy(update=again)])
        store.apply_many([StartRecord(run_id=RUN, point_id=f"{RUN}/0", attempt=2)])
        store.beat(Progress(RUN, f"{RUN}/0", datetime.now(UTC), "timing", 3, 10))
    said = text(show("runs", run=RUN))
    assert "measured again: running" in said
    assert "timing 3/10" in said
    said = text(show("runs", run=RUN, point=f"{RUN}/0"))
    assert "measured again: running; attempt 1 counts until a later one has an outcome" in said
    assert "timing 3/10" in said
    assert "No numbers" not in said


def test_a_database_that_is_not_there_yet_says_how_to_begin(database: str, tmp_path: Path):
    said = text(show("overview"))
    assert "nsa up" in said
    assert not (tmp_path / "nsa.db").exists()  # reading does not create it


def test_an_unreachable_database_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NSA_DATABASE_URL", "postgresql://nsa:secret@127.0.0.1:1/nsa")
    said = text(show("runs"))
    assert "cannot be reached" in said
    assert "nsa doctor" in said
    assert "secret" not in said


@pytest.mark.parametrize(
    ("variable", "value"), [("NSA_DATABASE_URL", f"sqlite:///{__file__}"), ("NSA_DASHBOARD_PORT", "http")]
)
def test_a_setting_that_cannot_be_used_is_explained(monkeypatch: pytest.MonkeyPatch, variable: str, value: str):
    monkeypatch.setenv(variable, value)
    assert variable in text(show("overview"))


def test_wrong_rules_leave_the_rest_of_the_overview(complete: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "gates.yaml").write_text("targets: [{name: x}]")
    monkeypatch.setenv("NSA_GATES", str(tmp_path / "gates.yaml"))
    said = text(show("overview"))
    assert "rules cannot be used" in said
    assert "Latest runs" in said


def test_the_overview_shows_runs_and_counts_and_notices_that_its_database_goes_away(complete: str, tmp_path: Path):
    app = show("overview")
    latest = app.dataframe[0].value
    assert latest["ID"].tolist() == [RUN]
    assert latest["Points"].tolist() == ["24 ok · 3 failed · 1 skipped"]
    assert latest["Headline figure"][0].startswith("Time ")
    assert "11 failed" in text(app)
    assert "nsa.db" in "".join(caption.value for caption in app.sidebar.caption)
    for file in tmp_path.glob("nsa.db*"):
        file.unlink()
    assert "No results yet" in text(show("overview"))


def test_the_overview_has_a_card_for_each_target(complete: str, monkeypatch: pytest.MonkeyPatch):
    reads, measured_runs = [], data.measured_runs
    monkeypatch.setattr(data, "measured_runs", lambda *args: [reads.append(args), measured_runs(*args)][1])
    app = show("overview")
    assert len(reads) == 1
    said = text(app)
    first = app.table[0].value  # on the machine that has most evidence
    assert first["Plan"].str.contains("Native sparse attention").all()
    assert first["Verdict"].str.contains("NO-GO").all()
    assert "NO-GO] Native sparse attention" in said
    assert "UNKNOWN] The 125M model" in said
    assert "need 2,370 tok/s · **Measured** nothing yet" in said
    rules = next(table.value for table in app.table if "Bound" in table.value.columns).set_index("Rule")
    ours = rules.iloc[:, 1]  # the CPU: the only one that is measured
    assert "✓" in ours["Memory exponent"]
    assert "1.15" in rules.loc["Memory exponent", "Bound"]
    assert f"runs?run={RUN}&point={RUN}%2F" in ours["Memory exponent"]
    assert "✗" in ours["No failures"]
    assert "cancel" in said  # icon and word, not colour alone
    assert len(app.table) == 2  # no table of unknowns alone, no reasons unless asked for
    machines = next(control for control in app.segmented_control if control.key == "why-linear-scaling")
    machines.set_value("CPU").run()
    reasons = next(table.value for table in check(app).table if "Why" in table.value.columns)
    failures = reasons[reasons["Rule"].str.contains("hung")].iloc[0]
    assert "NO-GO" in failures["Rule"]
    assert "RuntimeError" in failures["Why"] or "hang" in failures["Why"]
    assert f"point={RUN}%2F" in failures["Evidence"]


def test_runs_can_be_found(complete: str):
    app = show("runs")
    assert len(app.dataframe[0].value) == 7
    app.text_input[0].set_value("report 002").run()
    assert check(app).dataframe[0].value["Run"].tolist() == ["report 002"]
    app.selectbox[0].set_value("measured").run()
    assert "No run fits" in text(check(app))
    again = show("runs", text="report 002", origin="reported")
    assert again.dataframe[0].value["Run"].tolist() == ["report 002"]
    assert again.text_input[0].value == "report 002"


def test_a_run_in_detail(complete: str):
    app = show("runs", run=RUN)
    points = app.dataframe[0].value
    assert len(points) == 28
    assert points["State"].str.contains("hang").sum() == 1
    assert points["Time"].str.contains("ms").sum() == 24  # none for failed points
    said = text(app)
    about = "24 ok · 3 failed · 1 skipped of 28 points in 2 min on bench1"
    assert f"{about}: **dense is 1.53 times as fast as chunked at S=4,096 (forward+backward, 12/2 d64)**" in said
    assert "c0ffee" in said
    assert "with uncommitted changes" in said
    assert "the database was away" in said
    assert len(app.get("download_button")) == 1


@pytest.mark.parametrize(
    ("zone", "started"),
    [("America/New_York", "2026-11-21 05:00:00 EST"), ("No/Where", "2026-11-21 10:00:00 UTC")],
)
def test_times_are_of_the_readers_clock(complete: str, monkeypatch: pytest.MonkeyPatch, zone: str, started: str):
    monkeypatch.setattr(type(st.context), "timezone", property(lambda _: zone))
    assert f"Started,{started}" in text(show("runs", run=RUN))


@pytest.mark.parametrize(
    ("index", "texts"),
    [  # values, route, environment and log; reason and the end of its stderr
        (14, ["peak_extra_memory", "slc: chunked", "2.13.0", "variables.OMP_NUM_THREADS,2", "warm"]),
        (25, ["no progress for 120 s", "RuntimeError: deliberate", "No numbers"]),
    ],
)
def test_a_point_in_detail(complete: str, index: int, texts: list[str]):
    said = text(show("runs", point=f"{RUN}/{index}"))
    assert all(each in said for each in texts)


@pytest.mark.parametrize("query", [{"run": "nothing"}, {"run": RUN, "point": "nothing/1"}])
def test_a_link_to_nothing_is_explained(complete: str, query: dict[str, str]):
    assert "There is no" in text(show("runs", **query))


def test_a_live_run_shows_its_progress_and_an_ended_point_on_the_next_read(half_finished: str):
    app = show("runs", run=HALF)
    assert all(each in text(app) for each in ("timing 3/10", "pending"))
    assert "running" in text(show("runs", run=HALF, point=f"{HALF}/2"))
    with Store.open(half_finished) as store:
        at = datetime.now(UTC) + timedelta(seconds=1)
        end = OutcomeRecord(
            run_id=HALF, point_id=f"{HALF}/2", attempt=1, state=PointState.OOM, reason="too large", at=at
        )
        store.apply_many([end, StartRecord(run_id=HALF, point_id=f"{HALF}/3", attempt=1, at=at)])
    st.cache_data.clear()  # instead of waiting for the time to live
    states: pd.Series = check(app.run()).dataframe[0].value["State"]
    assert states.str.contains("oom").sum() == 1


def test_a_file_is_chosen_shown_and_can_be_downloaded_whole(complete: str, tmp_path: Path):
    store = ArtifactStore(f"file://{tmp_path / 'artifacts'}")
    with Store.open(complete) as opened:
        for name, content in (("note.txt", "a note\n"), ("trace.bin", "\x00trace")):
            file = store.put(File(name, text=content), f"{RUN}/0000/1/{name}")
            opened.apply_many([ArtifactRecord(run_id=RUN, point_id=f"{RUN}/0", attempt=1, artifact=file)])
            assert data.artifact(file.path, file.size, file.sha256, "") == content.encode()
    app = show("runs", run=RUN, point=f"{RUN}/0")
    assert len(app.selectbox[0].options) == 3
    assert "a note" in text(app)
    said = text(check(app.selectbox[0].select_index(2).run()))
    assert "Its text is not in the database." in said
    assert [button.label for button in app.get("download_button")] == ["Download"]
    assert "Not in the artifact store of this dashboard" in text(check(app.selectbox[0].select_index(1).run()))
    with pytest.raises(ArtifactError, match="is no path below the artifact store"):
        data.artifact("../nsa.db", 1, "", "s3://b/p (node n)")


@pytest.mark.parametrize(
    ("page", "query"),
    [
        ("overview", {"why-linear-scaling": "CPU"}),
        ("runs", {}),
        ("now", {}),
        *(("runs", {"run": run}) for run in (ENDED, GOING)),
        *(("runs", {"point": point}) for point in (f"{ENDED}/0", f"{ENDED}/1", f"{GOING}/0")),
        ("scaling", {"run": ENDED}),
    ],
)
def test_hostile_text_is_text(database: str, page: str, query: dict[str, str]):
    store_hostile_runs(database)
    app = show(page, **query)
    said = markdown(app)
    assert not [text for text in said if LIVE.search(text)]
    assert "evil.invalid" in "".join(said) + text(app)  # it is shown


def test_failures_of_the_day_and_cards_have_their_pages(complete: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(type(st.context), "timezone", property(lambda _: "Asia/Tokyo"))
    first, *_ = sweep()
    assert "last 24 hours" not in text(show("overview")), "the sweep is older"
    assert "No preflight has been stored yet" in text(show("fleet"))
    now, run_id = datetime.now(UTC), "20261129-000000-preflight-1"
    card = {"point_id": f"{run_id}/0", "attempt": 1, "state": "hang", "reason": "silent for 60 s", "started_at": now}
    plan = planned(run_id, 0, "x", 1, now, {"device": "cuda"})
    run = first.model_copy(update={"run_id": run_id, "kind": "preflight", "at": now})
    card |= {"run_id": run_id, "environment": {"gpu": {"name": "H200", "uuid": "GPU-1"}}}
    outcome = OutcomeRecord.model_validate(card)
    with Store.open(complete) as store:
        store.apply_many([run, plan, outcome, RunEndRecord(run_id=run_id, at=now, state="failed")])
    for cached in (data.now, data.cards, data.counts):  # instead of waiting for the time to live
        cached.clear()
    assert "**1 run** of the last 24 hours failed" in text(show("overview"))
    said = text(show("now"))
    assert f"[{run_id}](runs?run={run_id})" in said
    assert "silent for 60 s" in said
    ended = now.astimezone(ZoneInfo("Asia/Tokyo"))
    assert f"{ended:%a %H:%M} JST" in said.replace("\N{NO-BREAK SPACE}", " ")
    said = text(show("fleet"))
    assert f"{ended:%Y-%m-%d %H:%M} JST" in said
    assert "✗ **BAD**" in said
    assert f"[H200](runs?run={run_id}&point={run_id}%2F0)" in said
    assert "drain the node if it ends so again" in said


def test_compare_begins_with_the_newest_run_beside_the_one_before(complete: str):
    with Store.open(complete) as store:
        store.apply_many(small_sweep("20261122-100000-demo-ef56", (512, 1024), RunState.DONE, "scaling"))
    app = show("compare", metric="time")
    assert [box.value for box in app.selectbox] == [RUN, "20261122-100000-demo-ef56", "time"]
    said = text(app)
    assert "2 cells: 2 ambiguous; mean ratios:" in said
    assert "demo-ef56 lacks 22 cells (22 not planned)" in said
    assert _domain(app) == [0.9, 1, 1.1], "of time, more is red"
    assert _domain(show("compare", metric="throughput")) == [1.1, 1, 0.9]
    app = show("compare", before="gone", after=RUN, metric="tiem")
    assert [box.value for box in app.selectbox] == [RUN, RUN, "time"]
    told = [each.value for each in app.toast]
    assert told == [f"Unknown in the address, ignored: `{each}`" for each in ("before=gone", "metric=tiem")]


def test_history_draws_a_cell_over_the_runs_that_measured_it(complete: str):
    with Store.open(complete) as store:
        store.apply_many(small_sweep("20261122-100000-demo-ef56", (512, 1024), RunState.DONE, name="demo"))
    app = show("history", name="demo", metric="time")
    assert [box.value for box in app.selectbox[:2]] == ["demo", "time"]
    assert "cells that 2 runs measured more than once" in text(app)
    [chart] = app.get("vega_lite_chart")
    assert [reading[:9] for reading in json.loads(chart.proto.spec)["encoding"]["x"]["sort"]] == ["c0ffeec+ "] * 2
    assert "20261122-100000-demo-ef56" in text(app)


def _domain(app: AppTest) -> list[float]:
    """Ratios with the full colours on the page's only chart, red first."""
    [chart] = app.get("vega_lite_chart")
    return json.loads(chart.proto.spec)["layer"][0]["encoding"]["color"]["scale"]["domain"]
