"""Shows a run's progress: bars on a terminal, plain lines in a log."""

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from io import TextIOWrapper
from typing import TextIO

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from jobs.schema.plain_text import in_a_line
from jobs.schema.quantities import readable
from jobs.schema.states import PointState
from orchestrator.store.records import EventRecord, OutcomeRecord, StartRecord
from orchestrator.store.records import Progress as Sign
from orchestrator.terminal import PlainConsole

_STYLE = {PointState.OK: "green", PointState.CANCELLED: "yellow"}
_SIGN_OF_LIFE_S = 30.0
_NAME = 120  # characters beside a bar


class Watcher(AbstractContextManager["Watcher"]):
    """Prints a line when a point ends. A terminal also gets bars for the run and its running points, a log the phase of
    a running point after 30 s without a line.

    Args:
        labels: point id -> label, of all points; more may be added while the run goes on.
        settled: number of points that need no measuring.
        headline: the metrics to show of a point that ended.
    """

    def __init__(
        self, labels: Mapping[str, str], settled: int, headline: Sequence[str], stream: TextIO | None = None
    ) -> None:
        out = stream or sys.stdout
        if isinstance(out, TextIOWrapper):  # a reason may hold what the terminal's encoding does not
            out.reconfigure(errors="backslashreplace")
        self._labels = labels
        self._headline = headline
        self._done = settled
        self._is_log = not out.isatty()
        columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
        console = PlainConsole(file=out)
        self._bars = Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=self._is_log)
        self._run = self._bars.add_task("points", total=len(labels), completed=settled)
        self._points: dict[str, tuple[TaskID, float]] = {}  # the bar of a running point, and when it began
        self._last_line = time.monotonic()
        self._bars.start()

    def __exit__(self, *_: object) -> None:
        if not self._is_log:  # which would get an empty line
            self._bars.stop()

    def started(self, record: StartRecord) -> None:
        if record.point_id in self._points:  # it is handed out again
            self._bars.remove_task(self._points[record.point_id][0])
        bar = self._bars.add_task(escape(in_a_line(self._labels[record.point_id], _NAME)), total=None)
        self._points[record.point_id] = bar, time.monotonic()

    def progress(self, sign: Sign) -> None:
        label = self._labels[sign.point_id]
        if sign.point_id in self._points:
            description = escape(in_a_line(f"{label}: {sign.phase}", _NAME))
            bar, _ = self._points[sign.point_id]
            self._bars.update(bar, description=description, completed=sign.done, total=sign.total or None)
        if self._is_log and time.monotonic() - self._last_line >= _SIGN_OF_LIFE_S:
            self.tell(f"running {label}: {sign.phase}" + (f" {sign.done}/{sign.total}" if sign.total else ""))

    def ended(self, outcome: OutcomeRecord) -> None:
        self._done += 1
        seconds = ""  # a conclusion takes no time
        if outcome.point_id in self._points:
            bar, begun = self._points.pop(outcome.point_id)
            self._bars.remove_task(bar)
            seconds = f" ({time.monotonic() - begun:.1f} s)"
        self._bars.update(self._run, completed=self._done)
        result = outcome.reason
        if outcome.state is PointState.OK:
            by_name = {metric.name: metric for metric in outcome.metrics}
            headline = [by_name[name] for name in self._headline if name in by_name] or outcome.metrics[:1]
            result = ", ".join(f"{m.name} {readable(m.value, m.unit)}" for m in headline) or "done"
        count = f"[{self._done}/{len(self._labels)}]"
        line = f"{count} {outcome.state:<9} {self._labels[outcome.point_id]}: {result}{seconds}"
        self.tell(line, style=_STYLE.get(outcome.state, "red"))

    def noted(self, event: EventRecord) -> None:
        label = self._labels.get(event.point_id or "")  # several points may run at once
        self.tell(f"{event.level}: {f'{label}: ' if label else ''}{event.message}")

    def tell(self, message: str, style: str = "") -> None:
        self._last_line = time.monotonic()
        self._bars.console.print(in_a_line(message), style=style, markup=False, soft_wrap=True)
