"""Legend below a chart, as text of the page: its names are never cut, and break into lines on a narrow screen."""

from __future__ import annotations

from collections.abc import Iterable

import streamlit as st

from jobs.schema.plain_text import for_html
from orchestrator.report.series import Look

_NAME = 300  # characters shown of a name
_BOX = "display: flex; flex-wrap: wrap; gap: 0.2rem 1.25rem; font-size: 0.875rem"
_ENTRY = "display: flex; align-items: baseline; gap: 0.4rem; overflow-wrap: anywhere"
_MARK = "width: 1rem; flex: none; text-align: center; font-size: 1.15rem; line-height: 1"


def show(entries: Iterable[tuple[str, Look]]) -> None:
    """Draw each series' mark in its colour, and its name."""
    shown = "".join(map(_entry, entries))
    st.html(f'<div class="legend" style="{_BOX}">{shown}</div>')


def _entry(entry: tuple[str, Look]) -> str:
    name, look = entry
    mark = f'<span style="{_MARK}; color: {look.color}">{look.sign}</span>'
    return f'<span style="{_ENTRY}">{mark}<span style="opacity: 0.8">{for_html(name, _NAME)}</span></span>'
