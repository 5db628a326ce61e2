"""Reports, all from templates: Jinja files with queries, tables, charts and evidence (docs/reports.md)."""

import json
import posixpath
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import vl_convert
from jinja2 import FileSystemLoader, StrictUndefined, TemplateSyntaxError, Undefined
from jinja2.sandbox import SandboxedEnvironment
from markupsafe import Markup
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from jobs.schema import plain_text
from jobs.schema.plain_text import error_in_a_line, for_file, for_html, in_a_line
from jobs.schema.quantities import readable
from orchestrator.errors import UserError
from orchestrator.judge.branches import take_overs
from orchestrator.judge.decisions import Decision
from orchestrator.report import bench
from orchestrator.report.evidence import ANY, Evidence, LoadSpec, Spec, device, tally
from orchestrator.report.table import Table
from orchestrator.report.write import FIRST, Facts, growth_chart
from orchestrator.settings import example_spec
from orchestrator.store import Store, queries
from orchestrator.store.exporter import OutputError, to_csv, to_json, write_file

SUFFIX = ".j2"
FORMATS = ("md", "html", "csv", "json")
_NAME = 100  # characters of a picture's title
_ROWS = 40  # of a table that a reader sees before all else


def report(store: Store, run_ids: Sequence[str], format: str = "md", out: Path | None = None) -> str:
    """The report of these runs in one of FORMATS; with `out`, it is written there, too, in the format of the suffix.

    Markdown has charts only beside a file, HTML in itself. Raises UserError if there are no runs or a file cannot be
    written.
    """
    format = format if out is None else out.suffix.removeprefix(".")
    if format not in FORMATS:
        raise UserError(f"out: '{out}' has an unknown suffix; use .md, .html, .csv or .json")
    if not run_ids:
        raise UserError(f"RUN: no runs are stored; submit one: nsa submit {example_spec()}")
    if format in ("md", "html"):
        facts = Facts(store, run_ids)
        tables = list(facts.tables())
        full = [(each.title.split(",")[0], each) for each in tables if each.rows]
        wanted = FIRST if {"Operator", "Scaling"} & {title for title, _ in full} else (*FIRST, "Results")
        first = [each for title, each in full if title in wanted and len(each.rows) <= _ROWS]
        about = {"title": facts.title, "answers": list(facts.answers()), "first": first}
        about["rest"] = [table for table in tables if table not in first]
        about["charts"] = facts.charts() if out or format == "html" else []
        evidence = Evidence(store, run_ids, lambda *_: None)
        return _render(Path(__file__).parent, f"report.{format}{SUFFIX}", evidence, out, about)
    text = (to_csv if format == "csv" else to_json)(store, run_ids)
    if out is not None:
        write_file(out, text)
    return text


def render(store: Store, path: Path, run_ids: Sequence[str], load: LoadSpec, out: Path | None = None) -> str:
    """The text of a report's template; with `out`, it and its charts are written there, too.

    The template sees these runs, newest first, and ready specs by `load`. Raises UserError if it is wrong (the
    message names file and line), or a file cannot be written.
    """
    return _render(path.parent, path.name, Evidence(store, run_ids, load), out)


def render_folder(store: Store, folder: Path, run_ids: Sequence[str], load: LoadSpec, out: Path) -> list[Path]:
    """Render each template below a folder to the same place below `out`, except parts of others, whose names begin
    with _. Returns the files. Raises UserError as `render`, and if there is no template."""
    names = [path.relative_to(folder) for path in sorted(folder.rglob(f"*{SUFFIX}")) if not path.name.startswith("_")]
    if not names:
        raise UserError(f"template: '{folder}' holds no file *{SUFFIX}; name a template or a folder of templates")
    evidence = Evidence(store, run_ids, load)
    for name in names:
        _render(folder, name.as_posix(), evidence, out / name.with_suffix(""))
    return [out / name.with_suffix("") for name in names]


class _Environment(SandboxedEnvironment):
    def join_path(self, template: str, parent: str) -> str:
        """Parts of a template are named as seen from its folder."""
        return posixpath.normpath(posixpath.join(posixpath.dirname(parent), template))


