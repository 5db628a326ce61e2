"""Fixtures: databases to read, and empty caches for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import streamlit as st
from example_databases import complete, complete_file, database, half_finished

__all__ = ["complete", "complete_file", "database", "half_finished"]


@pytest.fixture(autouse=True)
def _fresh_caches() -> Iterator[None]:
    """Clear the caches, so that a page does not see reads of an earlier test."""
    st.cache_data.clear()
    yield
    st.cache_resource.clear()
