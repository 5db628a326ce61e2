"""The pages of docs/results are those of the committed journals, and the journals tell of no machine."""

import gzip
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from jobs.schema.states import Origin
from jobs.specs.load import load_spec
from jobs.specs.spec import JobSpec
from orchestrator.cli.commands import reference_data
from orchestrator.errors import UserError
from orchestrator.judge.rules import READY_SPECS
from orchestrator.report import template
from orchestrator.store import Store, importer, journal, publish, queries
from orchestrator.store.records import RECORD, ArtifactRecord

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
DURATIONS = "orchestrator/judge/durations.csv"
MADE = (".md", ".png", ".csv")
JOURNALS = sorted((RESULTS / "data").glob("*.jsonl.gz"))
DRILL = next(path for path in JOURNALS if "drill" in path.name)
RANKS = next(path for path in JOURNALS if "train-2gpu" in path.name)

Lines = list[dict[str, Any]]


def lines(path: Path) -> Lines:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def ready(file: str, settings: Sequence[str]) -> JobSpec:
    return load_spec(READY_SPECS / file, settings)


def test_pages_and_durations_are_those_of_the_journals(tmp_path: Path) -> None:
    """They are what `make results` writes, pictures apart."""
    with pytest.MonkeyPatch.context() as patch, Store.open(f"sqlite:///{tmp_path / 'nsa.db'}") as store:
        for name in ("NSA_HOME", "NSA_DATABASE_URL", "NSA_GATES"):
            patch.setenv(name, "")  # no setting of this machine may change a page
        # Drawing takes seconds, and pictures are not compared.
        patch.setattr("vl_convert.vegalite_to_png", lambda chart, scale: b"")
        for path in reference_data():
            importer.import_file(store, path)
        run_ids = list(queries.run_ids(store, origin=Origin.MEASURED))
        template.render_folder(store, RESULTS / "templates", run_ids, ready, tmp_path / "docs" / "results")
        template.render(store, ROOT / f"{DURATIONS}.j2", run_ids, ready, tmp_path / DURATIONS)
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.suffix in MADE}
    pages = {path.relative_to(ROOT).as_posix() for path in RESULTS.rglob("*") if path.suffix in MADE}
    assert written == pages | {DURATIONS}
    texts = [name for name in written if not name.endswith(".png")]
    stale = [name for name in texts if (tmp_path / name).read_text() != (ROOT / name).read_text()]
    assert not stale, f"run `make results`: {', '.join(sorted(stale))}"


def test_the_first_readme_has_rows_of_the_results() -> None:
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if re.match(r"\| \d+/\d+, \d+ \|", line)]
    page = (RESULTS / "README.md").read_text().splitlines()
    assert len(rows) >= 6
    assert not [row for row in rows if row not in page]


@pytest.mark.parametrize("path", JOURNALS, ids=lambda path: path.name)
def test_a_committed_journal_tells_of_no_machine(path: Path) -> None:
    """Its public form is what it is."""
    records = list(journal.read(path))
    taken = publish.public_lines(path, records)
    unchanged = taken == [RECORD.dump_json(record).decode() for record in records]
    assert unchanged  # by itself: a comparison of megabytes takes pytest minutes to explain
    text = gzip.decompress(path.read_bytes()).decode().replace("https://docs.pytorch.org/", "")  # in its messages
    assert not [word for word in ("/tmp", "/home", "/root", "GPU-", "uuid", "://") if word in text]
    assert not any(isinstance(record, ArtifactRecord) for record in records)


def written(path: Path, records: Lines) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return path


def as_measured(records: Lines) -> Lines:
    """The records as a run on a host of a name, with files, wrote them."""
    host, card = "gpu7.example.org", "GPU-bf0cb8ed-bf45-f12b-5c62-1b6644d6ac6e"
    for record in records:
        match record["type"]:
            case "run":
                record |= {"host": host, "artifacts": f"/tmp/x/{record['run_id']}", "artifact_store": "file:///tmp/x"}
            case "start":
                record["node"] = host
            case "outcome" if record["environment"]:
                found = record["environment"]
                found |= {"host": host, "interpreter": "/opt/x/.venv/bin/python3"}
                found["platform"] = "Linux-6.18.44-cloud-v657-x86_64-with-glibc2.39"
                found["variables"] |= {"CUDA_HOME": "/usr/local/cuda", "NSA_HOME": "/tmp/home"}
                if "gpu" in found:
                    found["gpu"]["uuid"] = card
                if hosts := found.get("training", {}).get("hosts"):
                    found["training"]["hosts"] = [host] * len(hosts)
                if record["reason"]:
                    record["reason"] = f"{record['reason']} at /srv/a/b.py on {host}. gpu7 is 192.0.2.7, {card}"
    content = {"name": "stderr.txt", "path": "r/0000/1/stderr.txt", "size": 1, "sha256": "0", "content": f"on {host}"}
    of_point = {name: records[1][name] for name in ("v", "run_id", "at", "point_id")}
    records.insert(-1, {**of_point, "type": "artifact", "attempt": 1, "artifact": content})
    return records


@pytest.mark.parametrize("path", [DRILL, RANKS], ids=["drill", "ranks"])
def test_what_tells_of_the_machine_is_replaced_and_nothing_else(path: Path, tmp_path: Path) -> None:
    plain, private = tmp_path / "plain", tmp_path / "private"
    publish.take_in(path, plain)
    publish.take_in(written(tmp_path / "x.jsonl", as_measured(lines(path))), private)
    taken, expected = lines(private / path.name), lines(plain / path.name)
    for record in expected:
        if record["type"] == "outcome" and record["environment"] and record["reason"]:
            record["reason"] += " at b.py on host-1. host-1 is ADDRESS, GPU"
    assert taken == expected


def test_of_the_paths_of_a_text_the_last_parts_stay(tmp_path: Path) -> None:
    records = lines(DRILL)
    for config in (records[0]["spec"], records[1]["config"]):
        config["data"] = {"path": "/srv/corpora/text", "tokenizer_path": None, "heldout": 0.1}
    publish.take_in(written(tmp_path / "x.jsonl", records), tmp_path)
    taken = lines(tmp_path / DRILL.name)
    for config in (taken[0]["spec"], taken[1]["config"]):
        assert config["data"] == {"path": "text", "tokenizer_path": None, "heldout": 0.1}


def in_a_label(records: Lines) -> None:
    for record in records:
        record |= {"host": "gpu7"} if record["type"] == "run" else {}
        record |= {"node": "gpu7"} if record["type"] == "start" else {}
        if record["type"] == "outcome" and record["environment"]:
            record["environment"]["host"] = "gpu7"
    records[1]["label"] = "point on gpu7"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda records: records[0]["spec"].update(data="/srv/corpora/private"),
            "record 1 holds a path, '/srv/corpora/private', where none can be replaced",
        ),
        (in_a_label, "record 2 holds a host, 'gpu7', where none can be replaced"),
        (
            lambda records: records[0].update(source="postgresql://me:word@db/nsa"),
            "record 1 holds a login, '://me:word@', where none can be replaced",
        ),
        (lambda records: records.pop(), "has no run that ended; give the journal of one that did"),
    ],
)
def test_a_journal_that_cannot_be_published_is_refused(
    change: Callable[[Lines], None], message: str, tmp_path: Path
) -> None:
    records = lines(DRILL)
    change(records)
    with pytest.raises(UserError, match=re.escape(message)):
        publish.take_in(written(tmp_path / "journal.jsonl", records), tmp_path)
    assert not list(tmp_path.glob("*.gz"))
