"""The dashboard's entry point (`streamlit run dashboard/app.py`): navigation and sidebar; each page is a file here."""

from pathlib import Path

import streamlit as st

from dashboard import data, parts
from jobs.schema.states import FAILED
from orchestrator.errors import UserError

_ICON = str(Path(__file__).with_name("icon.svg"))


def main() -> None:
    st.set_page_config(page_title="NSA bench", page_icon=_ICON, layout="wide")
    st.logo(_ICON, size="large")
    page = st.navigation(
        {
            "NSA bench": [
                st.Page("overview.py", title="Overview", icon=":material/rule:", default=True),
                st.Page("results.py", title="Results", icon=":material/grid_on:"),
                st.Page("now.py", title="Now", icon=":material/pulse_alert:"),
                st.Page("scaling.py", title="Scaling", icon=":material/show_chart:"),
                st.Page("compare.py", title="Compare", icon=":material/compare_arrows:"),
                st.Page("history.py", title="History", icon=":material/timeline:"),
                st.Page("runs.py", title="Runs", icon=":material/list_alt:"),
                st.Page("fleet.py", title="Fleet", icon=":material/memory:"),
                st.Page("submit.py", title="Submit", icon=":material/send:"),
            ]
        }
    )
    st.html(Path(__file__).with_name("style.css"))
    with st.sidebar:
        _database()
    page.run()


@st.fragment(run_every=data.IDLE_SECONDS)
def _database() -> None:
    """Show the database's address, its last change and its counts."""
    try:
        store = data.open_store()
        counts, changed = data.counts(store), data.last_change(store)
    except UserError:
        st.caption(":material/database_off: no database to read")
        return
    name = store.name
    if name.startswith("sqlite:"):  # the column is narrow: a file's last two parts
        name = "sqlite …/" + "/".join(Path(name.removeprefix("sqlite:///")).parts[-2:])
    st.caption(f":material/database: **Database**  \n{parts.code(name)}")
    failed = sum(counts[f"points_{state}"] for state in FAILED)
    if changed is not None:
        day = parts.moment(changed, "%Y-%m-%d")
        st.caption(f":material/schedule: **Last change**  \n{parts.duration(changed)} ago ({day})")
    st.caption(
        f":material/inventory_2: **Holds**  \n{parts.count(counts['runs_measured'], 'measured run')}, "
        f"{counts['runs_reported']} reported  \n{parts.count(counts['points_ok'], 'point')} ok, {failed:,} failed, "
        f"{counts['points_skipped']:,} skipped  \n{parts.count(counts['metrics'], 'number')}"
    )
    if counts["runs_running"]:
        st.badge(parts.count(counts["runs_running"], "run") + " going on", icon=":material/autorenew:", color="blue")


main()
