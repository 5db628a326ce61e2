"""The webhook is told of a run's end, tried against a server on loopback; its failure costs a run nothing."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from made_up_runs import changed, make_sweep

from orchestrator.run import driver
from orchestrator.run.webhook import Ended
from orchestrator.store import Store
from orchestrator.store.records import OutcomeRecord, RunRecord

RUN = "20261121-120000-demo-abcd"


@pytest.fixture
def told() -> Iterator[tuple[str, list[dict]]]:
    """The address of a server on loopback, and what it is sent."""
    received = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response({"/broken": 500, "/moved": 301}.get(self.path, 204))
            self.send_header("Location", "/hook")
            self.end_headers()

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", received
        server.shutdown()


def test_a_run_that_ended_is_told_and_a_failure_costs_it_nothing(
    home, spec, told, monkeypatch, capsys, quick_probe
) -> None:
    url, received = told
    monkeypatch.setenv("NSA_PERSON", "ada")
    failed = "NSA_WEBHOOK: was not told of the run's end (HTTP Error {}"
    for path, problem in (("/hook", ""), ("/broken", failed.format(500)), ("/moved", failed.format(301))):
        monkeypatch.setenv("NSA_WEBHOOK", url + path)
        assert driver.main([str(spec("value = 1.0", "raise ValueError", isolation="warm")), "--local"]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert any(line.startswith(problem) for line in lines)
        assert lines[-1].endswith(": done, 1 of 2 failed")
    message = received[0]
    assert message["text"] == f"{message['run_id']} (ada): done, 1 of 2 failed"
    assert (message["failed"], message["points"], message["no_go"], message["slower"]) == (1, 2, [], [])
    monkeypatch.setattr(Ended, "judged", lambda *_: 1 / 0)
    assert driver.main([str(spec("value = 1.0", "raise ValueError", isolation="warm")), "--local"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("NSA_WEBHOOK: was told no verdict (ZeroDivisionError: ") for line in lines)
    assert len(received) == 4


def test_each_server_has_its_own_form(sqlite_store: Store) -> None:
    """Each message names what got slower since the last run of this name; a rerun of one point is no such run, nor
    is one that was cancelled."""
    laws, lengths = {"chunked": 1.0}, (512, 1024)
    sqlite_store.apply_many(make_sweep(laws=laws, lengths=lengths))
    sqlite_store.apply_many(changed(make_sweep("again", laws, lengths[:1]), year=2027, run={"spec": {"only": ["x"]}}))
    *cancelled, end = changed(make_sweep("cancelled", laws, lengths[1:]), year=2028)
    sqlite_store.apply_many([*cancelled, end.model_copy(update={"state": "cancelled"})])
    after = changed(make_sweep(RUN, laws, lengths), year=2029)
    place = next(place for place, record in enumerate(after) if isinstance(record, OutcomeRecord))
    time, *others = after[place].metrics
    slow = time.model_copy(update={"value": 1.5, "samples": tuple(1.5 + n / 1e6 for n in range(6))})
    after[place] = after[place].model_copy(update={"metrics": (slow, *others)})
    sqlite_store.apply_many(after)
    assert isinstance(after[0], RunRecord)
    ended = Ended(after[0], "done", 0, 2).judged(sqlite_store, [])
    [slower] = ended.slower
    assert slower.startswith("than 20261120-120000-demo-abcd: time of chunked forward+backward 512: 1.5")
    text = f"{RUN}: done\nslower {slower}"
    assert ended.message("https://discord.com/api/webhooks/1/a") == {"content": text, "allowed_mentions": {"parse": []}}
    assert ended.message("https://hooks.slack.com/services/T/B/x") == {"text": text}
    plain = ended.message("https://mattermost.example.org/hooks/x")
    assert (plain["text"], plain["run_id"], plain["slower"]) == (text, RUN, (slower,))
