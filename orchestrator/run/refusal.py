"""A Ray job whose order is refused: a failed run of its own, so that who submitted it finds it and why."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from jobs.schema.states import RunState
from jobs.specs.kinds import kinds
from jobs.specs.yaml_text import YamlError, read_mapping
from orchestrator import provenance, terminal
from orchestrator.errors import UserError
from orchestrator.run import plan
from orchestrator.run.order import parse_arguments
from orchestrator.settings import Settings, load_settings
from orchestrator.store import Store
from orchestrator.store.records import EventRecord, Record, RunEndRecord, RunRecord

UNKNOWN = "unknown"
"""The kind of a refused run whose spec names none that exists."""

_ODD = re.compile(r"[^A-Za-z0-9_.-]+")
_NAME_LENGTH = 80  # of a spec's name


def record_refusal(argv: Sequence[str] | None, err: Exception) -> None:
    """Store that this process's Ray job was refused. Nothing happens outside of a job, for a dry run, and where the
    database cannot be used: the error is in the job's log in any case."""
    if provenance.submission_id() is None:
        return
    spec = resumed = None
    with suppress(UserError):  # the arguments themselves are wrong
        args = parse_arguments(argv)
        if args.dry_run:
            return
        spec, resumed = args.spec, args.resume
    with suppress(UserError):  # wrong settings, a database that is away
        settings = load_settings()
        with Store.open(settings.database) as store:
            store_refused(store, _run_record(settings, spec, resumed), err)


def store_refused(store: Store, run: RunRecord, err: Exception) -> None:
    """Store a job that was refused as a failed run of its own, which has no journal. Raises StoreError."""
    store.apply_many([run.model_copy(update={"state": RunState.PENDING}), *never_began(run, err)])


def never_began(run: RunRecord, err: BaseException) -> list[Record]:
    """The end of a run that failed before its first point, or was stopped."""
    failed = isinstance(err, Exception)
    reason = "\n".join(terminal.mistakes(err)) if failed else "stopped while it waited"
    message = f"ended before its first point: {reason}"
    return [
        EventRecord(run_id=run.run_id, level="error" if failed else "info", message=message),
        RunEndRecord(
            run_id=run.run_id,
            state=RunState.FAILED if failed else RunState.CANCELLED,
            reason=reason,
            resumed=run.resumed,
        ),
    ]


def _run_record(settings: Settings, spec: Path | None, resumed: str | None) -> RunRecord:
    """A run of no valid spec: it has an empty one, which `--resume` refuses."""
    content: dict[str, Any] = {}
    with suppress(YamlError):
        content = {} if spec is None else read_mapping(spec, "spec", "kind: scaling")
    name, kind = content.get("name"), content.get("kind")
    if not isinstance(name, str) or not name:
        name = spec.stem if spec else "resume" if resumed else "job"
    name = _ODD.sub("-", name[:_NAME_LENGTH]).lstrip("_.-") or "job"
    kind = kind if isinstance(kind, str) and kind in kinds() else UNKNOWN
    git = provenance.GitState()
    with suppress(UserError):  # it may be what is refused
        git = provenance.git_state()
    nothing = {"spec": {}, "spec_hash": "", "quantities": ()}
    return plan.run_record(
        plan.new_run_id(name), name, kind, settings, git, code_hash=provenance.code_hash(), **nothing
    )
