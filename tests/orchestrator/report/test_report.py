"""Reports contain the store's states, results, exponents, verdicts and environments, and their charts.

A template's have its values, tables and charts; mistakes are told by file and line.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_up_runs import ENDED, GOING, SHORT, TEXT, changed, store_hostile_runs

import orchestrator
from jobs.schema.quantities import TIME
from jobs.schema.states import PointState, RunState
from jobs.specs.load import load_spec
from orchestrator.errors import UserError
from orchestrator.judge.rules import READY_SPECS
from orchestrator.report.template import render, render_folder, report
from orchestrator.store import Store, queries
from orchestrator.store.importer import import_file
from orchestrator.store.records import RunEndRecord

DATA = Path(orchestrator.__file__).parent / "reference_data"
RUN = "20261120-120000-demo-abcd"


def test_the_results_of_a_kind_without_a_table_of_its_own_are_not_folded(sqlite_store: Store):
    run = "20261124-021342-drill-gpu-0fb0"
    import_file(sqlite_store, Path(__file__).parents[3] / f"docs/results/data/{run}.jsonl.gz")
    seen, _, _ = report(sqlite_store, [run]).partition("<details>")
    assert re.findall("^## (.*)$", seen, re.MULTILINE) == ["Runs", "Results", "Points without a result"]


@pytest.fixture
def filled(sqlite_store: Store, sweep, tmp_path: Path) -> Store:
    failures = {PointState.HANG: "silent for 120 s | twice", PointState.SKIPPED: "needs 93.1 GiB"}
    sqlite_store.apply_many(sweep(lengths=(2048, 4096, 8192), failures=failures, gpu="NVIDIA H200"))
    peers = (DATA / "peers_h200.csv").read_text().splitlines(keepends=True)
    some = tmp_path / "peers.csv"
    some.write_text("".join([peers[0], peers[1], *(line for line in peers if ",12,2,64,8192," in line)]))
    import_file(sqlite_store, some)
    return sqlite_store


def test_markdown_contains_all_sections(filled: Store):
    text = report(filled, [RUN])
    assert text.startswith("# Report: demo\n\n**Time 16 ms, chunked at S=8,192**\n")
    seen, _, folded = text.partition("<details>")
    assert re.findall("^## (.*)$", seen, re.MULTILINE) == ["Runs", "Scaling", "Points without a result"]
    assert "## Verdict linear-scaling/cpu" in folded
    series = "| demo | measured | naive | forward+backward | 12/2 d64 | peak_extra_memory |"
    assert f"{series} S^2.00 (2.00 to 2.00) | 2,048 to 8,192 | 3 |  | 0.0% | 4K 2.0, 8K 2.0 |" in text
    assert "## Verdict linear-scaling/cpu: NO-GO" in text
    assert "| naive-contrast | GO | 2 | >= 1.7 | +0.3 |" in text
    assert "| soak-memory-slope | UNKNOWN |  | <= 0.1 %/1000 steps |  | not measured:" in text
    assert "| naive S=65542 | hang | silent for 120 s \\| twice |" in text
    assert "| naive S=65543 | skipped | needs 93.1 GiB |" in text
    assert "| gpu.driver | 580 |" in text
    assert not any(name in text for name in ("bench1", "GPU-1"))  # reports are shared: no host or GPU ids
    assert "nan" not in text.lower()


def test_reported_peers_of_the_same_shape_and_batch_stand_beside(sqlite_store: Store, sweep):
    import_file(sqlite_store, DATA / "peers_h200.csv")  # 8,192 tokens in a batch of 4, 32,768 alone
    laws = {"chunked": 1.0, "dense": 2.0, "dense-sdpa-flash": 2.0}

    def beside(run_id: str, **axes: object) -> str:
        records = sweep(run_id, laws=laws, lengths=(8192, 16384, 32768), gpu="NVIDIA H200")
        sqlite_store.apply_many(changed(records, axes))
        return report(sqlite_store, [run_id]).partition("## Beside reported figures")[2].partition("\n## ")[0]

    assert "None." in beside("20261120-120000-demo-0001")  # float32 is not compared with bfloat16
    assert "None." in beside("20261120-120000-demo-0002", dtype="bfloat16", layers=5)  # a model, not one operator
    table = beside(RUN, dtype="bfloat16")
    ours = "| chunked | forward+backward | 12/2 d64 | 32,768 | 1 | time [ms] | 64 on NVIDIA H200"
    assert f"{ours} | 9.006 on H200 | Scalable-Flash-NSA | 7.106 |" in table
    assert "| 8,192 |" not in table  # a batch of 1 is not compared with a batch of 4
    assert "32/8 d128" not in table
    dense = [line for line in table.splitlines() if line.startswith("| dense")]
    assert {line.split()[1] for line in dense} == {"dense", "dense-sdpa-flash"}
    assert all("dense, " in line for line in dense)


class Tags(HTMLParser):
    """The tags of a page, and what they lead to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.targets: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.targets += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "style", "onload")
        ]


