"""Reports from templates: values, tables and charts of the store, and mistakes told by file and line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.schema.states import PointState
from jobs.specs.load import load_spec
from orchestrator.errors import UserError
from orchestrator.judge.rules import READY_SPECS
from orchestrator.report.template import render, render_folder
from orchestrator.store import Store, queries

RUN = "20261120-120000-demo-abcd"

Render = Callable[..., str]


@pytest.fixture
def filled(sqlite_store: Store, sweep) -> Store:
    failures = {PointState.HANG: "silent for 120 s | twice"}
    sqlite_store.apply_many(sweep(lengths=(2048, 4096, 8192), failures=failures, gpu="NVIDIA H200"))
    return Store.open(sqlite_store.engine.url.render_as_string(), create=False, readonly=True)


@pytest.fixture
def rendered(filled: Store, tmp_path: Path) -> Render:
    """Function that renders a template of this text."""

    def rendered(text: str, name: str = "report.md.j2", out: Path | None = None) -> str:
        (tmp_path / name).write_text(text)
        ids = list(queries.run_ids(filled))
        return render(filled, tmp_path / name, ids, lambda file, given: load_spec(READY_SPECS / file, given), out)

    return rendered


def test_a_table_of_a_query_has_its_columns_and_escapes_texts(rendered: Render) -> None:
    text = rendered(
        "{{ table(query('SELECT label, seq_len, reason FROM v_points WHERE state = :state', state='hang')) }}"
    )
    lines = text.splitlines()
    assert lines[:2] == ["| label | seq_len | reason |", "| --- | --- | --- |"]
    assert lines[2].endswith(" | 65,542 | silent for 120 s \\| twice |")
    assert rendered("{{ table(query('SELECT label FROM v_points WHERE 1 = 0')) }}") == "None."


def test_html_escapes_as_html(rendered: Render) -> None:
    text = rendered("{{ '<b>' ~ 1 }}{{ table([['a & b', 2.5]], ['x', 'y']) }}", "report.html.j2")
    assert text.startswith("&lt;b&gt;1<table>")
    assert "<td>a &amp; b</td><td>2.5</td>" in text


def test_a_spec_gives_its_points_or_names_what_would_measure_them(rendered: Render) -> None:
    text = rendered(
        "{% set short = spec('train_m7c.yaml', 'seq_len=512') %}{{ short.cell('time') }}\n{{ short.command|code }}"
    )
    assert text.splitlines() == [
        "not measured: `train_m7c.yaml seq_len=512`",
        "`nsa submit jobs/configs/train_m7c.yaml --set seq_len=512`",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("one\n{{ nothing }}\n", "report.md.j2:2: 'nothing' is undefined"),
        ("{% for %}", "report.md.j2:1: "),
        (
            "one\n\n{{ query('SELECT label, no_such FROM v_points') }}",
            "report.md.j2:3: the query fails: no such column",
        ),
        (
            "\n{{ query('WITH x AS (SELECT 1) DELETE FROM metric') }}",
            "report.md.j2:2: the query fails: attempt to write a readonly database",
        ),
        ("{{ 1 / 0 }}", "report.md.j2:1: ZeroDivisionError: division by zero"),
        ("{{ ''.__class__.__mro__ }}", "report.md.j2:1: access to attribute '__class__' of 'str' object is unsafe."),
        (
            "{{ query('attach database 1 as x') }}",
            "report.md.j2:1: query: 'attach database 1 as x': is no query; begin",
        ),
        ("{{ quantity('zzz') }}", "report.md.j2:1: quantity: 'zzz': no run declares it; use one of time, "),
    ],
)
def test_a_mistake_is_told_in_a_line_with_file_and_line(rendered: Render, text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        rendered(text)
    told = str(caught.value)
    assert message in told
    assert "\n" not in told


def test_a_folder_is_rendered_without_its_parts(filled: Store, tmp_path: Path) -> None:
    templates, out = tmp_path / "templates", tmp_path / "out"
    (templates / "more").mkdir(parents=True)
    (templates / "more" / "_part.md.j2").write_text("{% macro bold(text) %}**{{ text }}**{% endmacro %}")
    (templates / "more" / "page.md.j2").write_text('{% from "_part.md.j2" import bold %}{{ bold(runs|length) }}\n')
    (templates / "page.md.j2").write_text("{% set length = 2048 %}{{ length }}\n")
    ids = list(queries.run_ids(filled))
    written = render_folder(filled, templates, ids, lambda file, given: None, out)
    assert written == [out / "more" / "page.md", out / "page.md"]
    assert [path.read_text() for path in written] == ["**1**\n", "2,048\n"]
    with pytest.raises(UserError, match=r"holds no file \*\.j2; name a template"):
        render_folder(filled, out, ids, lambda file, given: None, out)