def _render(
    folder: Path, name: str, evidence: Evidence, out: Path | None, about: Mapping[str, Any] = MappingProxyType({})
) -> str:
    suffixes = Path(name.removesuffix(SUFFIX)).suffixes
    calls = _Calls(evidence, ".html" in suffixes, ".md" in suffixes, out)
    environment = _Environment(
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        autoescape=True,  # by `finalize`: what it returns is not escaped again
        finalize=calls.shown,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        extensions=["jinja2.ext.do", "jinja2.ext.loopcontrols"],
    )
    environment.filters |= {"amount": readable, "number": number, "device": device, "tally": tally}
    environment.filters |= {"mean_interval": _mean_interval, "text": calls.text}
    environment.filters |= {"code": lambda value: Markup(plain_text.code(value))}
    # SQLite's driver returns the text of a column of JSON.
    environment.filters |= {"from_json": lambda value: json.loads(value) if isinstance(value, str) else value}
    functions = (calls.query, calls.table, calls.measured, calls.chart, calls.fits, calls.bench_tables)
    functions = (*functions, calls.decisions, calls.quantity, calls.picture, take_overs)
    environment.globals |= {each.__name__: each for each in functions} | {"any": ANY, "runs": evidence.runs}
    environment.globals |= {"spec": partial(Spec, evidence), "benches": partial(bench.collect, evidence.store)}
    try:
        rendered = environment.get_template(name).render(about)
    except OutputError:
        raise
    except Exception as err:  # whatever a template does wrong
        place, message = folder / name, in_a_line(err)
        frames = [frame for frame in traceback.extract_tb(err.__traceback__) if frame.filename.endswith(SUFFIX)]
        if isinstance(err, TemplateSyntaxError):
            place = f"{err.filename or place}:{err.lineno}"
        elif frames:
            place = f"{frames[-1].filename}:{frames[-1].lineno}"
        if isinstance(err, SQLAlchemyError):
            message = f"the query fails: {in_a_line(getattr(err, 'orig', None) or err)}"
        elif not isinstance(err, UserError) and not type(err).__module__.startswith("jinja2"):
            message = error_in_a_line(err)
        raise UserError(f"{place}: {message}") from None
    if ".md" in suffixes:
        rendered = re.sub(r"\n{3,}", "\n\n", rendered)  # what loops and conditions leave
    if out is not None:
        write_file(out, rendered)
    return rendered


def _mean_interval(values: Sequence[float]) -> str:
    """Mean of repeats, and the half width of its 95 % interval by Student's t."""
    from scipy import stats  # long to import

    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return f"{fmean(values):.4f} ± {half:.4f}"


