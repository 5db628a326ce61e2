"""Fixtures: databases to read, and empty caches for each test."""

from collections.abc import Iterator
from functools import cache

import pytest
import streamlit as st
from made_up_runs import complete, complete_file, database, half_finished
from streamlit.components.v2 import manifest_scanner

__all__ = ["complete", "complete_file", "database", "half_finished"]


@pytest.fixture(scope="session", autouse=True)
def _one_look_for_components() -> Iterator[None]:
    """Look for Streamlit's components once: each page in the test harness reads every package's metadata, for 0.5 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_scanner, "scan_component_manifests", cache(manifest_scanner.scan_component_manifests))
        yield


@pytest.fixture(autouse=True)
def _fresh_caches() -> Iterator[None]:
    """Clear the caches, so that a page does not see reads of an earlier test."""
    st.cache_data.clear()
    yield
    st.cache_resource.clear()
