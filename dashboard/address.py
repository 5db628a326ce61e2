"""Values that a page keeps in its address, so that a reload, a copied link and the browser's way back show the same.

Streamlit's own `bind="query-params"` serves where options are written as they are. It writes what an option is shown
as, and keeps a value when the default changes: the filters of the Scaling page do neither.
"""

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

import streamlit as st

from dashboard import parts

ALL, NONE = "all", "none"  # in the address: nothing is chosen although the default is something


def known_values(name: str, options: Sequence[str], empty: str = "") -> list[str]:
    """The values of the address that are options; others (but for `empty`) are removed from it, with a word."""
    requested = dict.fromkeys(st.query_params.get_all(name))
    known = [value for value in requested if value in options]
    if unknown := [parts.code(f"{name}={value}") for value in requested if value not in (*options, empty)]:
        st.toast(f"Unknown in the address, ignored: {', '.join(unknown)}", icon=":material/link_off:")
        st.query_params[name] = known
    return known


def bound(name: str, options: Sequence[str], default: Sequence[str], empty: str = ALL) -> dict[str, Any]:
    """Arguments that bind a control with several values to the address; the default is left out of it, and unknown
    values are removed, with a word.

    Args:
        empty: the word in the address for no value, where the default has some.
    """
    requested = st.query_params.get_all(name)
    known = known_values(name, options, empty)
    key = f"address-{name}"
    st.session_state[key] = known if known or requested == [empty] else list(default)

    def write() -> None:
        values = list(st.session_state[key])
        if sorted(values) == sorted(default):
            st.query_params.pop(name, None)
        else:
            st.query_params[name] = values or [empty]

    return {"key": key, "on_change": write}


def leave(page: str, **query: str) -> None:
    """Open another page at an address, as a link would; relative, so that it also works behind a proxy's prefix.

    `st.switch_page` first gives the page that is left the other page's query, and adds that to the browser's history:
    the way back would not lead to what was left.
    """
    url = json.dumps(f"{page}?{urlencode(query)}")  # urlencode leaves neither quotes nor brackets
    st.html(f"<script>window.location.assign({url})</script>", unsafe_allow_javascript=True)
