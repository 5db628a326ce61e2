"""Chart of the sparse attention's time by branch."""

from __future__ import annotations

import altair as alt
import pandas as pd

from orchestrator.judge.branches import Branch
from orchestrator.report.charts import length_label
from orchestrator.report.series import AMBER, BROWN, GREY, PERIWINKLE, PINK, TEAL, Look

_COLORS = {
    Branch.COMPRESSED: AMBER,
    Branch.SELECTED: PERIWINKLE,
    Branch.WINDOW: TEAL,
    Branch.REST: GREY,
    Branch.OTHER: BROWN,
    Branch.SHARED: PINK,
}


def branch_chart(frame: pd.DataFrame, *, height: int = 320, legend: bool = True) -> alt.Chart:
    """Chart of each branch's share of one series' time, a bar per sequence length, the compressed branch at the foot.

    Args:
        frame: rows of one series (`orchestrator.judge.branches.shares_frame`).
        legend: whether the chart has its legend; a page draws `branch_legend` instead, whose lines can break.

    Raises:
        ValueError: there is no row.
    """
    if frame.empty:
        raise ValueError("frame: there is no share to draw")
    order = [name for name, _ in branch_legend(frame)]
    lengths = sorted(set(frame["seq_len"]))
    shown = frame.assign(
        length=[length_label(length) for length in frame["seq_len"]],
        place=[order.index(branch) for branch in frame["branch"]],
    )[["branch", "milliseconds", "share", "length", "place"]]
    colors = alt.Scale(domain=order, range=[_COLORS[Branch(branch)] for branch in order])
    key = alt.Legend(title=None, orient="bottom", columns=6) if legend else None
    share = alt.Axis(format="%", tickCount=5, gridOpacity=0.35)
    return (
        alt.Chart(shown)
        .mark_bar(stroke="transparent", strokeWidth=1)
        .encode(
            x=alt.X(
                "length:N",
                title="sequence length S [tokens]",
                sort=[length_label(length) for length in lengths],
                axis=alt.Axis(labelAngle=0),
            ),
            y=alt.Y("share:Q", title="share of the time", axis=share, scale=alt.Scale(domain=[0, 1])),
            color=alt.Color("branch:N", scale=colors, legend=key),
            order="place:Q",
            tooltip=[
                alt.Tooltip("branch:N"),
                alt.Tooltip("length:N", title="S"),
                alt.Tooltip("share:Q", format=".1%"),
                alt.Tooltip("milliseconds:Q", title="ms", format=",.4~g"),
            ],
        )
        .properties(height=height)
    )


def branch_legend(frame: pd.DataFrame) -> list[tuple[str, Look]]:
    """Name and look of each branch of the chart, from its foot."""
    present = set(frame["branch"])
    return [(branch.value, Look(_COLORS[branch], "square")) for branch in Branch if branch.value in present]
