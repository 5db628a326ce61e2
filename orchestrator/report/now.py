"""Sections on the present: nodes and their GPUs, what is measured, what waits and why, how the last day's runs ended.

`nsa status` and the page Now show the same sections. `jobs` are Ray's jobs (`orchestrator.execute.ray_http`): one that
failed before its driver began, or has not begun, has no run.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import pandas as pd

from jobs.schema.plain_text import in_a_line
from jobs.schema.quantities import LIVE, readable
from jobs.schema.states import Origin, RunState, run_in_words
from orchestrator.report.table import Table
from orchestrator.store import Store, queries

DAY = timedelta(days=1)
_SILENT = timedelta(minutes=10)  # a run without a sign of life may be one whose driver died
_TEN_YEARS = 3.2e8  # seconds
_REASON = 200  # characters
_UNITS = {quantity.name: quantity.unit for quantity in LIVE}
_BEFORE_IT_BEGAN = "failed before it began"
_NO_RUN = "failed; no run of it is stored"  # a comparison with its verdict, or a job that is not ours


class Line(NamedTuple):
    """A line of a section, and the run or the point that it is about ("": none)."""

    cells: dict[str, str]
    run_id: str = ""
    point_id: str = ""


class Section(NamedTuple):
    """A heading, what stands below it where there is no line, and the lines."""

    title: str
    none: str
    lines: list[Line]

    @property
    def table(self) -> Table:
        return Table.of(self.title, "", [line.cells for line in self.lines])


def sections(store: Store, jobs: Sequence[Mapping[str, Any]], now: datetime | None = None) -> list[Section]:
    """All that goes on at `now`, with times in its zone. Raises StoreUnavailable."""
    now = now or datetime.now(UTC)
    unended = queries.runs(store, state=RunState.RUNNING), queries.runs(store, state=RunState.PENDING)
    running, pending = (frame.iloc[::-1].to_dict("records") for frame in unended)  # the oldest first
    points = queries.running(store)
    without_run = _without_run(store, jobs)
    return [
        Section("Nodes and their GPUs", "No node has measured anything for a day.", list(_nodes(store, points, now))),
        Section("Measuring", "Nothing is measured.", [_measuring(point, now) for point in points]),
        Section("Waiting", "Nothing waits.", list(_waiting(running, pending, points, without_run, now))),
        Section("The last 24 hours, failures first", "No run ended.", last_day(store, jobs, now)),
    ]


def last_day(store: Store, jobs: Sequence[Mapping[str, Any]], now: datetime) -> list[Line]:
    """The runs that ended within a day, and Ray's jobs that failed without one: failures first, then the newest."""
    frame = queries.runs(store, origin=Origin.MEASURED, ended_since=now - DAY)
    why = queries.reasons(store, frame["run_id"].tolist())
    found: list[tuple[bool, datetime, Line]] = []
    for run in frame.to_dict("records"):
        begun = run["ok"] + run["failed"] + run["answered"] + run["cancelled"] + run["skipped"]
        failed = bool(run["failed"]) or run["state"] == RunState.FAILED
        state = run_in_words(run) if begun or run["state"] != RunState.FAILED else _BEFORE_IT_BEGAN
        reason = why.get(run["run_id"]) or run["reason"] or ""
        at = run["ended_at"].astimezone(now.tzinfo)
        line = _ended(state, run["run_id"], run["kind"], run["person"], at, reason)
        found.append((failed, run["ended_at"], line))
    for job in _without_run(store, jobs):
        if job["status"] == "FAILED" and job["end_time"] > now - DAY:
            last = (job["message"] or "").strip().rpartition("\n")[2]  # of its log, which has the error
            ours = " -m jobs " in (job["entrypoint"] or "")
            state = _BEFORE_IT_BEGAN if ours else _NO_RUN
            at = job["end_time"].astimezone(now.tzinfo)
            line = _ended(state, job["submission_id"], "Ray job", job["person"], at, last)
            found.append((ours, job["end_time"], line._replace(run_id="")))
    return [line for *_, line in sorted(found, key=lambda each: (not each[0], -each[1].timestamp()))]


def failures(lines: Sequence[Line]) -> int:
    """The number of failures among the lines of the last day, without Ray's jobs that may be no run's."""
    return sum("failed" in line.cells["State"] and line.cells["State"] != _NO_RUN for line in lines)


def seconds_left(point: Mapping[str, Any]) -> float | None:
    """Seconds until the phase of a running attempt ends at its present rate; None where that is unknown."""
    known = [point[name] for name in ("done", "total", "rate")]
    if not point["running"] or not all(value and not pd.isna(value) for value in known):
        return None
    done, total, rate = known
    seconds = max(0.0, total - done) / rate
    return seconds if seconds <= _TEN_YEARS else None


def _ended(state: str, name: str, kind: str, person: str | None, at: datetime, reason: str) -> Line:
    cells = {"State": state, "Run": name, "Kind": kind, "Person": person or "", "Ended": f"{at:%a %H:%M %Z}"}
    return Line(cells | {"Why": in_a_line(reason, _REASON)}, name)


