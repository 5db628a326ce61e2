"""Databases as a reader meets them, and pages without the caches of an earlier test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import streamlit as st
from example_databases import complete, complete_file, database, half_finished

__all__ = ["complete", "complete_file", "database", "half_finished"]


@pytest.fixture(autouse=True)
def _fresh_caches() -> Iterator[None]:
    """A page must not see what an earlier test read."""
    st.cache_data.clear()
    yield
    st.cache_resource.clear()
