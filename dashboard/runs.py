"""Runs page: list of runs, one run, one point. Deep links: ?run=ID&point=ID."""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import data, grids, help_pages, parts
from dashboard.live import live_series, remaining
from jobs.schema.plain_text import in_a_line
from jobs.schema.quantities import Plot, Quantity, in_words, readable_interval, written_unit
from jobs.schema.states import Origin, PointState, RunState, again_in_words, reason_in_words, run_in_words
from orchestrator.execute.artifacts import kept_in
from orchestrator.report.charts import drawn
from orchestrator.report.table import flat
from orchestrator.store import Store

_WARNINGS = 5
_NAME = 100  # characters shown of a name


@data.explained
def page() -> None:
    store = data.open_store()
    run_id, point_id = st.query_params.get("run"), st.query_params.get("point")
    for name, value in (("run", run_id), ("point", point_id)):
        if value:  # a link within a page does not update the browser's address
            st.query_params[name] = value
    if point_id and not run_id:
        run_id = point_id.rpartition("/")[0]
    if run_id and point_id:
        _point_page(store, run_id, point_id)
    elif run_id:
        _run_page(store, run_id)
    else:
        _list_page(store)


def _list_page(store: Store) -> None:
    st.title("Runs")
    if not data.counts(store)["runs"]:
        help_pages.nothing_yet()
        return
    columns = st.columns([3, 2, 2, 2], vertical_alignment="bottom")
    hint = "id, name, source, host, person, tag or note"
    text = columns[0].text_input("Search", placeholder=hint, icon=":material/search:", key="text", bind="query-params")
    options = {"origin": list(Origin), "state": list(RunState), "kind": sorted(data.names(store)["kind"].unique())}
    filters = {"text": text or None}
    for column, (name, values) in zip(columns[1:], options.items(), strict=True):
        title, shown = name.capitalize(), [str(value) for value in values]
        filters[name] = column.selectbox(title, shown, index=None, placeholder="any", key=name, bind="query-params")
    live = bool(data.counts(store)["runs_running"])
    st.caption("Click a row to open the run.")
    st.fragment(_list, run_every=data.LIVE_SECONDS if live else data.IDLE_SECONDS)(store, filters)


@data.explained
def _list(store: Store, filters: Mapping[str, Any]) -> None:
    frame = data.runs(store, **filters)
    if frame.empty:
        st.info("No run fits these filters.", icon=":material/filter_alt_off:")
        return
    chosen = grids.runs(frame, data.run_notes(store, frame), key="runs")
    if chosen is not None:
        st.switch_page("runs.py", query_params={"run": chosen})


def _run_page(store: Store, run_id: str) -> None:
    _link("All runs")
    run = data.run(store, run_id)
    if run is None:
        st.warning(f"There is no run {parts.code(run_id)} in this database.", icon=":material/search_off:")
        return
    st.title(parts.plain(run["name"]))
    live = run["state"] in (RunState.RUNNING, RunState.PENDING)
    st.fragment(_run_now, run_every=data.LIVE_SECONDS if live else None)(store, run_id, live)
    with st.container(horizontal=True, vertical_alignment="center"):
        grids.rows_button(lambda: data.csv(store, [run_id]), run_id)
        if len(set(data.scaling(store, run_ids=[run_id])["seq_len"])) > 1:
            st.page_link("scaling.py", label="Its scaling", icon=":material/show_chart:", query_params={"run": run_id})
    provenance, spec, events = st.tabs(["Provenance", "Spec", "Events"], key="tab", bind="query-params")
    with provenance:
        grids.facts(_provenance(run))
    with spec:
        st.json(run["spec"], expanded=2)
    with events:
        found = data.events(store, run_id)
        if found.empty:
            st.caption("Nothing out of the ordinary happened.")
        else:
            names = {"at": "When", "level": "Level", "message": "What", "point_id": "Point"}
            when = st.column_config.DatetimeColumn(format="YYYY-MM-DD HH:mm:ss", timezone=str(parts.zone()))
            shown = found.assign(message=found["message"].map(in_a_line)).rename(columns=names)
            st.dataframe(shown, hide_index=True, column_config={"When": when})


