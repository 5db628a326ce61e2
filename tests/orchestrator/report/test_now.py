"""Sections of `nsa status` and the page Now."""

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest
from made_up_runs import planned

from dashboard import parts
from jobs.schema.states import PointState, RunState
from orchestrator.execute.ray_http import ray_jobs
from orchestrator.report.now import Section, failures, sections
from orchestrator.settings import load_settings
from orchestrator.store import Store, queries
from orchestrator.store import records as rec

NOW = datetime.now(UTC)


def ago(minutes: float) -> datetime:
    return NOW - timedelta(minutes=minutes)


def begin(run_id: str, minutes: float, points: int = 0, state=RunState.RUNNING, **more) -> list[rec.Record]:
    run = rec.RunRecord(
        run_id=run_id, at=ago(minutes), name=run_id, kind="train", spec={}, spec_hash="5", state=state, **more
    )
    at, axes = ago(minutes), {"device": "cuda"}
    return [run, *(planned(run_id, index, "nsa", 64, at, axes, label=f"point {index}") for index in range(points))]


def training() -> list[rec.Record]:
    """A running training of two ranks, of whose two points the second waits."""
    of_point = {"run_id": "train", "point_id": "train/0", "attempt": 1}
    samples = [
        rec.SeriesRecord(
            **of_point, rank=rank, name=name, unit=unit, steps=(0, 1), times=(1.0, 2.0), values=(1.0, value + rank)
        )
        for rank in range(2)
        for name, unit, value in (("gpu_utilization", "%", 90.0), ("gpu_temperature", "C", 60.0))
    ]
    start = rec.StartRecord(**of_point, at=ago(20), node="node3")
    return [*begin("train", 21, points=2, person="ada"), start, *samples]


def lines(store: Store, title: str, jobs=()) -> list[dict[str, str]]:
    [section] = [each for each in sections(store, jobs, NOW) if each.title.startswith(title)]
    return [line.cells for line in section.lines]


def test_each_gpu_shows_what_it_does_and_a_training_its_steps(store: Store) -> None:
    store.apply_many(training())
    store.beat(rec.Progress("train", "train/0", NOW, "train", 250, 1000, 2.5))
    first, second = lines(store, "Nodes")
    assert first == {
        "Node": "node3",
        "Device": "GPU 0",
        "Run": "train",
        "Person": "ada",
        "Busy": "90 %",
        "Memory": "",
        "Temperature": "60 °C",
    }
    assert (second["Device"], second["Busy"]) == ("GPU 1", "91 %")
    [measured] = lines(store, "Measuring")
    assert (measured["Progress"], measured["Left"]) == ("train 250 of 1000 (25 %)", "5 min")
    run = queries.run(store, "train") or {}
    assert parts.progress(run) == pytest.approx(0.25 / 2), "not 0 until the point ends"
    assert queries.runs(store).under_way.tolist() == [0.25]
    store.beat(rec.Progress("train", "train/0", NOW, "heldout loss", 1, 2, 1.0))
    assert parts.progress(queries.run(store, "train") or {}) == 0, "other phases are no steps"


def test_what_waits_says_why_and_its_place(store: Store) -> None:
    pending = [*begin("one", 9, state=RunState.PENDING), *begin("two", 8, state=RunState.PENDING)]
    store.apply_many([*pending, *training()])
    jobs = [
        {"submission_id": "raysubmit_9", "status": "PENDING", "message": "waits for 8 CPUs", "start_time": 1000},
        {"submission_id": None, "status": "PENDING"},
    ]
    found = lines(store, "Waiting", jobs)
    assert [(each["Place"], each["Run"]) for each in found] == [
        *(("", "train"), ("1 of 2", "one"), ("2 of 2", "two"), ("", "raysubmit_9"))
    ]
    assert [each["Why"] for each in found] == [
        "points: 1 waiting for a slot, 1 running",
        *["pending until a node has room for a point; measuring: train"] * 2,
        "waits for 8 CPUs",
    ]


def test_a_run_whose_turn_it_is_not_is_not_taken_for_dead(store: Store) -> None:
    store.apply_many([*begin("turns", 9, points=2), *begin("dead", 11, points=2)])
    assert [each["Why"] for each in lines(store, "Waiting")] == [
        "points: 2 waiting for a slot, 0 running; if its driver is gone: nsa cancel dead",
        "points: 2 waiting for a slot, 0 running",
    ]


def test_the_wait_is_estimated_by_the_pace_of_the_runs_that_measure(store: Store) -> None:
    def why(run_id: str = "one") -> str:
        return next(each["Why"] for each in lines(store, "Waiting") if each["Run"] == run_id).partition(";")[0]

    of_point = [{"run_id": "sweep", "point_id": f"sweep/{index}", "attempt": 1} for index in range(2)]
    store.apply_many(
        [
            *begin("one", 9, state=RunState.PENDING),
            *begin("two", 8, state=RunState.PENDING),
            *begin("sweep", 40, points=4),
            rec.StartRecord(**of_point[0], at=ago(40), node="node3"),
        ]
    )
    store.beat(rec.Progress("sweep", "sweep/0", NOW, "", None, None, None))
    unknown = "pending until a node has room for a point"
    assert why() == unknown, "no point has ended"
    ended = rec.OutcomeRecord(**of_point[0], at=ago(20), state=PointState.OK)
    store.apply_many([ended, rec.StartRecord(**of_point[1], at=ago(20), node="node3")])
    store.beat(rec.Progress("sweep", "sweep/1", NOW, "", None, None, None))
    assert why() == f"{unknown}, within about 2 h", "three more at 40 min each"
    assert why("two") == unknown, "one slot is not for both"
    store.apply_many(training())
    store.beat(rec.Progress("train", "train/0", NOW, "train", 250, 1000, 2.5))
    assert why() == unknown, "a point of the training waits, and none has ended"
    store.apply_many([rec.OutcomeRecord(run_id="train", point_id="train/1", attempt=1, state=PointState.CANCELLED)])
    assert why("two") == f"{unknown}, within about 2 h", "the longest of both"
    store.beat(rec.Progress("train", "train/0", ago(60), "train", 250, 1000, 2.5))
    assert why() == unknown, "silent for an hour"
    assert [each["Last sign"].endswith("is its driver alive?") for each in lines(store, "Measuring")] == [False, True]
    store.beat(rec.Progress("train", "train/0", NOW, "train", 250, 1000, 2.5))
    store.apply_many(begin("sweep", 40, points=4, resumed=1)[:1])
    assert why() == unknown, "points that a resumed run kept took none of its time"


