"""Publishes journals of our runs in docs/results/data: compressed, with hosts, paths and addresses replaced.

A command: `python -m orchestrator.store.publish JOURNAL...`.

Ids, states, configurations, numbers and versions stay as they are. Host names become host-1, host-2, ...; the kernel's
release, ids of cards, paths and addresses go. The files of points (logs, dumps) stay where the run kept them, as do its
labels. Of the paths of a training's text their last parts stay. What cannot be replaced, such as another path in a
spec, is refused.
"""

import gzip
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.errors import UserError
from orchestrator.store import journal
from orchestrator.store import records as rec
from orchestrator.store.records import RECORD, Record

DATA = Path("docs/results/data")  # `make results` runs in the checkout

_PATH = re.compile(r"(?<![\w/.:-])(?:file://)?/(?:[\w.@+~-]+/)+([\w.@+~-]*)")
_ADDRESS = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.])")
_CARD = re.compile(r"\b(?:GPU|MIG)-[0-9a-f]{8}-[0-9a-f-]+")
_LOGIN = re.compile(r"://[^/\s\"]*@|(?<![\w.-])[\w.-]+@[\w-]+\.\w+")  # from its beginning: each word is tried once
_PRIVATE = (rec.ArtifactRecord, rec.LabelRecord)
_PLATFORM = re.compile(r"(\w+)-.*-(\w+-with-.*)")  # system, release, machine, C library


def take_in(path: Path, folder: Path = DATA) -> Path:
    """Write the public form of the journal at `path` to `folder`; the same journal gives the same bytes.

    Raises JournalError if it cannot be read, UserError if its run has not ended or what is private must stay.
    """
    records = list(journal.read(path))
    run = next((record for record in records if isinstance(record, rec.RunRecord)), None)
    if run is None or not isinstance(records[-1], rec.RunEndRecord):
        raise UserError(f"JOURNAL: {str(path)!r}: has no run that ended; give the journal of one that did")
    content = "".join(f"{line}\n" for line in public_lines(path, records)).encode()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{run.run_id}{journal.COMPRESSED}"
    target.write_bytes(gzip.compress(content, 9, mtime=0))
    return target


def public_lines(path: Path, records: Sequence[Record]) -> list[str]:
    """The lines of the public form of a journal's records, without the files of points. Raises UserError."""
    names: dict[str | None, None] = {}
    for record in records:
        match record:
            case rec.RunRecord(host=host) | rec.StartRecord(node=host):
                names[host] = None
            case rec.OutcomeRecord(environment=environment):
                names[environment.get("host")] = None
    hosts: dict[re.Pattern[str], str] = {}
    private = {_PATH: "a path", _ADDRESS: "an address", _CARD: "the id of a card", _LOGIN: "a login"}
    for number, name in enumerate(filter(None, names), 1):
        first, dot, domain = (name, "", "") if _ADDRESS.fullmatch(name) else name.partition(".")
        optional = f"(?:{re.escape(dot + domain)})?" if dot else ""  # a host is also named without its domain
        pattern = re.compile(rf"(?<![\w.-]){re.escape(first)}{optional}(?![\w-]|\.\w)")
        hosts[pattern] = f"host-{number}"
        private |= {} if name == hosts[pattern] else {pattern: "a host"}
    lines = [_public_line(record, hosts) for record in records if not isinstance(record, _PRIVATE)]
    for number, line in enumerate(lines, 1):
        for pattern, what in private.items():
            if found := pattern.search(line):
                raise UserError(
                    f"JOURNAL: {str(path)!r}: record {number} holds {what}, {found[0]!r}, where none can be replaced; "
                    "give the journal of a run without it"
                )
    return lines


def _public_line(record: Record, hosts: Mapping[re.Pattern[str], str]) -> str:
    """A record's line, in whose free texts paths are their last parts, and hosts and addresses are named as such."""

    def public(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: public(each) for name, each in value.items()}
        if isinstance(value, list):  # the hosts of several ranks
            return [public(each) for each in value]
        if not isinstance(value, str):
            return value
        for host, name in hosts.items():
            value = host.sub(name, value)
        return _CARD.sub("GPU", _ADDRESS.sub("ADDRESS", _PATH.sub(r"\1", value)))

    free = ("host", "node", "reason", "message", "environment")
    changes = {name: public(getattr(record, name)) for name in free if getattr(record, name, None)}
    for name in ("spec", "config"):  # of text that a training read, the names of its folder and files stay
        if isinstance(data := (getattr(record, name, None) or {}).get("data"), dict):
            changes[name] = {**getattr(record, name), "data": public(data)}
    if isinstance(record, rec.RunRecord):
        changes |= {"artifacts": None, "artifact_store": None, "person": None}
    if isinstance(record, rec.OutcomeRecord) and (environment := changes.get("environment")):
        if "platform" in environment:
            environment["platform"] = _PLATFORM.sub(r"\1-\2", environment["platform"])
        if "gpu" in environment:
            environment["gpu"].pop("uuid", None)
        for name, value in record.environment.get("variables", {}).items():
            if "/" in str(value):
                del environment["variables"][name]
    return RECORD.dump_json(record.model_copy(update=changes)).decode()


if __name__ == "__main__":
    try:
        for name in sys.argv[1:]:
            print(f"took in {take_in(Path(name))}")
    except UserError as err:
        sys.exit(f"error: {err}")
