"""Shows a run's progress: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from io import TextIOWrapper
from typing import TextIO

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from jobs.schema.plain_text import in_a_line
from jobs.schema.quantities import readable
from jobs.schema.states import PointState
from orchestrator.messages import Progress as Sign
from orchestrator.store.records import EventRecord, MetricData, OutcomeRecord, StartRecord
from orchestrator.terminal import PlainConsole

_STYLE = {PointState.OK: "green", PointState.CANCELLED: "yellow"}
_SIGN_OF_LIFE_S = 30.0
_NAME = 120  # characters beside a bar


def watcher(
    labels: Mapping[str, str], settled: int, headline: Sequence[str], stream: TextIO | None = None
) -> LogWatcher:
    """The display for a stream.

    Args:
        labels: point id -> label, of all points.
        settled: number of points that need no measuring.
        headline: the metrics to show of a point that ended.
        stream: None: stdout.
    """
    out = stream or sys.stdout
    if isinstance(out, TextIOWrapper):  # a reason may hold what the terminal's encoding does not
        out.reconfigure(errors="backslashreplace")
    return (TerminalWatcher if out.isatty() else LogWatcher)(labels, settled, headline, out)


class LogWatcher:
    """Prints a line when a point ends, and the running point's phase after 30 s without a line."""

    def __init__(self, labels: Mapping[str, str], settled: int, headline: Sequence[str], stream: TextIO) -> None:
        self._labels = labels
        self._headline = headline
        self._done = settled
        self._stream = stream
        self._begun: dict[str, float] = {}
        self._last_line = time.monotonic()

    def __enter__(self) -> LogWatcher:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def started(self, record: StartRecord) -> None:
        self._begun[record.point_id] = time.monotonic()

    def progress(self, sign: Sign) -> None:
        if time.monotonic() - self._last_line >= _SIGN_OF_LIFE_S:
            self.tell(f"running {self._labels[sign.point_id]}: {_where(sign)}")

    def ended(self, outcome: OutcomeRecord) -> None:
        self._done += 1
        begun = self._begun.pop(outcome.point_id, None)
        took = "" if begun is None else f" ({time.monotonic() - begun:.1f} s)"  # a conclusion takes no time
        told = _in_a_line(outcome.metrics, self._headline) if outcome.state is PointState.OK else outcome.reason
        count = f"[{self._done}/{len(self._labels)}]"
        self._line(f"{count} {outcome.state:<9} {self._labels[outcome.point_id]}: {told}{took}", outcome.state)

    def noted(self, event: EventRecord) -> None:
        label = self._labels.get(event.point_id or "")  # several points may run at once
        self.tell(f"{event.level}: {f'{label}: ' if label else ''}{event.message}")

    def tell(self, message: str) -> None:
        self._line(message, None)

    def _line(self, text: str, state: PointState | None) -> None:
        self._last_line = time.monotonic()
        print(in_a_line(text), file=self._stream, flush=True)


class TerminalWatcher(LogWatcher):
    """Prints the same lines, above a bar for the run and one for each running point."""

    def __init__(self, labels: Mapping[str, str], settled: int, headline: Sequence[str], stream: TextIO) -> None:
        super().__init__(labels, settled, headline, stream)
        self._bars = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=PlainConsole(file=stream), transient=True,
        )  # fmt: skip
        self._run = self._bars.add_task("points", total=len(labels), completed=settled)
        self._points: dict[str, TaskID] = {}

    def __enter__(self) -> TerminalWatcher:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def started(self, record: StartRecord) -> None:
        super().started(record)
        if (before := self._points.get(record.point_id)) is not None:  # it is handed out again
            self._bars.remove_task(before)
        self._points[record.point_id] = self._bars.add_task(_named(self._labels[record.point_id]), total=None)

    def progress(self, sign: Sign) -> None:
        if (task := self._points.get(sign.point_id)) is not None:
            description = _named(f"{self._labels[sign.point_id]}: {sign.phase}")
            self._bars.update(task, description=description, completed=sign.done, total=sign.total or None)

    def ended(self, outcome: OutcomeRecord) -> None:
        super().ended(outcome)
        if (task := self._points.pop(outcome.point_id, None)) is not None:
            self._bars.remove_task(task)
        self._bars.update(self._run, completed=self._done)

    def _line(self, text: str, state: PointState | None) -> None:
        style = "" if state is None else _STYLE.get(state, "red")
        self._bars.console.print(in_a_line(text), style=style, markup=False, soft_wrap=True)


def _named(text: str) -> str:
    """The text beside a bar."""
    return escape(in_a_line(text, _NAME))


def _in_a_line(metrics: tuple[MetricData, ...], headline: Sequence[str]) -> str:
    by_name = {metric.name: metric for metric in metrics}
    shown = [by_name[name] for name in headline if name in by_name] or list(metrics[:1])
    return ", ".join(f"{m.name} {readable(m.value, m.unit)}" for m in shown) or "done"


def _where(sign: Sign) -> str:
    return f"{sign.phase} {sign.done}/{sign.total}" if sign.total else sign.phase
