"""Files of a point on its page: warnings, texts, downloads."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import data, parts
from orchestrator.execute.artifacts import kept_in
from orchestrator.store import Store

_LISTED = 20  # files that are drawn one below the other; of more, one is chosen
_WARNINGS = 5
_NAME = 100  # characters shown of a name


def show(store: Store, run: Mapping[str, Any], point: Mapping[str, Any]) -> None:
    """Draw what happened to a point's files, then the files."""
    events = data.events(store, point["run_id"])
    _warnings(events.loc[events["point_id"] == point["point_id"], "message"].tolist())
    frame = data.artifacts(store, point["point_id"])
    where = f"{kept_in(run)} (node {point['node'] or run.get('host') or 'unknown'})"
    if frame.empty:
        st.caption("No files were kept.")
    elif len(frame) > _LISTED:
        st.fragment(_choice)(frame, where)
    else:
        for row in frame.to_dict("records"):
            with st.expander(parts.plain(_title(row)), expanded=len(frame) == 1, icon=":material/description:"):
                _file(row, where)


def _warnings(messages: list[str]) -> None:
    lines = [parts.plain(message) for message in messages[:_WARNINGS]]
    if more := len(messages) - len(lines):
        lines.append(f"{parts.count(more, 'more event')}: see the run's page, Events")
    if lines:
        st.warning("  \n".join(lines), icon=":material/info:")


def _choice(frame: pd.DataFrame, where: str) -> None:
    rows = frame.to_dict("records")
    chosen = st.selectbox(
        f"{parts.count(len(rows), 'file')}, {parts.size(sum(row['size'] for row in rows))}",
        range(len(rows)),
        format_func=lambda number: _title(rows[number]),
        key="file",
    )
    with st.container(border=True):
        _file(rows[chosen], where)


def _title(row: Mapping[str, Any]) -> str:
    name = row["name"] if len(row["name"]) <= _NAME else f"{row['name'][:_NAME]}…"
    return f"{name} · attempt {row['attempt']} · {parts.size(row['size'])}"


def _file(row: Mapping[str, Any], where: str) -> None:
    st.caption(f"{parts.code(row['path'])} · sha256 {parts.code(row['sha256'][:16])}")
    _download(row, where)
    if row["truncated"]:
        st.caption("Only its end is shown.")
    if not pd.isna(row["content"]) and row["content"]:
        height = 420 if row["content"].count("\n") > 18 else "content"
        st.code(row["content"], language=None, wrap_lines=True, height=height)
    else:
        st.caption("Empty." if not row["size"] else "Its text is not in the database.")


def _download(row: Mapping[str, Any], where: str) -> None:
    """Offer the whole file. It is read when the button is clicked, into this process's memory.

    A file known to be missing is not offered: the browser would not show why its download failed.
    """
    if here := data.missing(row["path"]):
        st.caption(f"Not in the artifact store of this dashboard, {parts.code(here)}. Kept in {parts.code(where)}.")
        return
    if row["size"] > data.DOWNLOAD_BYTES:
        st.caption("Too large for a browser; copy it with `nsa artifacts RUN --point N --out FOLDER`.")
        return
    st.download_button(
        "Download",
        data=partial(data.artifact, row["path"], row["size"], row["sha256"], where),
        file_name=row["name"],
        mime="application/octet-stream",
        icon=":material/download:",
        key=f"download {row['attempt']} {row['name']}",
        on_click="ignore",
        help=parts.plain(f"kept in {where}"),
    )
