"""Controls whose values are in the page's address, as `?name=value&name=value`.

The address is their only memory: a control shows the value that the address has for it, and writes its new value there
when it is changed. A reload, a copied link and the browser's way back therefore show the same. Defaults are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Sequence
from typing import Any, TypedDict
from urllib.parse import urlencode

import streamlit as st

from dashboard import parts

ALL, NONE = "all", "none"  # in the address: nothing is chosen although the default is something


class Binding(TypedDict):
    """Arguments that bind a widget to the address."""

    key: str
    on_change: Callable[[], None]


class Address:
    """The address of one page as its controls read it, with the values in it that they do not know.

    Args:
        own: names in the address that belong to the page itself.
    """

    def __init__(self, own: Sequence[str] = ()) -> None:
        self._names = set(own)
        self._ignored: list[str] = []

    def many(self, name: str, options: Sequence[str], default: Sequence[str] = (), empty: str = ALL) -> Binding:
        """Binding of a control with several values, set to the address's or the default.

        Args:
            empty: the word in the address for no value, where the default has some.
        """
        requested = st.query_params.get_all(name)
        known = [] if requested == [empty] else self._known(name, requested, options)
        values = known if known or requested == [empty] else list(default)
        return self._bind(name, values, list(default), empty)

    def one(self, name: str, options: Container[str] | None, default: str | None = None) -> Binding:
        """Binding of a control with one value; `options` None: any text."""
        requested = st.query_params.get_all(name)[-1:]
        known = requested if options is None else self._known(name, requested, options)
        return self._bind(name, known[0] if known else default, [default] if default else [], "")

    def tell(self) -> None:
        """Say which values and names of the address were ignored."""
        unknown = [parts.code(name) for name in st.query_params if name not in self._names]
        if ignored := [*self._ignored, *unknown]:
            st.caption(f":material/link_off: Unknown in the address, ignored: {', '.join(ignored)}")

    def _known(self, name: str, requested: Sequence[str], options: Container[str]) -> list[str]:
        self._ignored += [parts.code(f"{name}={value}") for value in requested if value not in options]
        return [value for value in dict.fromkeys(requested) if value in options]

    def _bind(self, name: str, value: Any, default: list[str], empty: str) -> Binding:
        self._names.add(name)
        key = f"address-{name}"
        st.session_state[key] = value

        def write() -> None:
            chosen = st.session_state[key]
            values = list(chosen) if isinstance(chosen, list | tuple) else [chosen] if chosen else []
            if sorted(values) == sorted(default) or not (values or empty):
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
