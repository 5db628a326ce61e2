"""Now page: what the nodes and their GPUs do, what is measured, what waits and why, how the last day's runs ended."""

from urllib.parse import urlencode

import streamlit as st

from dashboard import data, grids, help_pages, parts
from orchestrator.report.now import Line
from orchestrator.store import Store


@data.explained
def page() -> None:
    store = data.open_store()
    st.title("Now")
    if data.counts(store)["runs"]:
        st.fragment(_sections, run_every=data.LIVE_SECONDS)(store)
    else:
        help_pages.nothing_yet()


@data.explained
def _sections(store: Store) -> None:
    for section in data.now(store, parts.zone()):
        st.subheader(section.title)
        if section.lines:
            grids.table([_cells(line) for line in section.lines])
        else:
            st.caption(section.none)


def _cells(line: Line) -> dict[str, str]:
    """The cells as Markdown: the run is a link to its page, or its point's; a failure is red."""
    cells = {name: parts.plain(parts.named(text)) for name, text in line.cells.items()}
    if line.point_id:
        cells["Run"] = parts.point_link(line.point_id, cells["Run"])
    elif line.run_id:
        cells["Run"] = f"[{cells['Run']}](runs?{urlencode({'run': line.run_id})})"
    if state := line.cells.get("State"):
        cells["Ended"] = cells["Ended"].replace(" ", "\N{NO-BREAK SPACE}")
        look = parts.RUN_STATES["failed" if "failed" in state else state]
        cells["State"] = f":{look.color}[{look.sign} {cells['State']}]"
    return cells


if __name__ == "__main__":
    page()