class _Calls:
    """Functions that a template can call. `out`: the file that it becomes, if any."""

    def __init__(self, evidence: Evidence, html: bool, markdown: bool, out: Path | None) -> None:
        self._evidence, self._store = evidence, evidence.store
        self._run_ids = [run["run_id"] for run in evidence.runs]
        self._html, self._out = html, out
        self._draw = Table.html if html else Table.markdown
        self._escape = for_html if html else for_file if markdown else None

    def shown(self, value: Any) -> Any:
        """A value as a report has it: numbers with four digits, nothing for None, text escaped."""
        if isinstance(value, Undefined | Markup):
            return value
        if value is None:
            return Markup("")
        if self._escape is None:  # of data files
            return Markup(value)
        if isinstance(value, float | Decimal):
            return Markup(number(float(value)))
        if isinstance(value, int) and not isinstance(value, bool):
            return Markup(f"{value:,}")
        return Markup(self._escape(str(value)))

    def text(self, value: str, length: int) -> Markup:
        """A text, escaped, of this length at most."""
        return Markup(self._escape(value, length) if self._escape else value)

    def query(self, sql: str, **parameters: object) -> list[dict[str, Any]]:
        """The rows of a query of the views and tables of docs/database.md, as dictionaries."""
        if not re.match(r"\s*(select|with)\b", sql, re.IGNORECASE):  # ATTACH of SQLite would leave an empty file
            raise UserError(f"query: {in_a_line(sql)!r}: is no query; begin with SELECT or WITH")
        with self._store.engine.connect() as connection:
            return [dict(row) for row in connection.execute(text(sql), parameters).mappings()]

    def table(self, rows: Iterable[Any], columns: Sequence[str] = ()) -> Markup:
        """Rows (of a query, or lists with `columns`) as a table in Markdown or HTML; "None." without rows."""
        rows = list(rows)
        if not rows:
            return Markup("None.")
        columns = columns or list(rows[0])
        cells = [list(row.values()) if isinstance(row, Mapping) else list(row) for row in rows]
        return Markup(self._draw(Table("", "", columns, [[self.shown(cell) for cell in row] for row in cells])))

    def measured(
        self, run_ids: Iterable[str], metrics: Sequence[str], columns: Sequence[str] = ("label",), newest: bool = False
    ) -> Markup:
        """A table with a row a point that has one of these metrics, after these columns of v_points; with `newest`, of
        several points that agree in these columns only that of the first run."""
        units: dict[str, str] = {}
        rows: dict[tuple[str, ...], list[Any]] = {}
        for run_id in run_ids:
            for point in self._evidence.points(run_id):
                values = self._evidence.values(point)
                units |= {name: values[name][1] for name in metrics if name in values}
                key = (*(str(point[name]) for name in columns), "" if newest else point["point_id"])
                if values.keys() & set(metrics) and key not in rows:
                    cells = [values[name][0] if name in values else None for name in metrics]
                    rows[key] = [*(point[name] for name in columns), *cells]
        titles = [name if units.get(name, "1") == "1" else f"{name} [{units[name]}]" for name in metrics]
        return self.table(rows.values(), [*columns, *titles])

    def chart(self, metric: str, run_ids: Sequence[str] | None = None, title: str = "", **axes: object) -> Markup:
        """A chart of a metric against S, of points with these axes: an SVG in HTML, else a PNG beside the report."""
        run_ids = self._run_ids if run_ids is None else list(run_ids)
        rows = queries.scaling(self._store, run_ids=run_ids)
        for name, value in axes.items():
            if name not in rows:
                raise UserError(f"chart: {name!r}: is no axis; use one of {', '.join(map(str, rows.columns))}")
            rows = rows.loc[rows[name] == value]
        quantity = queries.quantities(self._store, run_ids).of(metric)
        drawn = growth_chart(rows, self.fits(run_ids), quantity)
        if drawn is None:
            raise UserError(f"chart: {metric!r}: has no rows to draw")
        return self.picture(drawn, metric, title or f"{quantity.title} per sequence")

    def picture(self, drawn: Any, name: str, title: str) -> Markup:
        """A chart in Vega-Lite as a picture: an SVG in HTML, else a PNG of this name beside the report."""
        if self._html:
            return Markup(vl_convert.vegalite_to_svg(drawn))
        if self._out is None:
            return Markup("*(chart: {})*").format(Markup(for_file(title)))
        image = self._out.with_name(f"{self._out.stem}-{re.sub(r'[^a-z0-9]+', '-', name)}.png")
        write_file(image, vl_convert.vegalite_to_png(drawn, scale=2))
        shown = re.sub(r"[\[\]<>`\\]", " ", in_a_line(title, _NAME))
        return Markup(f"![{shown}]({quote(image.name)})")

    def fits(self, run_ids: Iterable[str]) -> list[Any]:
        """The fitted growth of each series of these runs."""
        return [fit for run_id in run_ids for fit in self._evidence.fits(run_id)]

    def bench_tables(self, run_ids: Iterable[str]) -> list[tuple[str, str, Markup]]:
        """Title, note and table of each table that `nsa report` has of runs of kind bench."""
        tables = bench.tables(bench.collect(self._store, list(run_ids)))
        return [(each.title, each.note, Markup(self._draw(each))) for each in tables]

    def decisions(self) -> list[Decision]:
        """The decisions on these runs, as `nsa gate` and `nsa plan` have them."""
        return self._evidence.decisions

    def quantity(self, name: str) -> Any:
        """A quantity that the runs declare: its title, unit and whether more of it is better."""
        declared = queries.quantities(self._store, self._run_ids)
        if not any(each.declares(name) for each in declared):
            raise UserError(f"quantity: {name!r}: no run declares it; use one of {', '.join(declared.names())}")
        return declared.of(name)


def number(value: float | None) -> str:
    """A value with four significant digits; "" for None and NaN."""
    return "" if value is None or value != value else readable(value)
