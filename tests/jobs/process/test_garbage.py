"""Imports go on without the garbage collector, which is as it was afterwards."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap

import pytest

from jobs.process.garbage import uncollected


def _fail_uncollected() -> None:
    with uncollected():
        assert not gc.isenabled()
        raise KeyError


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was_also_after_an_error(enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KeyError):
            _fail_uncollected()
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_a_kinds_packages_are_imported_without_it() -> None:
    script = """
        import gc
        from jobs.specs.kinds import kind_module
        before = gc.get_stats()[0]["collections"]
        kind_module("train")
        during = gc.get_stats()[0]["collections"] - before
        assert gc.isenabled()
        assert during < 10, during  # hundreds with it
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
