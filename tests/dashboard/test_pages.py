"""The pages in Streamlit's test harness, on every kind of database; none may show an exception."""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import streamlit as st
from example_databases import small_sweep
from streamlit.testing.v1 import AppTest

from dashboard import data
from orchestrator.artifacts import ArtifactError, ArtifactStore, Source
from orchestrator.records import (
    ArtifactRecord,
    EventRecord,
    OutcomeRecord,
    PointRecord,
    RunEndRecord,
    RunRecord,
    StartRecord,
)
from orchestrator.states import PointState, RunState
from orchestrator.store import Store, upgrade

ROOT = Path(__file__).resolve().parents[2]
RUN, HALF = "20261121-100000-demo-ab12", "20261121-113000-m7c-cd34"
CURVE = "reported-002_0efc432e4c57f734"
PAGES = ("overview", "scaling", "runs")


def show(page: str, **query: str) -> AppTest:
    """The page as drawn on a first visit."""
    app = AppTest.from_file(str(ROOT / "dashboard" / "app.py"), default_timeout=60)
    if page != "overview":
        app.switch_page(f"{page}.py")
    for name, value in query.items():
        app.query_params[name] = value
    return check(app.run())


def check(app: AppTest) -> AppTest:
    assert not app.exception, [(found.message, found.stack_trace) for found in app.exception]
    return app


def asked(app: AppTest) -> dict[str, list[str]]:
    """The names and values in the page's address."""
    return {name: [found] if isinstance(found, str) else found for name, found in app.query_params.items()}


def text(app: AppTest) -> str:
    """The text on the page."""
    kinds = (app.title, app.header, app.subheader, app.markdown, app.caption, app.info, app.warning, app.code)
    said = [str(element.value) for kind in kinds for element in kind]
    tables = [table.value.to_csv() for table in (*app.table, *app.dataframe)]
    return "\n".join([*said, *tables]).replace("\\", "").replace("\N{NO-BREAK SPACE}", " ")


@pytest.mark.parametrize("page", PAGES)
def test_an_empty_database_says_how_to_begin(page: str, database: str):
    upgrade(database)
    said = text(show(page))
    assert "No results yet" in said
    assert "nsa submit jobs/configs/demo.yaml" in said
    assert "nsa import" in said


def test_a_run_that_waits_or_never_began_is_shown(database: str):
    run_id = "20261121-120000-big-ef56"
    run = RunRecord(run_id=run_id, name="big", kind="scaling", spec={}, spec_hash="5", state=RunState.PENDING)
    with Store.open(database) as store:
        store.apply(run)
        assert "pending" in text(show("runs"))
        said = text(show("runs", run=run_id))
        assert "pending" in said
        assert "No point has been planned yet." in said
        store.apply(RunEndRecord(run_id=run_id, state=RunState.FAILED, reason="no node has 8 GPUs"))
    assert "No results yet" not in text(show("overview"))
    st.cache_data.clear()
    said = text(show("runs", run=run_id))
    assert "failed" in said
    assert "no node has 8 GPUs" in said


@pytest.mark.parametrize("page", PAGES)
def test_a_database_that_is_not_there_yet_says_how_to_begin(page: str, database: str, tmp_path: Path):
    said = text(show(page))
    assert "nsa up" in said
    assert not (tmp_path / "nsa.db").exists()  # reading does not create it


