"""Help instead of results: for an empty store, or a database that cannot be read."""

import streamlit as st

from dashboard import parts
from orchestrator.errors import UserError
from orchestrator.judge.rules import GatesError
from orchestrator.settings import SettingsError, example_spec
from orchestrator.store import StoreError, StoreUnavailable

UPGRADE = "nsa db upgrade"
RETRY_SECONDS = 5.0


def explain(err: UserError) -> None:
    """Show an error with its fix, instead of the results."""
    icon, title, text, command = "error", "The database cannot be used", "", "nsa doctor"
    if isinstance(err, SettingsError):
        icon, title = "tune", "A setting cannot be used"
    elif isinstance(err, GatesError):
        icon, title, command = "rule", "The go/no-go rules cannot be used", "nsa gate"
    elif isinstance(err, StoreUnavailable):
        icon, title = "cloud_off", "The database cannot be reached"
        text = "The results are kept, but the database does not answer right now. This page tries again by itself."
    elif isinstance(err, StoreError) and "no such file" in str(err):
        nothing_yet("There is no database yet: the first job makes it.", str(err))
        return
    elif isinstance(err, StoreError) and UPGRADE in str(err):
        icon, title, command = "upgrade", "The database needs an upgrade", UPGRADE
        text = "The tables were made by an older version of this project, or not yet."
    with st.container(border=True):
        st.subheader(f":material/{icon}: {title}")
        st.markdown(text or parts.plain(str(err)))
        st.code(command, language="bash")
        if text:
            st.caption(parts.plain(str(err)))
    _try_again()


def nothing_yet(text: str = "No run has been stored yet.", detail: str | None = None) -> None:
    """Show the commands for the first results."""
    with st.container(border=True):
        st.subheader(":material/rocket_launch: No results yet")
        st.markdown(f"{text} Start the services and submit the demo benchmark; it takes a few minutes on a CPU:")
        st.code(f"nsa up\nnsa submit {example_spec()}", language="bash")
        st.markdown("Our own runs on GPUs, and the figures that others report, come with the package:")
        st.code("nsa import --reference", language="bash")
        st.caption("This page fills by itself as points are measured.")
        if detail:
            st.caption(parts.plain(detail))
    _try_again()


def _try_again() -> None:
    """Redraw the whole page every few seconds."""
    drawn: list[bool] = []

    @st.fragment(run_every=RETRY_SECONDS)
    def again() -> None:
        if drawn:
            st.rerun()
        drawn.append(True)

    again()
