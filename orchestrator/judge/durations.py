"""Predicted durations of specs: from earlier runs on the card, or scaled from another card by published peaks."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from jobs.schema.peaks import BF16_PEAKS
from jobs.schema.states import FAILED, PointState, RunState
from orchestrator.judge.evidence import Run
from orchestrator.judge.hardware import Hardware
from orchestrator.judge.rules import READY_SPECS

SHIPPED = Path(__file__).with_name("durations.csv")
"""Durations of complete runs whose journals are published with the project."""

UNKNOWN = None, "not known"


@dataclass(frozen=True)
class Duration:
    """A complete run of a spec: its name, kind, card (None: CPU), GPUs, number of points, and its source in words."""

    name: str
    kind: str
    gpu: str | None
    gpus: int
    points: int
    minutes: float
    source: str


class Durations:
    """The known durations: of the stored runs, newest first, then the shipped ones."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._stored = [
            Duration(run.name, run.kind, run.gpu, run.outline.shape.ranks, run.outline.points, run.minutes, f"{run}")
            for run in runs
            if run.state is RunState.DONE and run.minutes is not None and run.minutes > 0 and _to_its_end(run)
        ]

    def predict(self, spec: str, hardware: Hardware | None, gpus: int) -> tuple[float | None, str]:
        """Minutes that a ready spec takes on a hardware, and the ground for it; None where nothing is known."""
        if hardware is None:
            return UNKNOWN
        if (minutes := _own_time(spec)) is not None:
            return minutes, "the minutes of the spec, without start-up"
        name, kind = _content(spec)["name"], _content(spec)["kind"]
        alike = [each for each in (*self._stored, *_shipped()) if (each.name, each.kind) == (name, kind)]
        # The spec as it is, not a small run under its name: the most points known.
        points = max((each.points for each in alike), default=0)
        alike = [each for each in alike if each.points == points and each.gpus == max(gpus, 1)]
        here = next((each for each in alike if hardware.is_card(each.gpu)), None)
        if here is not None:
            return here.minutes, f"{here.source}: {points} points on {here.gpu or 'CPU'}"
        return _scaled(alike, hardware)


def _scaled(alike: Sequence[Duration], hardware: Hardware) -> tuple[float | None, str]:
    peak = next((peak for card, peak in BF16_PEAKS.items() if hardware.is_card(card)), None)
    other = next((each for each in alike if each.gpu in BF16_PEAKS), None)
    if hardware.gpu is None or peak is None or other is None or other.gpu is None:
        return UNKNOWN
    theirs = BF16_PEAKS[other.gpu]
    scaled = f"scaled by published bf16 peaks ({theirs / 1e12:.0f} to {peak / 1e12:.0f} TFLOP/s)"
    how = "whose published bf16 peak is the same" if theirs == peak else scaled
    return other.minutes * theirs / peak, f"{other.source}: {other.minutes:.3g} min on {other.gpu}, {how}"


def _own_time(spec: str) -> float | None:
    """The minutes that a spec asks for itself, for each kind of attention, on any card: a soak's."""
    content = _content(spec)
    return content["minutes"] * len(content.get("attention", [None])) if "minutes" in content else None


def _to_its_end(run: Run) -> bool:
    """Whether no point was cut short or held up: crashes make a run quick, hangs slow; lack of memory neither."""
    return not run.outline.states.keys() & (FAILED - {PointState.OOM})


@cache
def _shipped() -> tuple[Duration, ...]:
    with SHIPPED.open(newline="") as file:
        return tuple(
            Duration(
                row["name"],
                row["kind"],
                row["gpu"] or None,
                int(row["gpus"] or 1) or 1,
                int(row["points"]),
                float(row["minutes"]),
                "published results" + (f", run {row['run_id']}" if row["run_id"] else ""),
            )
            for row in csv.DictReader(file)
        )


def gpus_of(spec: str) -> int:
    """The GPUs that a point of a ready spec needs."""
    return int((_content(spec).get("resources") or {}).get("num_gpus") or 0)


@cache
def _content(spec: str) -> dict[str, Any]:
    return yaml.safe_load((READY_SPECS / spec).read_text())
