"""Publishes journals of our runs in docs/results/data: compressed, with hosts, paths and addresses replaced.

A command: `python -m orchestrator.store.publish JOURNAL...`.

Ids, states, configurations, numbers and versions stay as they are. Host names become host-1, host-2, ...; the kernel's
release, ids of cards, paths and addresses go. The files of points (logs, dumps) stay where the run kept them. What
cannot be replaced, such as a path in a spec, is refused.
"""

from __future__ import annotations

import gzip
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from orchestrator.errors import UserError
from orchestrator.store import journal
from orchestrator.store.records import (
    RECORD,
    ArtifactRecord,
    OutcomeRecord,
    Record,
    RunEndRecord,
    RunRecord,
    StartRecord,
)

DATA = Path("docs/results/data")  # `make results` runs in the checkout

_PATH = re.compile(r"(?<![\w/.:-])(?:file://)?/(?:[\w.@+~-]+/)+([\w.@+~-]*)")
_ADDRESS = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.])")
_CARD = re.compile(r"\b(?:GPU|MIG)-[0-9a-f]{8}-[0-9a-f-]+")
_LOGIN = re.compile(r"://[^/\s\"]*@|(?<![\w.-])[\w.-]+@[\w-]+\.\w+")  # from its beginning: each word is tried once
_PLATFORM = re.compile(r"(\w+)-.*-(\w+-with-.*)")  # system, release, machine, C library


class PrivateError(UserError):
    """A journal that cannot be published. One line: field, value, fix."""


def take_in(path: Path, folder: Path = DATA) -> Path:
    """Write the public form of the journal at `path` to `folder`; the same journal gives the same bytes.

    Raises:
        JournalError: it cannot be read. PrivateError: it is of a run that has not ended, or names a machine where
            nothing can be replaced.
    """
    records = list(journal.read(path))
    run = next((record for record in records if isinstance(record, RunRecord)), None)
    if run is None or not isinstance(records[-1], RunEndRecord):
        raise PrivateError(f"JOURNAL: {str(path)!r}: has no run that ended; give the journal of one that did")
    target = folder / f"{run.run_id}{journal.COMPRESSED}"
    content = "".join(f"{line}\n" for line in public_lines(path, records)).encode()
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(gzip.compress(content, 9, mtime=0))
    return target


def public_lines(path: Path, records: Sequence[Record]) -> list[str]:
    """The lines of the public form of a journal's records.

    Raises:
        PrivateError: as take_in; `path` is what it names.
    """
    lines, hosts = [RECORD.dump_json(record).decode() for record in public(records)], _hosts(records)
    for number, line in enumerate(lines, 1):
        _check(path, number, line, hosts)
    return lines


def public(records: Iterable[Record]) -> list[Record]:
    """The records without the files of points, and with hosts, paths, addresses and ids of cards replaced."""
    records = list(records)
    hosts = _hosts(records)
    return [_public(record, hosts) for record in records if not isinstance(record, ArtifactRecord)]


def _public(record: Record, hosts: dict[str, str]) -> Record:
    changes: dict[str, Any] = {}
    match record:
        case RunRecord(host=host):
            changes = {"host": host and hosts[host], "artifacts": None, "artifact_store": None}
        case StartRecord(node=node):
            changes = {"node": node and hosts[node]}
        case OutcomeRecord(environment=environment):
            changes = {"environment": _environment(environment, hosts)}
    texts = {name: getattr(record, name, None) for name in ("reason", "message")}
    return record.model_copy(update=changes | {name: _text(text, hosts) for name, text in texts.items() if text})


def _hosts(records: Iterable[Record]) -> dict[str, str]:
    """The name to publish for each host, in the order of appearance."""
    found: dict[str, str] = {}
    for record in records:
        match record:
            case RunRecord(host=host) | StartRecord(node=host):
                pass
            case OutcomeRecord(environment=environment):
                host = environment.get("host")
            case _:
                continue
        if host:
            found.setdefault(host, f"host-{len(found) + 1}")
    return found


def _environment(content: dict[str, Any], hosts: dict[str, str]) -> dict[str, Any]:
    public = {name: _nested(value, hosts) for name, value in content.items()}
    if "platform" in content:
        public["platform"] = _PLATFORM.sub(r"\1-\2", content["platform"])
    if "gpu" in content:
        public["gpu"] = {name: value for name, value in content["gpu"].items() if name != "uuid"}
    if "variables" in content:
        public["variables"] = {name: value for name, value in content["variables"].items() if "/" not in str(value)}
    return public


def _nested(value: Any, hosts: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {name: _nested(each, hosts) for name, each in value.items()}
    if isinstance(value, list):  # the hosts of several ranks
        return [_nested(each, hosts) for each in value]
    return _text(value, hosts) if isinstance(value, str) else value


def _text(text: str, hosts: dict[str, str]) -> str:
    """A text in which paths are their last parts, and hosts and addresses are named as such."""
    for host, name in hosts.items():
        text = _host(host).sub(name, text)
    return _CARD.sub("GPU", _ADDRESS.sub("ADDRESS", _PATH.sub(r"\1", text)))


def _host(name: str) -> re.Pattern[str]:
    """Pattern of a host's name, also without its domain."""
    first, dot, domain = (name, "", "") if _ADDRESS.fullmatch(name) else name.partition(".")
    more = f"(?:{re.escape(dot + domain)})?" if dot else ""
    return re.compile(rf"(?<![\w.-]){re.escape(first)}{more}(?![\w-]|\.\w)")


def _check(path: Path, number: int, line: str, hosts: dict[str, str]) -> None:
    """Raise PrivateError if a record's text still names a machine."""
    for what, pattern in (
        ("a path", _PATH),
        ("an address", _ADDRESS),
        ("the id of a card", _CARD),
        ("a login", _LOGIN),
        *(("a host", _host(host)) for host, name in hosts.items() if host != name),
    ):
        if found := pattern.search(line):
            raise PrivateError(
                f"JOURNAL: {str(path)!r}: record {number} holds {what}, {found[0]!r}, where none can be replaced; "
                "give the journal of a run without it"
            )


if __name__ == "__main__":
    try:
        for name in sys.argv[1:]:
            print(f"took in {take_in(Path(name))}")
    except UserError as err:
        sys.exit(f"error: {err}")
