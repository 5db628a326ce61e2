"""The legend below a chart, in Streamlit's test harness."""

from __future__ import annotations

from streamlit.testing.v1 import AppTest

from orchestrator.report.series import look


def drawn(name: str) -> str:
    def script(name):  # runs by itself: its names are its own
        from dashboard import legend
        from orchestrator.report import series

        legend.show([(name, series.look("triton"))])

    app = AppTest.from_function(script, kwargs={"name": name}).run(timeout=60)
    assert not app.exception, [found.message for found in app.exception]
    [element] = app.get("html")
    return element.proto.body


def test_a_long_name_is_shown_whole_beside_its_mark():
    name = "Scalable-Flash-NSA, window by flash-attn-4  · · ·  ~ S^1.18 (1.17 to 1.20), 8K–64K"
    html = drawn(name)
    assert name in html
    assert f"color: {look('triton').color}" in html
    assert look("triton").sign in html


def test_a_name_that_pretends_to_be_markup_is_text():
    html = drawn("<script>alert(1)</script><b>x</b>\" onclick='y'")
    assert "<script" not in html
    assert "<b>" not in html
    assert "onclick='" not in html
