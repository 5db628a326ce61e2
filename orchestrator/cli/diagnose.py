"""Diagnosis of a live run from outside: what it has stored, and its processes where they are on this host.

Processes are read, never stopped or asked: /proc, NVML, and py-spy without blocking.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from statistics import median
from typing import TYPE_CHECKING, Any

import pandas as pd
import psutil

from jobs.process import post_mortem
from jobs.schema.plain_text import for_file, in_a_line
from jobs.schema.states import Origin, RunState, phase_in_words
from orchestrator.cli.lookup import find_run
from orchestrator.errors import UserError
from orchestrator.store import Store, queries

if TYPE_CHECKING:
    from jobs.diagnosis.advice import Diagnosis
    from jobs.diagnosis.rank_state import RankState

_STATE = re.compile(r"rank(\d+)(?:-(\d+))?\.json")
_RECENT = timedelta(seconds=60)
_SILENT_S = 60.0  # without progress, after which it is told
_SHOWN = ("loss", "throughput", "training_memory", "rank_compute_time", "gpu_utilization", "gpu_memory_used")
_NOTE = 4_000  # characters of a note: six frames of a stack
_LOWEST = 19  # priority of a process that others go before


def give_way() -> None:
    """Run only when nothing else wants the processor: Linux's idle class is below every priority."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):
        os.nice(_LOWEST)


def this_host() -> str:
    """Diagnosis of this host, as text on a terminal, else as Markdown."""
    from jobs.diagnosis.advice import Diagnosis, advise, describe
    from jobs.hardware.environment import steering
    from jobs.hardware.topology import topology

    found = Diagnosis(hosts=[topology()], variables=steering(os.environ))
    return describe(found, advise(found), in_a_line if sys.stdout.isatty() else for_file)


def attach(store: Store, run: str, number: int | None, seconds: float) -> Iterator[str]:
    """Diagnosis of the running points of a run, or of the one with a `number`, after watching them for some `seconds`.

    Raises UserError: there is no such run, or it or the point is not running.
    """
    run_id = find_run(store, run)
    found = queries.run(store, run_id)
    assert found is not None, "it was looked up"
    if found["origin"] == Origin.REPORTED:
        raise UserError(f"RUN: {run_id!r}: was imported from a report and has no processes; name a measured run")
    if found["state"] == RunState.PENDING:
        raise UserError(f"RUN: {run_id!r}: waits for room on the cluster; try again when `nsa status` says running")
    if found["state"] != RunState.RUNNING:
        raise UserError(f"RUN: {run_id!r}: is {found['state']}, not running; `nsa show {run_id}` has its results")
    points = queries.points(store, run_id)
    live = [int(n) for n in points.loc[points["running"] > 0, "number"]]
    if number is not None and number not in live:
        use = f"use {', '.join(map(str, live))}" if live else "wait for one"
        raise UserError(f"--point: {number}: is not running; {use}, `nsa show {run_id}` lists all")
    if not live:
        raise UserError(f"RUN: {run_id!r}: none of its points is running now; try again, `nsa show {run_id}` tells")
    for each in live if number is None else [number]:
        if (row := queries.point(store, f"{run_id}/{each}")) is not None:
            yield _diagnosed(store, row, seconds)


def _diagnosed(store: Store, row: Mapping[str, Any], seconds: float) -> str:
    from jobs.diagnosis.advice import Advice, Diagnosis, advise, describe, imbalance

    attempt, run_id, number = int(row["running"]), row["run_id"], int(row["number"])
    recent = queries.series(store, row["point_id"], attempt=attempt, since=datetime.now(UTC) - _RECENT)
    steps = recent.loc[recent["name"] == "throughput", "at"]
    # Since the first of the training's steps among them: a GPU is idle while a process starts.
    training = recent.iloc[:0] if steps.empty else recent.loc[recent["at"] > steps.min()]
    diagnosis = Diagnosis(
        ranks=_ranks(queries.artifacts(store, row["point_id"]), attempt, recent),
        # Medians: what a start or a checkpoint takes up is the lesser part of a minute.
        utilization={rank: median(values) for rank, values in _by_rank(training, "gpu_utilization").items()},
        imbalance=imbalance({rank: median(values) for rank, values in _by_rank(recent, "rank_compute_time").items()}),
    )
    diagnosis, notes = _processes(diagnosis, seconds)
    advice = advise(diagnosis)
    if (heartbeat := row["heartbeat_at"]) is not None and not pd.isna(heartbeat):
        heartbeat = heartbeat.replace(tzinfo=UTC) if heartbeat.tzinfo is None else heartbeat
        if (silent := (datetime.now(UTC) - heartbeat).total_seconds()) >= _SILENT_S:
            text = f"no progress for {silent:,.0f} s, last in phase {row['phase'] or 'start'!r}"
            fix = f"see `nsa logs {run_id} --point {number}`, or end it: `nsa cancel {run_id}`"
            advice = [Advice(text, fix), *advice]
    shown = in_a_line if sys.stdout.isatty() else for_file
    title = shown(f"{run_id}, point {number}: {row['label']}")
    head = "\n".join([f"# {title}\n", *map(shown, _progress(row, recent)), ""])
    return "\n".join([head, *(f"{shown(note, _NOTE)}\n" for note in notes), describe(diagnosis, advice, shown)])


