"""Pages of the dashboard in Streamlit's test harness: drawn, checked and read."""

from __future__ import annotations

from pathlib import Path

from streamlit.testing.v1 import AppTest

ROOT = Path(__file__).resolve().parents[1]


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
    said = [str(element.value) for kind in kinds for element in kind]
    tables = [table.value.to_csv() for table in (*app.table, *app.dataframe)]
    return "\n".join([*said, *tables]).replace("\\", "").replace("\N{NO-BREAK SPACE}", " ")
