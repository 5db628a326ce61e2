"""Numbers of reports as text: as many digits as their precision is worth."""

from __future__ import annotations

import math

from jobs.schema.quantities import written_unit


def number(value: float | None) -> str:
    """A value with three significant digits, from 100 on whole, and as it is if it is whole; "" for None and NaN."""
    if value is None or math.isnan(value):
        return ""
    size = abs(value)
    if size >= 100 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.{1 if size >= 10 else 2}f}" if size >= 0.1 else f"{value:.3g}"


def rate(value: float | None) -> str:
    """Tokens a second, to three significant digits; "" for None."""
    return "" if value is None else f"{float(f'{value:.3g}'):,.0f}"


def amount(value: float, unit: str) -> str:
    """A value with its unit: "3,844 MiB", "2.07 ms", "485,000 tok/s"."""
    match unit:
        case "token" | "MiB":
            text = f"{math.floor(value + 0.5):,}"  # half up, as the reports of others do
        case "tok/s":
            text = rate(value)
        case "J/tok":
            text = f"{value:.3g}"
        case "%":
            text = f"{value:.1f}"
        case "1":
            return f"{value:g}"
        case _:
            text = number(value)
    return f"{text} {written_unit(unit, value)}"
