"""Pages of the dashboard in Streamlit's test harness: drawn, checked and read."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from streamlit.testing.v1 import AppTest

ROOT = Path(__file__).resolve().parents[2]


def show(page: str, **query: str) -> AppTest:
    """The page as drawn on a first visit."""
    app = AppTest.from_file(str(ROOT / "dashboard" / "app.py"), default_timeout=60)
    if page != "overview":
        app.switch_page(f"{page}.py")
    for name, value in query.items():
        app.query_params[name] = value
    return check(app.run())


def check(app: AppTest) -> AppTest:
    assert not app.exception, [(found.message, found.stack_trace) for found in app.exception]
    return app


def asked(app: AppTest) -> dict[str, list[str]]:
    """The names and values in the page's address."""
    return {name: [found] if isinstance(found, str) else found for name, found in app.query_params.items()}


def text(app: AppTest) -> str:
    """The text on the page."""
    kinds = (app.title, app.header, app.subheader, app.markdown, app.caption, app.info, app.warning, app.code)
    said = [str(element.value) for kind in kinds for element in kind] + chart_titles(app)
    tables = [table.value.to_csv() for table in (*app.table, *app.dataframe)]
    return "\n".join([*said, *tables]).replace("\\", "").replace("\N{NO-BREAK SPACE}", " ")


def chart_titles(app: AppTest) -> list[str]:
    titles = [json.loads(chart.proto.spec)["title"] for chart in app.get("vega_lite_chart")]
    texts = (title["text"] if isinstance(title, dict) else title for title in titles)
    return [text.replace("\N{NO-BREAK SPACE}", " ") for text in texts]


_AS_IT_IS = ("arrow_data_frame", "code", "html", "json", "vega_lite_chart", "arrow_vega_lite_chart", "image", "imgs")
_PLAIN = dict.fromkeys(("selectbox", "multiselect"), ("options", "raw_value", "raw_values"))
_CODE = re.compile(r"(?<!\\)`[^`]*`")


def markdown(app: AppTest) -> list[str]:
    """All text of the page that Streamlit takes for Markdown, without its code: labels and cells of tables, too."""
    return [_CODE.sub("", text) for text in _texts(app._tree)]


def _texts(node: Any) -> Iterator[str]:
    if node.type == "table":
        for name, cells in node.value.items():
            yield from map(str, (name, *cells))
    elif node.type not in _AS_IT_IS and (proto := getattr(node, "proto", None)) is not None:
        yield from _strings(proto, but=("id", "query_string", *_PLAIN.get(node.type, ())))
    for child in getattr(node, "children", {}).values():
        yield from _texts(child)


def _strings(message: Any, but: tuple[str, ...]) -> Iterator[str]:
    for field, value in message.ListFields():
        for each in value if field.is_repeated else [value]:
            if isinstance(each, str) and field.name not in but:
                yield each
            elif hasattr(each, "ListFields"):
                yield from _strings(each, but)