def test_every_text_of_a_run_is_text_in_its_report(sqlite_store: Store, sweep, tmp_path: Path):
    store_hostile_runs(f"sqlite:///{sqlite_store.engine.url.database}")
    drawn = changed(sweep(RUN), {"implementation": SHORT, "env": TEXT})  # its name is in the charts' legends
    titled = replace(TIME, title=TEXT, short=TEXT)
    sqlite_store.apply_many([drawn[0].model_copy(update={"quantities": (titled,)}), *drawn[1:]])
    runs = [ENDED, GOING, RUN]
    markdown = report(sqlite_store, runs, out=tmp_path / "a.md")
    unfolded, tags = re.subn(r"</?details>(?:<summary>All else: .*</summary>)?\n", "", markdown)
    assert tags == 2
    said = re.sub(r"(?<!\\)`[^`]*`|^!\[[^\[\]]*\]\(a-[a-z-]+\.png\)$", "", unfolded, flags=re.MULTILINE)
    assert not re.search(r"(?<!\\)\]\(|(?<!\\)<[A-Za-z/]|http://(?!\N{WORD JOINER})|(?<!\\)``", said)
    page = report(sqlite_store, runs, format="html")
    tags = Tags(page)
    assert "svg" in tags.names
    assert not tags.names & {"a", "img", "script", "iframe", "image", "object", "i"}
    assert not [target for target in tags.targets if ".invalid" in target]
    for text in (markdown, page):
        assert text.count("evil.invalid") > 20  # it is shown


def test_markdown_is_written_with_charts_beside_it(filled: Store, tmp_path: Path):
    text = report(filled, [RUN], out=tmp_path / "out" / "demo.md")
    names = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert names.keys() == {"demo.md", "demo-scaling-1.png", "demo-time.png", "demo-peak-extra-memory.png"}
    assert names["demo-time.png"].startswith(b"\x89PNG")
    assert "![Time per sequence](demo-time.png)" in text
    assert names["demo.md"].decode() == text


def test_html_needs_no_other_file(filled: Store):
    text = report(filled, [RUN], format="html")
    assert text.count("<svg") == 3
    assert "<h2>Verdict linear-scaling/cpu: NO-GO</h2>" in text
    assert "src=" not in text
    assert "<link" not in text


def test_a_run_that_failed_before_its_first_point_says_why_and_names_no_device(sqlite_store: Store, sweep):
    sqlite_store.apply_many([sweep()[0], RunEndRecord(run_id=RUN, state=RunState.FAILED, reason="no node has a <GPU>")])
    text = report(sqlite_store, [RUN])
    assert f"{RUN} failed: no node has a \\<GPU>." in text
    assert f"| {RUN} | scaling | measured | failed | 0 of 0 ok |  |" in text
    assert f"<p>{RUN} failed: no node has a &lt;GPU&gt;.</p>" in report(sqlite_store, [RUN], format="html")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda store: report(store, []), "no runs are stored"),
        (lambda store: report(store, [RUN], out=Path("x.pdf")), "unknown suffix"),
        (lambda store: report(store, [RUN], out=Path("/dev/null/x.csv")), "cannot be written"),
    ],
)
def test_bad_requests_are_named(sqlite_store: Store, call, message: str):
    with pytest.raises(UserError, match=message):
        call(sqlite_store)


def test_a_chart_needs_no_docstrings(filled: Store, tmp_path: Path) -> None:
    """Altair did, and `nsa report` ended in its AttributeError."""
    command = [sys.executable, "-OO", "-c", "from orchestrator.cli.entry import main; main()"]
    variables = os.environ | {"NSA_DATABASE_URL": f"sqlite:///{tmp_path / 'nsa.db'}"}
    page = tmp_path / "report.html"
    subprocess.run([*command, "report", "--out", str(page)], env=variables, timeout=200, check=True)
    assert "<svg" in page.read_text()


Render = Callable[..., str]


@pytest.fixture
def swept(sqlite_store: Store, sweep) -> Store:
    failures = {PointState.HANG: "silent for 120 s | twice"}
    sqlite_store.apply_many(sweep(lengths=(2048, 4096, 8192), failures=failures, gpu="NVIDIA H200"))
    return Store.open(sqlite_store.engine.url.render_as_string(), create=False, readonly=True)


@pytest.fixture
def rendered(swept: Store, tmp_path: Path) -> Render:
    """Function that renders a template of this text."""

    def rendered(text: str, name: str = "report.md.j2", out: Path | None = None) -> str:
        (tmp_path / name).write_text(text)
        ids = list(queries.run_ids(swept))
        return render(swept, tmp_path / name, ids, lambda file, given: load_spec(READY_SPECS / file, given), out)

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


def test_a_folder_is_rendered_without_its_parts(swept: Store, tmp_path: Path) -> None:
    templates, out = tmp_path / "templates", tmp_path / "out"
    (templates / "more").mkdir(parents=True)
    (templates / "more" / "_part.md.j2").write_text("{% macro bold(text) %}**{{ text }}**{% endmacro %}")
    (templates / "more" / "page.md.j2").write_text('{% from "_part.md.j2" import bold %}{{ bold(runs|length) }}\n')
    (templates / "page.md.j2").write_text("{% set length = 2048 %}{{ length }}\n")
    ids = list(queries.run_ids(swept))
    written = render_folder(swept, templates, ids, lambda file, given: None, out)
    assert written == [out / "more" / "page.md", out / "page.md"]
    assert [path.read_text() for path in written] == ["**1**\n", "2,048\n"]
    with pytest.raises(UserError, match=r"holds no file \*\.j2; name a template"):
        render_folder(swept, out, ids, lambda file, given: None, out)
