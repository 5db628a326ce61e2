"""Writers beside each other: one driver has the lease on a run, and a locked table ends a write in time."""

import os
import subprocess
import sys

import pytest

from orchestrator.store import Store
from orchestrator.store.models import Run
from orchestrator.store.store import LeaseHeld

RUN = "20261120-120000-demo-abcd"


@pytest.fixture
def stored(store: Store, sweep) -> Store:
    """A store that has the run."""
    store.apply_many(sweep(RUN))
    return store


def owner(store: Store) -> str | None:
    with store.session() as session:
        run = session.get(Run, RUN)
        assert run is not None
        return run.lease_owner


def test_a_second_driver_is_refused_in_one_line(stored: Store, lease_to_another) -> None:
    lease_to_another(stored, RUN)
    with pytest.raises(LeaseHeld) as caught:
        stored.take_lease(RUN)
    told = str(caught.value)
    assert f"run: {RUN!r}: is being measured by process 77 on bench2, whose lease in " in told
    assert f"nsa cancel {RUN}" in told
    assert "\n" not in told
    stored.end_lease(RUN)
    assert owner(stored) == "bench2/77"


def test_an_expired_lease_is_taken_renewed_and_ended(stored: Store, lease_to_another) -> None:
    lease_to_another(stored, RUN, seconds=-1)
    for _ in range(2):
        stored.take_lease(RUN)
        assert str(owner(stored)).endswith(f"/{os.getpid()}")
    stored.end_lease(RUN)
    assert owner(stored) is None


def test_a_killed_process_of_this_host_has_no_lease(stored: Store) -> None:
    code = "import sys; from orchestrator.store import Store; Store.open(sys.argv[1]).take_lease(sys.argv[2])"
    url = stored.engine.url.render_as_string(hide_password=False)
    subprocess.run([sys.executable, "-c", code, url, RUN], check=True, timeout=60)
    ended = owner(stored)
    assert ended is not None
    stored.take_lease(RUN)
    assert owner(stored) != ended