def _ranks(files: pd.DataFrame, attempt: int, recent: pd.DataFrame) -> list[RankState]:
    """The ranks' states as they kept them at the first step of their newest process, with the memory of now."""
    from jobs.diagnosis.rank_state import NOW, Memory, RankState

    newest: dict[int, tuple[int, RankState]] = {}
    for file in files.loc[files["attempt"] == attempt].to_dict("records"):
        match, content = _STATE.fullmatch(str(file["name"])), file["content"]
        state = RankState.from_json(content) if match and isinstance(content, str) else None
        if match and state and (process := int(match[2] or 1)) > newest.get(state.rank, (0,))[0]:
            newest[state.rank] = (process, state)
    allocated, used = _by_rank(recent, "training_memory"), _by_rank(recent, "gpu_memory_used")
    ranks = []
    for rank, (_, state) in sorted(newest.items()):
        latest = [values[rank][-1] if rank in values else None for values in (allocated, used)]
        now = Memory(None, *latest) if state.gpu else Memory(latest[0])
        ranks.append(replace(state, memory={**state.memory, NOW: now}))
    return ranks


def _processes(diagnosis: Diagnosis, seconds: float) -> tuple[Diagnosis, list[str]]:
    """The diagnosis with what is seen of the processes on this host; and notes: stacks, and who is elsewhere."""
    from jobs.diagnosis.rank_state import NOW, identity
    from jobs.hardware.environment import steering
    from jobs.hardware.topology import topology

    if not diagnosis.ranks:
        return diagnosis, ["No rank has told its state: it has not done its first step, or its kind trains nothing."]
    here = [rank for rank in diagnosis.ranks if rank.process and identity(rank.pid) == rank.process]
    notes = []
    if any(rank.gpu for rank in diagnosis.ranks):
        notes.append("Reserved memory now is that in use on the card, by all its processes.")
    if away := [f"rank {rank.rank} on {rank.host}" for rank in diagnosis.ranks if rank not in here]:
        notes.append(
            f"Not on this host, in another container, or gone: {', '.join(away)}; theirs is what the database has."
        )
    if not here:
        return diagnosis, notes
    processes = {rank.rank: psutil.Process(rank.pid) for rank in here}
    variables: dict[str, str] | None = None
    for process in processes.values():
        with contextlib.suppress(psutil.Error):
            variables = {**(variables or {}), **steering(process.environ())}
            process.cpu_percent()  # begins its interval
    time.sleep(seconds)
    busy, ranks = dict(diagnosis.utilization), {rank.rank: rank for rank in diagnosis.ranks}
    for rank in here:
        process = processes[rank.rank]
        with contextlib.suppress(psutil.Error):
            now = replace(rank.memory[NOW], resident=round(process.memory_info().rss / 2**20, 1))
            ranks[rank.rank] = replace(rank, memory={**rank.memory, NOW: now})
            if not rank.gpu:
                busy[rank.rank] = process.cpu_percent() / max(1, rank.threads)
    host = topology([rank.gpu for rank in here if rank.gpu] or None)
    seen = replace(diagnosis, ranks=list(ranks.values()), hosts=[host], variables=variables, utilization=busy)
    if post_mortem.py_spy() is None:
        return seen, [*notes, f"Stacks are not shown: {post_mortem.NO_PY_SPY}"]
    for rank in here:
        try:
            notes.append(f"Rank {rank.rank} is in {' < '.join(post_mortem.frames(rank.pid))}.")
        except post_mortem.UnreadableStackError as err:
            notes.append(f"Rank {rank.rank}'s stack is not readable: {err}")
    return seen, notes


def _progress(row: Mapping[str, Any], recent: pd.DataFrame) -> list[str]:
    """Phase and rate of a point, and the latest values of its main series, a line each."""
    phase = phase_in_words(row) or "starting"
    rate = "" if not row["rate"] or pd.isna(row["rate"]) else f", {row['rate']:.3g} a second"
    lines = [f"Attempt {int(row['running'])} on {row['running_on'] or 'an unknown node'}: {phase}{rate}."]
    for name in _SHOWN:
        if by_rank := _by_rank(recent, name):
            unit = recent.loc[recent["name"] == name, "unit"].iloc[-1]
            lines.append(f"{name} [{unit}]: {', '.join(f'{by_rank[rank][-1]:.5g}' for rank in sorted(by_rank))}")
    return lines


def _by_rank(recent: pd.DataFrame, name: str) -> dict[int, list[float]]:
    """Values of a series by rank, in the order of time."""
    return {int(rank): rows["value"].tolist() for rank, rows in recent.loc[recent["name"] == name].groupby("rank")}
