"""Tables for reports and terminals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import pandas as pd
from markupsafe import Markup
from rich.table import Table as RichTable
from rich.text import Text

from jobs.schema.plain_text import for_file, for_html, in_a_line
from jobs.schema.quantities import Quantities, readable

_COLORS = {"ok": "green", "done": "green", "running": "cyan", "pending": "bright_black", "skipped": "bright_black"}
_COLORS |= {"missing": "yellow", "broken": "red"}
_LONG = 40  # characters of a cell beyond which its column may break lines


@dataclass(frozen=True)
class Table:
    """A table with its heading and a note on its rows; cells of Markup are written as they are."""

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    @classmethod
    def of(cls, title: str, note: str, rows: Sequence[Mapping[str, str]]) -> Self:
        """A table of rows with the same columns each."""
        return cls(title, note, list(rows[0]) if rows else [], [list(row.values()) for row in rows])

    def markdown(self) -> str:
        """Columns and rows as Markdown, without title and note."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        written = ([cell if isinstance(cell, Markup) else for_file(cell) for cell in line] for line in lines)
        return "\n".join(f"| {' | '.join(line)} |" for line in written)

    def html(self) -> str:
        """Columns and rows as HTML, without title and note."""
        head = "".join(f"<th>{for_html(column)}</th>" for column in self.columns)
        lines = (
            "".join(f"<td>{cell if isinstance(cell, Markup) else for_html(cell)}</td>" for cell in row)
            for row in self.rows
        )
        body = "\n".join(f"<tr>{line}</tr>" for line in lines)
        return f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"

    def rich(self, *, fold: bool = False) -> RichTable:
        """Title, columns and rows for a terminal, states in colours. `fold`: every cell may take several lines; else
        only those of columns of long texts, which would cut others."""
        table = RichTable(
            title=Text(in_a_line(self.title)), title_justify="left", title_style="bold", header_style="bold", box=None,
            pad_edge=False,
        )  # fmt: skip
        for place, column in enumerate(self.columns):
            short = all(len(row[place]) <= _LONG for row in self.rows)
            table.add_column(Text(column), no_wrap=short and not fold, overflow="fold" if fold else "ellipsis")
        for row in self.rows:
            cells = []
            for name, cell in zip(self.columns, map(in_a_line, row), strict=True):
                color = _COLORS.get(cell.partition(",")[0], "red") if name == "state" else ""
                cells.append(Text(cell, color))
            table.add_row(*cells)
        return table


def points_table(title: str, metrics: pd.DataFrame, quantities: Quantities, names: Mapping[str, str]) -> Table:
    """A row per point and a column per quantity, of rows of v_metrics; without names, runs have no column."""
    named = set(zip(metrics["metric"], metrics["unit"], strict=True))
    columns = sorted(named, key=lambda one: (quantities.place(one[0]), one))
    values: dict[tuple[str, ...], dict[tuple[str, str], str]] = {}
    for row in metrics.to_dict("records"):
        point = (names[row["run_id"]], row["label"]) if names else (row["label"],)
        values.setdefault(point, {})[row["metric"], row["unit"]] = readable(row["value"])
    headings = [name if unit == "1" else f"{name} [{unit}]" for name, unit in columns]
    rows = [[*point, *(found.get(one, "") for one in columns)] for point, found in values.items()]
    return Table(title, "", [*(["run"] if names else []), "point", *headings], rows)


def flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested mappings by their names, joined with dots."""
    found: dict[str, Any] = {}
    for name, value in content.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found