def _nodes(store: Store, points: Sequence[Mapping[str, Any]], now: datetime) -> Iterator[Line]:
    """A line for each GPU, or processor, that a point holds, then the nodes that hold none."""
    latest = queries.latest(store, [point["point_id"] for point in points], list(_UNITS))
    for point in points:
        by_rank: dict[int, dict[str, float]] = defaultdict(dict)
        for row in latest.get((point["point_id"], point["running"]), ()):
            by_rank[row["rank"]][row["name"]] = row["value"]
        on_gpu = point["device"] == "cuda"
        for rank, values in sorted((by_rank or {0: {}}).items()):
            shown = {name: readable(value, _UNITS[name]) for name, value in values.items()}
            use, memory = ("gpu_utilization", "gpu_memory_used") if on_gpu else ("cpu_utilization", "resident_memory")
            cells = {
                "Node": point["running_on"] or "",
                "Device": f"GPU {rank}" if on_gpu else "CPU",
                "Run": point["run_name"],
                "Person": point["person"] or "",
                "Busy": shown.get(use, ""),
                "Memory": shown.get(memory, ""),
                "Temperature": shown.get("gpu_temperature", ""),
            }
            yield Line(cells, point["run_id"], point["point_id"])
    busy = {point["running_on"] for point in points}
    for node, last in queries.nodes(store, since=now - DAY).items():
        if node not in busy:
            idle = f"idle for {_ago(last, now)}"
            names = ("Device", "Run", "Person", "Busy", "Memory", "Temperature")
            yield Line({"Node": node} | dict.fromkeys(names, "") | {"Device": idle})


def _measuring(point: Mapping[str, Any], now: datetime) -> Line:
    progress = point["phase"] or ""
    if point["total"] and not pd.isna(point["total"]):
        progress += f" {point['done']:.0f} of {point['total']:.0f} ({100 * point['done'] / point['total']:.0f} %)"
    left, heard = seconds_left(point), point["heartbeat_at"]
    silent = heard is not None and now - heard > _SILENT
    cells = {
        "Run": point["run_id"],
        "Point": point["label"],
        "Person": point["person"] or "",
        "Progress": progress,
        "Left": "" if left is None else readable(left, "s"),
        "Last sign": "" if heard is None else f"{_ago(heard, now)} ago" + (": is its driver alive?" if silent else ""),
    }
    return Line(cells, point["run_id"], point["point_id"])


def _waiting(
    running: Sequence[Mapping[str, Any]],
    pending: Sequence[Mapping[str, Any]],
    points: Sequence[Mapping[str, Any]],
    jobs: Sequence[Mapping[str, Any]],
    now: datetime,
) -> Iterator[Line]:
    """Points that wait for others of their run, then the runs that wait for a first slot, in the order of the queue."""
    ahead = [run["name"] for run in running]
    for run in running:
        measured = run["running"] + run["again"]
        if run["pending"] or not measured:
            why = f"points: {run['pending']:.0f} waiting for a slot, {measured:.0f} running"
            heard = run["created_at"] if pd.isna(run["heartbeat_at"]) else run["heartbeat_at"]
            if not measured and now - heard > _SILENT:  # sooner it is but the turn of others' points
                why += f"; if its driver is gone: nsa cancel {run['run_id']}"
            yield _in_queue("", run["run_id"], run["person"], run["created_at"], why, now)
    held = f"; measuring: {', '.join(ahead[:3])}{', ...' if len(ahead) > 3 else ''}" if ahead else ""
    lefts = [_run_left(run, points, now) for run in running]
    longest = max((left for left in lefts if left is not None), default=0)
    for place, run in enumerate(pending, 1):
        # Runs share slots, so it may have one sooner: by then all that run now have ended.
        known = place <= len(points) and None not in lefts
        within = f", within about {readable(longest, 's')}" if known else ""
        why = f"pending until a node has room for a point{within}{held}"
        yield _in_queue(f"{place} of {len(pending)}", run["run_id"], run["person"], run["created_at"], why, now)
    for job in jobs:
        if job["status"] == "PENDING":
            why = job["message"] or "Ray has not started it"
            yield _in_queue("", job["submission_id"], job["person"], job["start_time"], why, now)._replace(run_id="")


def _run_left(run: Mapping[str, Any], points: Sequence[Mapping[str, Any]], now: datetime) -> float | None:
    """Seconds until a running run ends, at its pace so far; None where that is unknown."""
    own = [point for point in points if point["run_id"] == run["run_id"]]
    if not own or any(point["heartbeat_at"] is None or now - point["heartbeat_at"] > _SILENT for point in own):
        return None
    lefts = [seconds_left(point) for point in own]
    if not run["pending"] and None not in lefts:
        return max(left for left in lefts if left is not None)
    ended = run["ok"] + run["failed"] + run["answered"]
    if run["resumed"] or not ended:
        return None
    return (run["pending"] + len(own)) * (now - run["created_at"]).total_seconds() / ended


def _in_queue(place: str, name: str, person: str | None, since: datetime, why: str, now: datetime) -> Line:
    cells = {"Place": place, "Run": name, "Person": person or "", "For": _ago(since, now)}
    return Line(cells | {"Why": in_a_line(why, _REASON)}, name)


def _without_run(store: Store, jobs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Ray's jobs that no run is known of, with their times as such, and the person whom `nsa submit` named."""
    known, found = set(queries.run_ids(store).values()), []
    for job in jobs:
        if job.get("submission_id") and job["submission_id"] not in known:
            milliseconds = {name: job.get(name) or 0 for name in ("start_time", "end_time")}
            times = {name: datetime.fromtimestamp(value / 1000, UTC) for name, value in milliseconds.items()}
            variables = (job.get("runtime_env") or {}).get("env_vars") or {}
            defaults = {"status": None, "message": None, "entrypoint": None, "person": variables.get("NSA_PERSON")}
            found.append(defaults | dict(job) | times)
    return found


def _ago(then: datetime, now: datetime) -> str:
    return readable(max(0.0, round((now - then).total_seconds())), "s")
