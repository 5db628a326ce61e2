"""Texts that SQLite takes and Postgres refuses, at every place of a journal and of a table: both do the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from orchestrator.store import Store, queries
from orchestrator.store.importer import import_file
from orchestrator.store.records import RECORD, ArtifactData, ArtifactRecord, EventRecord, SeriesRecord

RUN = "20261120-120000-demo-abcd"
OWN = {"type", "run_id", "point_id", "axes"}  # where a record means something else, or is refused, with another text
TEXTS = pytest.mark.parametrize("text", ["a\0b", "x" * 6000], ids=["nul", "6000 characters"])


def filled(value: Any, text: str, fits: Callable[[Any], bool]) -> Any:
    """The JSON value with the text in the place of its own, and as one more key, where that fits; of lists, the first
    item is filled."""
    if isinstance(value, str):
        return text if fits(text) else value
    if isinstance(value, list):
        return [filled(item, text, lambda new: fits([new, *value[1:]])) for item in value[:1]] + value[1:]
    if isinstance(value, dict):
        found = dict(value)
        for key in value.keys() - OWN:
            found[key] = filled(value[key], text, lambda new, key=key: fits(found | {key: new}))
        return found | {text: text} if fits(found | {text: text}) else found
    return value


def is_record(line: Any) -> bool:
    try:
        RECORD.validate_python(line)
    except ValidationError:
        return False
    return True


@TEXTS
def test_a_database_takes_every_record_with_any_text(store: Store, sweep, tmp_path: Path, text: str) -> None:
    begun, point, start, outcome, *_, end = sweep(RUN, laws={"dense": 1.0}, lengths=(512,))
    at = {"run_id": RUN, "point_id": f"{RUN}/0", "attempt": 1}
    file = ArtifactData(name="a.txt", path=f"{RUN}/0000/1/a.txt", size=1, sha256="0", content="text")
    more = [
        ArtifactRecord(**at, artifact=file),
        EventRecord(run_id=RUN, point_id=f"{RUN}/0", message="m"),
        SeriesRecord(**at, rank=0, name="loss", unit="nat", steps=(1,), times=(1.0,), values=(1.0,)),
    ]
    lines = [json.loads(RECORD.dump_json(record)) for record in (begun, point, start, *more, outcome, end)]
    hostile = [filled(line, text, is_record) for line in lines]
    assert sum(json.dumps(line).count(json.dumps(text)[1:-1]) for line in hostile) > 20
    path = tmp_path / "journal.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in hostile))
    import_file(store, path)
    assert len(queries.points(store, RUN)) == 1
