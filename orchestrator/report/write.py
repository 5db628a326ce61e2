"""Report files: Markdown with charts beside it, HTML in one file, CSV, JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from jobs.schema.plain_text import printable
from jobs.schema.quantities import Plot, Quantity
from jobs.specs.user_files import write_output
from orchestrator.errors import UserError
from orchestrator.judge.analysis import fits_frame
from orchestrator.report.content import Content, collect
from orchestrator.report.text import to_html, to_markdown
from orchestrator.settings import example_spec
from orchestrator.store import Store
from orchestrator.store.exporter import to_csv, to_json

Format = Literal["md", "html", "csv", "json"]


class ReportError(UserError):
    """The report cannot be written; the message names field, value and fix."""


def report(store: Store, run_ids: Sequence[str], *, format: str = "md") -> str:
    """The report as text; only HTML includes charts.

    Raises:
        ReportError: the format is unknown, or there are no runs.
    """
    if format in ("csv", "json"):
        return (to_csv if format == "csv" else to_json)(store, _some(run_ids))
    content = collect(store, _some(run_ids))
    match format:
        case "md":
            return to_markdown(content, charts={})
        case "html":
            return to_html(content, {quantity: svg(chart) for quantity, chart in _charts(content).items()})
        case _:
            raise ReportError(f"format: {format!r} is unknown; use md, html, csv or json")


def write_report(store: Store, run_ids: Sequence[str], path: Path) -> list[Path]:
    """Write the report to `path` in the format of its suffix; Markdown gets a PNG file per chart. Returns the files.

    Raises:
        ReportError: the suffix is unknown, there are no runs, or a file cannot be written.
    """
    suffix = path.suffix.removeprefix(".")
    if suffix not in ("md", "html", "csv", "json"):
        raise ReportError(f"out: '{path}' has an unknown suffix; use .md, .html, .csv or .json")
    try:
        if suffix == "md":
            return _write_markdown(store, run_ids, path)
        write_output(path, report(store, run_ids, format=suffix))
    except OSError as err:
        raise ReportError(f"out: '{path}' cannot be written ({err.strerror}); choose another place") from None
    return [path]


def _write_markdown(store: Store, run_ids: Sequence[str], path: Path) -> list[Path]:
    content = collect(store, _some(run_ids))
    images = {}
    for quantity, chart in _charts(content).items():
        images[quantity] = path.with_name(f"{path.stem}-{re.sub(r'[^a-z0-9]+', '-', quantity.name)}.png")
        write_output(images[quantity], png(chart))
    files = {quantity: quote(image.name) for quantity, image in images.items()}
    write_output(path, to_markdown(content, files))
    return [path, *images.values()]


def _some(run_ids: Sequence[str]) -> Sequence[str]:
    if not run_ids:
        raise ReportError(f"RUN: no runs are stored; submit one: nsa submit {example_spec()}")
    return run_ids


def _charts(content: Content) -> dict[Quantity, Any]:
    """Charts of the growing quantities that have rows to draw. Imports Altair only here."""
    from orchestrator.report.scaling_chart import drawable, scaling_chart

    return {
        quantity: scaling_chart(content.scaling, fits_frame(content.fits), quantity)[0].properties(width=640)
        for quantity in content.quantities
        if quantity.plot is Plot.GROWTH and not drawable(content.scaling, quantity).empty
    }


def png(chart: Any) -> bytes:
    import vl_convert

    return vl_convert.vegalite_to_png(_printable(chart.to_dict()), scale=2)


def svg(chart: Any) -> str:
    import vl_convert

    return vl_convert.vegalite_to_svg(_printable(chart.to_dict()))


def _printable(part: Any) -> Any:
    """The part of a chart, its texts printable: an image's XML cannot hold controls."""
    if isinstance(part, dict):
        return {name: _printable(value) for name, value in part.items()}
    if isinstance(part, list):
        return [_printable(value) for value in part]
    return printable(part) if isinstance(part, str) else part
