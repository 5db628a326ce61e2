"""The claim on a run: one process at a time, until it ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from sqlalchemy import text
from waiting import wait_for

from orchestrator.store import Store, StoreError, StoreUnavailable, claim
from orchestrator.store.claim import ClaimedError

RUN = "20261120-120000-demo-abcd"
HOLDER = """
import sys, time
from orchestrator.store import Store
with Store.open(sys.argv[1]) as store, store.claim(sys.argv[2]):
    print("held", flush=True)
    time.sleep(600)
"""


def refused(store: Store, run_id: str = RUN) -> bool:
    try:
        with store.claim(run_id):
            return False
    except ClaimedError as err:
        message = str(err)
    assert message.startswith(f"--resume: {run_id!r}: is being measured by another process")
    assert "\n" not in message
    return True


def free(store: Store) -> bool:
    """Whether the run can be claimed, of a server that may still be catching up with what it missed."""
    try:
        return not refused(store)
    except StoreUnavailable:
        return False


def entered(stack: ExitStack, store: Store) -> bool:
    """Whether the run is claimed now, until the end of the stack."""
    try:
        stack.enter_context(store.claim(RUN))
    except ClaimedError:
        return False
    return True


def test_a_claim_lasts_until_its_process_is_killed(store: Store, database_url: str):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, database_url, RUN], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert refused(store)
        assert refused(store)  # a refusal leaves the claim as it is
        assert not refused(store, "another-run")
    finally:
        holder.kill()
        holder.wait()
    wait_for(lambda: not refused(store), 10)  # Postgres notices the end of a connection within moments


def test_a_claim_ends_with_its_context(store: Store):
    for _ in range(50):
        with store.claim(RUN):
            pass
    with store.claim(RUN):
        assert refused(store)
    assert not refused(store)


def test_nothing_is_left_beside_a_sqlite_file(sqlite_store: Store, tmp_path: Path):
    with sqlite_store.claim("odd/../name"), sqlite_store.claim("other"):
        assert len(list(tmp_path.glob("nsa.db.runs/*.lock"))) == 2
    assert not list(tmp_path.glob("nsa.db.runs*"))


def test_a_removed_lock_file_is_made_again(sqlite_store: Store, tmp_path: Path):
    with sqlite_store.claim(RUN):
        (tmp_path / "nsa.db.runs" / f"{RUN}.lock").unlink()
        with sqlite_store.claim(RUN):  # nothing can guard against it
            pass
    assert not list(tmp_path.glob("nsa.db.runs*"))


def test_a_lock_file_that_its_last_user_removes_meanwhile_is_no_claim(
    sqlite_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lock, locked = fcntl.flock, []

    def removed(fd: int, how: int) -> None:
        if not locked:
            (tmp_path / "nsa.db.runs" / f"{RUN}.lock").unlink()
        locked.append(fd)
        lock(fd, how)

    monkeypatch.setattr(claim.fcntl, "flock", removed)
    with sqlite_store.claim(RUN):
        assert len(locked) == 2
        assert refused(sqlite_store)


@pytest.mark.postgres
@pytest.mark.parametrize("new_database", ["postgres"], indirect=True)
def test_a_claim_lost_with_its_connection_is_taken_again(store: Store, monkeypatch: pytest.MonkeyPatch):
    def end_others() -> int:
        others = "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'"
        with store.session() as session:
            return len(session.execute(text(others)).all())

    monkeypatch.setattr(claim, "_CHECK_S", 0.05)
    with store.claim(RUN):
        assert end_others() == 1
        wait_for(lambda: refused(store), 10)
    assert not refused(store)


@pytest.mark.postgres
@pytest.mark.parametrize("new_database", ["postgres"], indirect=True)
def test_a_claim_is_given_back_at_once_while_the_server_hangs(store: Store, monkeypatch: pytest.MonkeyPatch):
    """After SIGTERM a driver has two seconds to end."""
    monkeypatch.setattr(claim, "_CHECK_S", 0.05)
    with ExitStack() as stack:
        with store.claim(RUN):
            with store.session() as session:
                [backend] = session.scalars(text("SELECT pid FROM pg_locks WHERE locktype = 'advisory'")).all()
            os.kill(backend, signal.SIGSTOP)
            stack.callback(os.kill, backend, signal.SIGCONT)
            time.sleep(0.5)  # the keeper waits for an answer
            asked = time.monotonic()
        assert time.monotonic() - asked < 1
    wait_for(lambda: free(store), 10)


@pytest.mark.postgres
@pytest.mark.parametrize("new_database", ["postgres"], indirect=True)
def test_a_claim_is_unlocked_before_the_server_sees_its_connection_end(store: Store, monkeypatch: pytest.MonkeyPatch):
    left = []
    with monkeypatch.context() as patch:
        patch.setattr(claim._AdvisoryLock, "_hang_up", lambda self: left.append(self))
        patch.setattr(claim._AdvisoryLock, "_drop", lambda self: None)
        with store.claim(RUN):
            pass
    assert not refused(store)
    for lock in left:
        lock._drop()


@pytest.mark.postgres
@pytest.mark.parametrize("new_database", ["postgres"], indirect=True)
def test_a_released_claim_takes_no_answer_of_a_later_connection(store: Store, monkeypatch: pytest.MonkeyPatch):
    """The keeper must not go on with the descriptor of its closed connection, which the next connection gets."""
    monkeypatch.setattr(claim, "_CHECK_S", 0.001)
    monkeypatch.setattr(claim, "_UNLOCK_S", 0)  # as if the server did not answer in time
    for _ in range(300):
        with ExitStack() as stack:
            wait_for(lambda stack=stack: entered(stack, store), 5)
            time.sleep(0.002)
            keepers = [thread for thread in threading.enumerate() if thread.name == f"claim on {RUN}"]
        assert not any(keeper.is_alive() for keeper in keepers)


@pytest.mark.parametrize("new_database", ["sqlite"], indirect=True)
def test_a_database_that_cannot_hold_a_claim_is_named(store: Store, tmp_path: Path):
    (tmp_path / "nsa.db.runs").touch()
    with pytest.raises(StoreError, match=r"NSA_DATABASE_URL: .* cannot be locked") as caught, store.claim(RUN):
        pass
    assert not isinstance(caught.value, ClaimedError | StoreUnavailable)


def test_a_link_to_the_file_leads_to_the_same_claim(tmp_path: Path):
    (tmp_path / "link.db").symlink_to(tmp_path / "nsa.db")
    with (
        Store.open(f"sqlite:///{tmp_path / 'nsa.db'}") as store,
        Store.open(f"sqlite:///{tmp_path / 'link.db'}") as linked,
        store.claim(RUN),
    ):
        assert refused(linked)