def test_the_last_day_begins_with_failures(store: Store) -> None:
    store.apply_many([*begin("old", 60 * 26), rec.RunEndRecord(run_id="old", at=ago(60 * 25), state=RunState.FAILED)])
    ends = {"well": RunState.DONE, "bad": RunState.DONE, "refused": RunState.FAILED, "stopped": RunState.CANCELLED}
    states = {"well": (PointState.OK,), "bad": (PointState.OK, PointState.HANG), "stopped": (PointState.CANCELLED,)}
    for minutes, (run_id, end) in enumerate(ends.items(), 5):
        outcomes = [
            rec.OutcomeRecord(
                run_id=run_id, point_id=f"{run_id}/{index}", attempt=1, at=ago(minutes), state=state,
                reason=None if state is PointState.OK else "silent",
            )
            for index, state in enumerate(states.get(run_id, ()))
        ]  # fmt: skip
        closing = rec.RunEndRecord(run_id=run_id, at=ago(minutes), state=end, reason="lenghts: unknown key")
        store.apply_many([*begin(run_id, 30, points=len(outcomes), submission_id=f"job-{run_id}"), *outcomes, closing])
    store.apply_many([rec.EventRecord(run_id="stopped", message="cancelled by eve with nsa cancel")])
    ended = {"end_time": 1000 * ago(2).timestamp(), "status": "FAILED"}
    jobs = [
        {
            "submission_id": "raysubmit_1",
            "entrypoint": "python -m jobs a.yaml",
            "message": "log\nImportError: x\n",
            **ended,
        },
        {"submission_id": "compare", "entrypoint": "python -c x compare", "message": "slower\n", **ended},
        {"submission_id": "job-bad", **ended},
        {"submission_id": "raysubmit_0", **ended, "end_time": 1000 * ago(60 * 30).timestamp()},
    ]
    found = lines(store, "The last 24 hours", jobs)
    assert [(each["State"], each["Run"], each["Why"]) for each in found] == [
        ("failed before it began", "raysubmit_1", "ImportError: x"),
        ("done, 1 of 2 failed", "bad", "point 1: hang, silent"),
        ("failed before it began", "refused", "lenghts: unknown key"),
        ("failed; no run of it is stored", "compare", "slower"),
        ("done", "well", "lenghts: unknown key"),
        ("cancelled", "stopped", "cancelled by eve with nsa cancel"),
    ]
    assert failures(sections(store, jobs, NOW)[-1].lines) == 3


def test_what_was_resumed_or_asked_for_is_no_reason(store: Store) -> None:
    of_point = {"run_id": "search", "point_id": "search/0", "attempt": 1}
    run, point = begin("search", 30, points=1)
    store.apply_many(
        [
            *(run, point.model_copy(update={"answers": ("hang", "oom")})),
            rec.OutcomeRecord(**of_point, at=ago(9), state=PointState.HANG, reason="silent"),
            rec.RunEndRecord(run_id="search", at=ago(9), state=RunState.CANCELLED),
            rec.EventRecord(run_id="search", message="cancelled by eve with nsa cancel"),
        ]
    )
    assert queries.reasons(store, ["search"]) == {"search": "cancelled by eve with nsa cancel"}
    store.apply_many([rec.RunEndRecord(run_id="search", at=ago(8), state=RunState.DONE)])
    assert queries.reasons(store, ["search"]) == {}


def test_where_nothing_goes_on_each_section_says_so(sqlite_store: Store) -> None:
    found = sections(sqlite_store, ())
    assert not any(section.lines for section in found)
    assert all(isinstance(section, Section) and section.none.endswith(".") for section in found)


@pytest.fixture
def cluster() -> Iterator[SimpleNamespace]:
    """An HTTP server in the place of Ray's dashboard, that notes what it was asked with."""
    seen = SimpleNamespace(answer=b"[]", tokens=[], url="", status=200)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.tokens.append(self.headers.get("Authorization"))
            self.send_response(seen.status if self.path == "/api/jobs/" else 404)
            self.send_header("Location", "/elsewhere")
            self.end_headers()
            self.wfile.write(seen.answer)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        seen.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield seen
        server.shutdown()


def test_rays_jobs_are_asked_for_with_the_token(cluster: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_RAY_DASHBOARD", cluster.url)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    cluster.answer = json.dumps([{"submission_id": "a"}, "odd"]).encode()
    assert ray_jobs(load_settings()) == [{"submission_id": "a"}]
    assert cluster.tokens == ["Bearer secret"]
    cluster.answer = b"not JSON"
    assert ray_jobs(load_settings()) is None
    cluster.status = 302
    assert ray_jobs(load_settings()) is None
    assert cluster.tokens[2:] == ["Bearer secret", None], "another host may be meant"
    monkeypatch.setenv("NSA_RAY_DASHBOARD", "http://127.0.0.1:1")
    assert ray_jobs(load_settings()) is None
