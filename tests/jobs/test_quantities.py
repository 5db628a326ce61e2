"""Values of quantities as texts."""

from __future__ import annotations

import pytest

from jobs.quantities import readable


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (264447.3, "tok/s", "264,447 tok/s"),
        (999.96, "1", "1000"),
        (0.123456, "ms", "0.1235 ms"),
        (-0.0, "%", "0 %"),
        (-12345.6, "1", "-12,346"),
        (2e15, "1", "2e+15"),
    ],
)
def test_values_are_written_to_be_read(value: float, unit: str, text: str) -> None:
    assert readable(value, unit) == text