@data.explained
def _run_now(store: Store, run_id: str, live: bool) -> None:
    """Show the live part of a run: state, progress, points."""
    run = data.run(store, run_id)
    if run is None or live != (run["state"] in (RunState.RUNNING, RunState.PENDING)):
        st.rerun()
    assert run is not None
    st.markdown(
        f"{parts.badge(run['state'], parts.RUN_STATES)}{run_in_words(run).removeprefix(run['state'])} "
        f"{parts.badge(run['origin'], parts.ORIGINS)} {parts.code(run['run_id'])}"
    )
    if run["reason"]:
        mistakes = map(parts.plain, run["reason"].splitlines())  # of a refused job: one a line
        st.warning(f"**{run['state']}**: " + "\n\n".join(mistakes), icon=":material/info:")
    done = f"{parts.tally(run)} of {parts.count(run['points'], 'point')}"
    if live:
        st.progress(parts.progress(run), text=done)
    else:
        took = f" in {grids.took(run)}" if run["origin"] == Origin.MEASURED else ""
        device = f" on {parts.plain(run['gpu'] or run['host'])}" if run["gpu"] or run["host"] else ""
        answer = parts.plain(data.answer(store, run_id, done))
        st.markdown(f"{done}{took}{device}" + f": **{answer}**" * bool(answer))
    points = data.points(store, run_id)
    for point in data.running(store, run_id):
        with st.container(horizontal=True, vertical_alignment="center"):
            left = f" · {remaining(point)}" if remaining(point) else ""
            st.caption(f":material/autorenew: {parts.doing(point)}{left}", width="content")
            _link("Live", icon=":material/monitoring:", run=run_id, point=point["point_id"])
    if points.empty:
        st.caption("No point has been planned yet." if live else "It ended before its first point.")
        return
    charts = data.kind_charts(store, run_id, run["kind"], run["state"], parts.tally(run))
    for column, chart in zip(st.columns(len(charts) or 1), charts, strict=False):  # side by side
        with column:
            grids.chart(chart, key=chart.title)
    _warnings(data.events(store, run_id)["message"].tolist())
    st.caption("Click a row to see a point's numbers, route, environment and logs.")
    chosen = grids.points(
        points, data.measurements(store, run_ids=[run_id]), data.quantities(store, [run_id]), key="points"
    )
    if chosen is not None:
        st.switch_page("runs.py", query_params={"run": run_id, "point": chosen})


def _warnings(messages: list[str]) -> None:
    lines = [parts.plain(message) for message in messages[:_WARNINGS]]
    if more := len(messages) - len(lines):
        lines.append(f"{parts.count(more, 'more event')}: see the run's page, Events")
    if lines:
        st.warning("  \n".join(lines), icon=":material/info:")


def _provenance(run: dict[str, Any]) -> dict[str, str]:
    dirty = {True: " with uncommitted changes", False: " (clean)"}.get(run["git_dirty"], "")
    commit = f"{parts.code(run['git_commit'])}{dirty}" if run["git_commit"] else "–"
    texts = ("spec_hash", "code_hash", "submission_id", "artifacts", "artifact_store")
    return {
        "Kind": parts.plain(run["kind"]),
        "Source": parts.plain(run["source"] or "–"),
        "Commit": commit,
        "Submitted by": parts.plain(run["person"] or "–"),
        "Tags": parts.plain(run["tags"] or "–"),
        "Notes": parts.plain(run["notes"] or "–"),
        "Started": parts.moment(run["created_at"]),
        "Ended": parts.moment(run["ended_at"]),
        "Took": grids.took(run),
        "Host": parts.plain(run["host"] or "–"),
        "GPU": parts.plain(run["gpu"] or "–"),
        "Resumed": parts.count(run["resumed"], "time"),
        **{in_words(name): parts.code(run[name]) if run[name] else "–" for name in texts},
    }


def _point_page(store: Store, run_id: str, point_id: str) -> None:
    point = data.point(store, point_id)
    if point is None:
        _link("All runs")
        st.warning(f"There is no point {parts.code(point_id)} in this database.", icon=":material/search_off:")
        return
    with st.container(horizontal=True):
        _link("All runs")
        _link(parts.plain(point["run_name"]), run=run_id)
    st.title(parts.plain(parts.named(point["label"])))
    latest = point["again"] or point["state"]
    live = not PointState(latest).ended
    st.fragment(_point_now, run_every=data.LIVE_SECONDS if live else None)(store, point_id, latest)
    st.fragment(live_series, run_every=data.LIVE_SECONDS if point["running"] else None)(store, point_id)
    _measured(store, point)
    names = ["Environment", "Configuration", "Logs and artifacts"]
    first = names[0] if point["state"] == PointState.OK else names[2]
    environment, config, files = st.tabs(names, default=first, key="part", bind="query-params")
    with environment:
        if point["environment"]:
            values = flat(point["environment"]).items()
            texts = {name: json.dumps(v, ensure_ascii=False) if isinstance(v, list) else str(v) for name, v in values}
            empty = ("", "None", "[]", "{}")
            grids.facts({parts.plain(name): "–" if v in empty else parts.plain(v) for name, v in texts.items()})
        else:
            st.caption("No environment was noted.")
    with config:
        st.json(point["config"], expanded=2)
    with files:
        _files(store, data.run(store, run_id) or {}, point)


@data.explained
def _point_now(store: Store, point_id: str, latest: str) -> None:
    """Show the live part of a point: its state, and what its latest attempt does."""
    point = data.point(store, point_id)
    if point is None or (point["again"] or point["state"]) != latest:
        st.rerun()
    assert point is not None
    state = point["state"]
    st.markdown(
        f"{parts.badge(state, parts.POINT_STATES)} {parts.badge(point['origin'], parts.ORIGINS)} "
        f"{parts.code(point_id)} · attempt {point['attempt']} · "
        f"took {parts.duration(point['started_at'], point['ended_at'])}"
    )
    told = [parts.doing(point)] if latest == "running" else []
    if again := again_in_words(point):
        told.append(f"{parts.plain(again)}; attempt {point['attempt']} counts until a later one has an outcome")
    if told:
        st.info("\n\n".join(told), icon=":material/autorenew:")
    if reason := reason_in_words(point):
        st.warning(f"**{state}**: {parts.plain(reason)}", icon=":material/info:")