@pytest.mark.parametrize("page", PAGES)
def test_an_unreachable_database_says_so(page: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NSA_DATABASE_URL", "postgresql://nsa:secret@127.0.0.1:1/nsa")
    said = text(show(page))
    assert "cannot be reached" in said
    assert "nsa doctor" in said
    assert "secret" not in said


@pytest.mark.parametrize("page", PAGES)
def test_an_old_schema_asks_for_the_upgrade(page: str, complete: str, tmp_path: Path):
    with sqlite3.connect(tmp_path / "nsa.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0001'")
    assert "nsa db upgrade" in text(show(page))


def test_a_file_that_is_not_a_database_is_explained(database: str, tmp_path: Path):
    (tmp_path / "nsa.db").write_text("no database " * 1000)
    assert "NSA_DATABASE_URL" in text(show("overview"))


def test_a_wrong_setting_is_explained(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NSA_DASHBOARD_PORT", "http")
    assert "NSA_DASHBOARD_PORT" in text(show("overview"))


def test_wrong_rules_leave_the_rest_of_the_overview(complete: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "gates.yaml").write_text("targets: [{name: x}]")
    monkeypatch.setenv("NSA_GATES", str(tmp_path / "gates.yaml"))
    said = text(show("overview"))
    assert "rules cannot be used" in said
    assert "Latest runs" in said


def test_a_database_that_goes_away_is_noticed(complete: str, tmp_path: Path):
    assert "Latest runs" in text(show("overview"))
    for file in tmp_path.glob("nsa.db*"):
        file.unlink()
    assert "No results yet" in text(show("overview"))


def test_the_overview_has_a_card_for_each_target(complete: str):
    app = show("overview")
    said = text(app)
    assert "NO-GO] Native sparse attention" in said
    assert "UNKNOWN] The 125M model" in said
    assert "need 2,370 tok/s · **Measured** nothing yet" in said
    rules = next(table.value for table in app.table if "Bound" in table.value.columns).set_index("Rule")
    ours = rules.iloc[:, -1]  # the CPU
    assert "✓" in ours["Memory exponent"]
    assert "1.15" in rules.loc["Memory exponent", "Bound"]
    assert f"runs?run={RUN}&point={RUN}%2F" in ours["Memory exponent"]
    assert "✗" in ours["No failures"]
    assert "cancel" in said  # icon and word, not colour alone
    assert len(app.table) == 1  # no table of unknowns alone, no reasons unless asked for


def test_the_overview_gives_the_reasons_that_are_asked_for(complete: str):
    app = show("overview")
    machines = next(control for control in app.segmented_control if control.key == "why-linear-scaling")
    machines.set_value(machines.options[-1]).run()
    reasons = next(table.value for table in check(app).table if "Why" in table.value.columns)
    assert list(reasons.columns) == ["Rule", "Value", "Why", "Evidence"]
    failures = reasons[reasons["Rule"].str.contains("hung")].iloc[0]
    assert "NO-GO" in failures["Rule"]
    assert "RuntimeError" in failures["Why"] or "hang" in failures["Why"]
    assert f"point={RUN}%2F" in failures["Evidence"]


def test_a_target_of_ones_own_is_text(complete: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "gates.yaml").write_text(
        "targets: [{name: x, title: 'a [link](http://x) :red[y]', rules: [{rule: r, title: '**t**', kind: states, "
        "measure: 'n'}]}]"
    )
    monkeypatch.setenv("NSA_GATES", str(tmp_path / "gates.yaml"))
    titles = [element.value for element in show("overview").markdown if "link" in element.value]
    assert titles == ["### :red-badge[:material/cancel: NO-GO] a \\[link\\](http\\://\N{WORD JOINER}x) \\:red\\[y\\]"]


def test_the_overview_shows_runs_and_counts(complete: str):
    app = show("overview")
    latest = app.dataframe[0].value
    assert latest["Id"].tolist() == [RUN]
    assert latest["Points"].tolist() == ["24 ok · 3 failed · 1 skipped"]
    assert "11 failed" in text(app)
    assert "nsa.db" in "".join(caption.value for caption in app.sidebar.caption)


def test_the_overview_follows_a_run(half_finished: str):
    app = show("overview")
    said = text(app)
    assert "2 ok · 1 running · 2 pending" in said or "2 ok · 1 running · 2 pending" in str(app.get("progress"))
    assert "timing 3/10" in said
    assert "Not yet: nothing measured" in said


def test_scaling_begins_with_our_latest_sweep_and_the_reported_curve(complete: str):
    app = show("scaling")
    assert app.multiselect[0].value == [RUN, CURVE]
    assert asked(app) == {}  # defaults are left out
    titles = [subheader.value for subheader in app.subheader]
    ours = ["Memory, measured", "Time, measured", "Fitted exponents", "Throughput, measured"]
    assert titles == [*ours, "Memory, reported"]
    assert len(app.get("vega_lite_chart")) == 6
    fits = _fits(app)
    ours = fits[fits["Origin"].str.contains("measured")].set_index(["Quantity", "Implementation"])
    assert ours["Exponent"]["Peak memory beyond inputs", "naive"] == pytest.approx(2, abs=0.05)
    assert ours["Exponent"]["Peak memory beyond inputs", "chunked"] == pytest.approx(1, abs=0.05)
    assert ours["Local exponents"]["Time", "naive"].startswith("1K ")
    assert ours["Rests on"]["Time", "naive"] == "4: 512 to 4K"
    assert fits["95 % interval"].str.contains(" to ").all()
    assert fits["Origin"].str.contains("reported").any()


def test_a_bench_is_a_sweep_too(complete: str):
    with sqlite3.connect(complete.removeprefix("sqlite:///")) as connection:
        connection.execute("UPDATE run SET kind = 'bench' WHERE id = ?", (RUN,))
    assert show("scaling").multiselect[0].value == [RUN, CURVE]


@pytest.mark.parametrize(
    ("lengths", "state", "kind", "opens"),
    [
        ((512, 1024), RunState.DONE, "scaling", False),  # a smoke test of two lengths
        ((512, 1024, 2048, 4096, 8192), RunState.CANCELLED, "scaling", False),
        ((512, 1024, 2048, 4096, 8192), RunState.FAILED, "scaling", False),
        ((512, 1024, 2048, 4096, 8192), None, "scaling", False),  # still running
        ((512, 1024, 2048, 4096, 8192), RunState.DONE, "decode", True),  # the complete sweep has only four lengths
        ((512, 1024, 2048, 4096), RunState.DONE, "decode", False),
        ((512, 1024, 2048, 4096), RunState.DONE, "scaling", True),
    ],
)
def test_scaling_begins_with_the_newest_complete_sweep(
    complete: str, lengths: tuple[int, ...], state: RunState | None, kind: str, opens: bool
):
    with Store.open(complete) as store:
        store.apply_many(small_sweep(HALF, lengths, state, kind))
    assert show("scaling").multiselect[0].value[0] == (HALF if opens else RUN)


def test_many_newer_runs_hide_neither_the_sweep_nor_the_reported_curve(complete: str):
    with Store.open(complete) as store:
        for number in range(210):
            store.apply_many(small_sweep(f"{HALF}-{number}", (512, 1024, 2048), RunState.DONE))
    assert show("scaling").multiselect[0].value == [RUN, CURVE]
    newer = f"{HALF}-0"
    assert check(_visit("scaling", {"run": [RUN, newer]})).multiselect[0].value == [RUN, newer]
    assert {RUN, CURVE} < set(show("runs").dataframe[0].value["Id"])


def test_without_a_complete_sweep_scaling_begins_with_the_newest_results(database: str):
    with Store.open(database) as store:
        store.apply_many(small_sweep(RUN, (512, 1024, 2048), RunState.CANCELLED, hours=2))
        store.apply_many(small_sweep(HALF, (512,), RunState.DONE))
    assert show("scaling").multiselect[0].value == [HALF]


def test_the_controls_of_scaling_are_in_the_address(complete: str):
    app = show("scaling")
    _pills(app, "Pass").set_value(["forward"]).run()
    assert asked(check(app)) == {"pass": ["forward"]}
    _control(app.segmented_control, "Reported results").set_value("together").run()
    _pills(app, "Implementation").set_value([]).run()
    chosen = {"pass": ["forward"], "reported": ["together"], "implementation": ["all"]}
    assert asked(check(app)) == chosen
    again = check(_visit("scaling", chosen))
    assert _pills(again, "Pass").value == ["forward"]
    assert _control(again.segmented_control, "Reported results").value == "together"
    assert _pills(again, "Implementation").value == []
    assert text(again) == text(app)
    _pills(again, "Pass").set_value(["forward+backward"]).run()
    assert "pass" not in asked(check(again))  # the default again


def test_unknown_values_in_the_address_are_ignored_with_a_word(complete: str):
    app = check(_visit("scaling", {"run": [RUN, "gone"], "pass": ["sideways"], "reported": ["x"], "colour": ["1"]}))
    assert app.multiselect[0].value == [RUN]
    said = text(app)
    assert "Unknown in the address, ignored: `run=gone`, `pass=sideways`, `reported=x`, `colour`" in said
    assert "Time, measured" in said
    assert "ignored" not in text(show("scaling", run=RUN))
    app = check(_visit("runs", {"state": ["finished"], "kind": ["scaling"]}))
    assert "ignored: `state=finished`" in text(app)
    assert len(app.dataframe[0].value) == 1


def test_a_run_without_the_usual_pass_is_shown_beside_reported_runs_that_have_it(complete: str):
    with sqlite3.connect(complete.removeprefix("sqlite:///")) as connection:
        connection.execute("UPDATE point SET pass = 'decode' WHERE run_id = ?", (RUN,))
    titles = [subheader.value for subheader in show("scaling").subheader]
    assert "Time, measured" in titles
    assert "Memory, reported" in titles


def test_scaling_shows_the_share_of_each_branch_and_where_the_compressed_takes_over(complete: str):
    with sqlite3.connect(complete.removeprefix("sqlite:///")) as connection:
        connection.executemany(
            "INSERT INTO metric (point_id, name, unit, value, samples, method) "
            "SELECT id, ?, 'ms', ? * pow(seq_len / 1024.0, ?), '[]', 'profiler' FROM point "
            "WHERE run_id = ? AND implementation = 'chunked' AND state = 'ok'",
            [("stage_compressed", 1.0, 2, RUN), ("stage_window", 2.0, 1, RUN), ("stage_merge", 0.5, 1, RUN)],
        )
    app = show("scaling")
    said = text(app)
    assert "Share of each branch" in said
    assert "The compressed branch grows as S^2.00" in said
    assert "costs as much as all the rest from" in said
    assert said.count("The compressed branch grows") == 1  # forward+backward, as the other charts show by default
    _pills(app, "Implementation").set_value(["naive"]).run()
    assert "Share of each branch" not in text(check(app))


def _fits(app: AppTest) -> pd.DataFrame:
    return next(grid.value for grid in app.dataframe if "Exponent" in grid.value.columns)


def _control(kind: Any, label: str) -> Any:
    return next(control for control in kind if control.label == label)


def _pills(app: AppTest, label: str) -> Any:
    return _control(app.pills, label)


def _visit(page: str, query: dict[str, list[str]]) -> AppTest:
    """The page at an address."""
    app = AppTest.from_file(str(ROOT / "dashboard" / "app.py"), default_timeout=60)
    app.switch_page(f"{page}.py")
    for name, values in query.items():
        app.query_params[name] = values
    return app.run()


def test_scaling_lists_failures_by_state_and_draws_none(complete: str):
    app = show("scaling")
    missing = next(grid.value for grid in app.dataframe if "Why" in grid.value.columns)
    states = "".join(missing["State"])
    assert all(state in states for state in ("oom", "hang", "error", "skipped"))
    assert missing["Why"].str.contains("93.1 GiB").any()
    numbers = next(frame.value for frame in app.dataframe if "per_sequence" in frame.value or "value" in frame.value)
    assert 65536 not in set(numbers["seq_len"])


def test_scaling_can_be_filtered_and_put_in_one_chart(complete: str):
    app = show("scaling")
    app.multiselect[0].set_value([CURVE]).run()
    assert [subheader.value for subheader in check(app).subheader] == ["Memory, reported", "Fitted exponents"]
    assert asked(app) == {"run": [CURVE]}
    app.multiselect[0].set_value([]).run()
    assert "Choose a run" in text(check(app))
    assert asked(app) == {"run": ["none"]}
    app = show("scaling")
    _control(app.segmented_control, "Reported results").set_value("together").run()
    assert [subheader.value for subheader in check(app).subheader][1] == "Peak memory allocated"


def test_values_of_filters_are_text_that_the_address_keeps(database: str):
    name, run_id = "![x](y) **b** <b> :red[x]", "20261119-090000-odd-ab12"
    point = {"run_id": run_id, "point_id": f"{run_id}/0"}
    axes = {"implementation": name, "workload": "attention", "seq_len": 64, "device": "cpu"}
    upgrade(database)
    with Store.open(database) as store:
        store.apply_many(
            [
                RunRecord(run_id=run_id, name="odd", kind="scaling", spec={}, spec_hash="5"),
                PointRecord(**point, index=0, key="k", label="l", config={}, axes=axes),
            ]
        )
    app = show("scaling", run=run_id)
    assert _pills(app, "Implementation").options == [r"!\[x\](y) \*\*b\*\* \<b\> \:red\[x\]"]
    _pills(app, "Implementation").set_value([name]).run()
    assert asked(check(app))["implementation"] == [name]


def test_scaling_shows_the_run_that_a_link_names(complete: str):
    app = show("scaling", run="reported-peers-H200")
    assert app.multiselect[0].value == ["reported-peers-H200"]
    assert "Time, reported" in text(app)
    shapes = _pills(app, "Shape")
    assert shapes.value == ["12/2 heads d64"]  # one of three, which would hide each other
    shown = len(_fits(app))
    shapes.set_value(["12/2 heads d64", "64/4 heads d128"]).run()
    assert len(_fits(check(app))) > shown


def test_scaling_of_a_live_run(half_finished: str):
    said = text(show("scaling"))
    assert "3 points to go" in said
    assert "three sequence lengths" in said


def test_runs_can_be_found(complete: str):
    app = show("runs")
    assert len(app.dataframe[0].value) == 7
    app.text_input[0].set_value("report 002").run()
    assert check(app).dataframe[0].value["Run"].tolist() == ["report 002"]
    app.selectbox[0].set_value("measured").run()
    assert "No run fits" in text(check(app))
    assert asked(app) == {"text": ["report 002"], "origin": ["measured"]}
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
    assert "c0ffee" in said
    assert "with uncommitted changes" in said
    assert "the database was away" in said
    assert len(app.get("download_button")) == 1


def test_a_finished_point_in_detail(complete: str):
    said = text(show("runs", run=RUN, point=f"{RUN}/14"))
    assert "peak_extra_memory" in said
    assert "slc: chunked" in said
    assert "2.13.0" in said  # the environment
    assert "warm" in said  # its log


def test_a_failed_point_in_detail(complete: str):
    said = text(show("runs", point=f"{RUN}/25"))
    assert "no progress for 120 s" in said
    assert "RuntimeError: deliberate" in said  # the end of its stderr
    assert "No numbers" in said


@pytest.mark.parametrize("query", [{"run": "nothing"}, {"run": RUN, "point": "nothing/1"}])
def test_a_link_to_nothing_is_explained(complete: str, query: dict[str, str]):
    assert "There is no" in text(show("runs", **query))


def test_a_live_run_shows_its_progress(half_finished: str):
    said = text(show("runs", run=HALF))
    assert "timing 3/10" in said
    assert "pending" in said
    assert "running" in text(show("runs", run=HALF, point=f"{HALF}/2"))


def test_an_ended_point_shows_on_the_next_read(half_finished: str):
    app = show("runs", run=HALF)
    with Store.open(half_finished) as store:
        at = datetime.now(UTC) + timedelta(seconds=1)
        end = OutcomeRecord(
            run_id=HALF, point_id=f"{HALF}/2", attempt=1, state=PointState.OOM, reason="too large", at=at
        )
        store.apply_many([end, StartRecord(run_id=HALF, point_id=f"{HALF}/3", attempt=1, at=at)])
    import streamlit as st

    st.cache_data.clear()  # in place of waiting for the time to live
    states: pd.Series = check(app.run()).dataframe[0].value["State"]
    assert states.str.contains("oom").sum() == 1


def test_a_file_of_a_point_is_shown_and_can_be_downloaded_whole(complete: str, tmp_path: Path):
    store = ArtifactStore(f"file://{tmp_path / 'artifacts'}")
    with Store.open(complete) as opened:
        for name, content in (("note.txt", "a note\n"), ("trace.bin", "\x00trace")):
            file = store.put(Source(name, content), f"{RUN}/0000/1/{name}")
            opened.apply(ArtifactRecord(run_id=RUN, point_id=f"{RUN}/0", attempt=1, artifact=file))
            assert data.artifact(file.path, file.size, file.sha256, "") == content.encode()
    app = show("runs", run=RUN, point=f"{RUN}/0")
    said = text(app)
    assert "a note" in said
    assert "Its text is not in the database." in said
    assert [button.label for button in app.get("download_button")] == ["Download"] * 2
    assert "Not in the artifact store of this dashboard" in said  # the point's stdout


def test_of_many_files_one_is_chosen(complete: str, tmp_path: Path):
    store = ArtifactStore(f"file://{tmp_path / 'artifacts'}")
    with Store.open(complete) as opened:
        for number in range(200):
            file = store.put(Source(f"n{number:03d}.txt", f"text {number}"), f"{RUN}/0000/1/n{number:03d}.txt")
            opened.apply(ArtifactRecord(run_id=RUN, point_id=f"{RUN}/0", attempt=1, artifact=file))
    app = show("runs", run=RUN, point=f"{RUN}/0")
    assert len(app.selectbox[0].options) == 201  # with the point's stdout
    assert "text 0" in text(app)
    said = text(check(app.selectbox[0].select_index(150).run()))
    assert "text 150" in said
    assert "text 0" not in said
    assert len(app.get("download_button")) == 1


def test_a_file_that_was_not_kept_or_is_not_here_is_told_on_the_point(complete: str):
    with Store.open(complete) as opened:
        for number in range(8):
            about = {"run_id": RUN, "point_id": f"{RUN}/0", "message": f"file not kept: 'a/{number}'"}
            opened.apply(EventRecord(level="warning", **about))
    app = show("runs", run=RUN, point=f"{RUN}/0")
    said = text(app)
    assert "file not kept: 'a/4'" in said
    assert "a/5" not in said
    assert "3 more events" in said
    assert "Not in the artifact store of this dashboard, `file://" in said
    assert len(app.get("download_button")) == 0


@pytest.mark.parametrize("path", ["../nsa.db", "/etc/passwd", "http://127.0.0.1:1/x"])
def test_a_hostile_path_in_the_database_is_not_downloaded(complete: str, path: str):
    with pytest.raises(ArtifactError, match="is no path below the artifact store"):
        data.artifact(path, 1, "", "")


def test_a_file_that_is_not_here_says_where_the_run_kept_it(complete: str):
    with pytest.raises(ArtifactError, match=r"is not in the artifact store .*; the run kept it in s3://b/p \(node n\)"):
        data.artifact("r/0000/1/a.txt", 1, "", "s3://b/p (node n)")
