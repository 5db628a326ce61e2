"""Chart of a metric's samples."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import pandas as pd

from jobs.schema.quantities import written_unit
from orchestrator.report.series import BLUE


def samples_chart(samples: Sequence[float], unit: str, *, height: int = 170) -> alt.Chart:
    """Chart of all samples in order, to show drift, outliers and warm-up."""
    title = written_unit(unit)
    frame = pd.DataFrame({"sample": range(1, len(samples) + 1), "value": list(samples)})
    return (
        alt.Chart(frame)
        .mark_line(point=alt.OverlayMarkDef(size=28, filled=True), color=BLUE, strokeWidth=1)
        .encode(
            x=alt.X(
                "sample:Q",
                title="sample",
                scale=alt.Scale(zero=False, nice=False),
                axis=alt.Axis(tickMinStep=1, format="d", grid=False),
            ),
            y=alt.Y("value:Q", title=title, scale=alt.Scale(zero=False, nice=True), axis=alt.Axis(tickCount=4)),
            tooltip=["sample:Q", alt.Tooltip("value:Q", format=",.4~g", title=title)],
        )
        .properties(height=height)
    )
