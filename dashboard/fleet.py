"""Fleet page: which card is ill, by its newest preflight, and what to do about it."""

from collections import Counter

import streamlit as st

from dashboard import data, grids, parts
from orchestrator.judge.fleet import Level
from orchestrator.report import fleet as tables
from orchestrator.report.table import Table
from orchestrator.settings import example_spec

LEVELS = {
    Level.BAD: parts.Look("cancel", "red", "✗"),
    Level.WARN: parts.Look("warning", "orange", "!"),
    Level.UNKNOWN: parts.Look("help", "gray", "?"),
    Level.OK: parts.Look("check_circle", "green", "✓"),
}
_COMMAND = f"nsa submit {example_spec('preflight')} --set cards=8"
_SHORT = 13  # characters of a figure, which stays in one line
_NO_BREAK = "\N{NO-BREAK SPACE}"


@data.explained
def page() -> None:
    st.title("Fleet")
    cards = data.cards(data.open_store())
    if not cards:
        st.info("No preflight has been stored yet. Look at all cards of the cluster with:", icon=":material/memory:")
        st.code(_COMMAND, language="bash")
        return
    counts = Counter(card.level for card in cards)
    told = " ".join(
        parts.badge(f"{counts[level]} {level}", {f"{counts[level]} {level}": LEVELS[level]}) for level in counts
    )
    st.markdown(f"{parts.count(len(cards), 'card')}: {told}")
    _draw(tables.summary(cards, parts.zone()), [card.point_id for card in cards])
    todo = tables.to_do(cards)
    if todo.rows:
        st.header(todo.title)
        _draw(todo)
    st.caption(
        "Speeds are held against the median of all stored preflights of the same card: below 95 % is WARN, below 90 % "
        f"BAD. Look again with `{_COMMAND}`."
    )


def _draw(table: Table, point_ids: list[str] | None = None) -> None:
    """Draw a table, with its levels as signs in colour, and the cards as links to their points."""
    rows = []
    for place, row in enumerate(table.rows):
        cells = {name: _cell(cell) for name, cell in zip(table.columns, row, strict=True)}
        if point_ids:
            cells["Card"] = parts.point_link(point_ids[place], cells["Card"])
        rows.append(cells)
    grids.table(rows)


def _cell(text: str) -> str:
    """The cell as Markdown, the level that it ends with in its colour."""
    said, _, last = text.rpartition(" ")
    if last not in LEVELS:
        return parts.plain(text if len(text) > _SHORT else text.replace(" ", _NO_BREAK))
    look = LEVELS[Level(last)]
    return f"{parts.plain(said)} :{look.color}[{look.sign}{_NO_BREAK}**{last}**]".strip()


if __name__ == "__main__":
    page()