def _measured(store: Store, point: dict[str, Any]) -> None:
    """Show the point's metrics, and the route and node behind them."""
    metrics, quantities = data.metrics(store, point["point_id"]), data.quantities(store, [point["run_id"]])
    st.subheader("Measured" if point["origin"] == Origin.MEASURED else "Reported")
    if metrics.empty:
        st.caption(f"No numbers: only a point that ended ok has some; this one's state is {point['state']}.")
    else:
        ordered = sorted(metrics.to_dict("records"), key=lambda row: quantities.place(row["name"]))
        grids.table([_metric(row, quantities.of(row["name"], row["unit"])) for row in ordered])
    for row in metrics.to_dict("records"):
        quantity = quantities.of(row["name"], row["unit"])
        if len(row["samples"]) < 3 or quantity.plot in (Plot.RATE, Plot.STEP_RATE):  # a rate is the inverse of a time
            continue
        title = f"{quantity.title}: all {len(row['samples'])} samples"
        rows = [{"sample": number, "value": value} for number, value in enumerate(row["samples"], 1)]
        grids.chart(drawn("samples", rows, title=title, unit=written_unit(row["unit"])), height=210)
    st.subheader("What ran")
    facts = {"Route": parts.plain(parts.route(point["route"])), "Node": parts.plain(point["node"] or "–")}
    facts |= {"Estimated memory": parts.size(point["estimate_bytes"]), "Key": parts.code(point["key"])}
    grids.facts(facts | {"Ended": parts.moment(point["ended_at"])})


def _metric(row: Mapping[Any, Any], quantity: Quantity) -> dict[str, str]:
    unit = row["unit"]
    cells = {
        "Quantity": quantity.title,
        "Metric": row["name"],
        "Value": parts.number(row["value"], unit),
        "95 % interval": readable_interval(row["ci_low"], row["ci_high"], row["samples"], unit),
        "p10 to p90": readable_interval(row["p10"], row["p90"], None, unit),
        "Samples": str(len(row["samples"]) or ""),
        "How": row["method"],
    }
    return {name: parts.plain(text or "–") for name, text in cells.items()}


def _files(store: Store, run: Mapping[str, Any], point: Mapping[str, Any]) -> None:
    """Draw what happened to a point's files, then the files."""
    events = data.events(store, point["run_id"])
    _warnings(events.loc[events["point_id"] == point["point_id"], "message"].tolist())
    files = data.artifacts(store, point["point_id"]).to_dict("records")
    if files:
        st.fragment(_file)(files, f"{kept_in(run)} (node {point['node'] or run.get('host') or 'unknown'})")
    else:
        st.caption("No files were kept.")


def _file(files: list[dict[Any, Any]], where: str) -> None:
    """Draw the file that is chosen."""

    def title(row: Mapping[str, Any]) -> str:
        name = row["name"] if len(row["name"]) <= _NAME else f"{row['name'][:_NAME]}…"
        return f"{name} · attempt {row['attempt']} · {parts.size(row['size'])}"

    label = f"{parts.count(len(files), 'file')}, {parts.size(sum(row['size'] for row in files))}"
    row = st.selectbox(label, files, format_func=title, key="file")
    st.caption(f"{parts.code(row['path'])} · sha256 {parts.code(row['sha256'][:16])}")
    _download(row, where)
    if row["truncated"]:
        st.caption("Only its end is shown.")
    if not pd.isna(row["content"]) and row["content"]:
        height = 420 if row["content"].count("\n") > 18 else "content"
        st.code(row["content"], language=None, wrap_lines=True, height=height)
    else:
        st.caption("Empty." if not row["size"] else "Its text is not in the database.")


def _download(row: Mapping[str, Any], where: str) -> None:
    """Offer the whole file, which is read when the button is clicked; not one that is known to be missing, as the
    browser would not show why its download failed."""
    if here := data.missing(row["path"]):
        st.caption(f"Not in the artifact store of this dashboard, {parts.code(here)}. Kept in {parts.code(where)}.")
        return
    if row["size"] > data.DOWNLOAD_BYTES:
        st.caption("Too large for a browser; copy it with `nsa artifacts RUN --point N --out FOLDER`.")
        return
    st.download_button(
        "Download",
        data=partial(data.artifact, row["path"], row["size"], row["sha256"], where),
        file_name=row["name"],
        mime="application/octet-stream",
        icon=":material/download:",
        key=f"download {row['attempt']} {row['name']}",
        on_click="ignore",
        help=parts.plain(f"kept in {where}"),
    )


def _link(label: str, icon: str = ":material/arrow_back:", **query: str) -> None:
    st.page_link("runs.py", label=label, icon=icon, query_params=query)


if __name__ == "__main__":
    page()
