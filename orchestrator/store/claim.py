"""The claim on a run: one process at a time measures it, whichever host it is on.

The journal's lock guards a run on the host that has the journal. The claim is in the database, so it holds where the
journal is gone or on another disk. It ends with its process, also with a killed one: on Postgres it is a session's
advisory lock, on SQLite the lock of a file beside the database.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.pool import NullPool

from orchestrator.database_url import SETTING, StoreError
from orchestrator.store.engine import errors, shown

_CHECK_S = 5.0
_UNLOCK_S, _END_S = 0.3, 0.5
# A host that lost its power closes no connection: the server asks it, and frees the claim after about a minute.
_KEEPALIVE = {"tcp_keepalives_idle": 30, "tcp_keepalives_interval": 10, "tcp_keepalives_count": 3}


class ClaimedError(StoreError):
    """Another process measures the run."""


@contextlib.contextmanager
def claim(engine: Engine, run_id: str) -> Iterator[None]:
    """Hold the claim on a run.

    Raises:
        ClaimedError: another process holds it.
        StoreError, StoreUnavailable: the database cannot be used.
    """
    if engine.dialect.name == "sqlite":
        with _file_lock(engine, run_id):
            yield
        return
    held = _AdvisoryLock(engine, run_id)
    try:
        yield
    finally:
        held.release()


def _claimed(engine: Engine, run_id: str) -> ClaimedError:
    return ClaimedError(
        f"--resume: {run_id!r}: is being measured by another process that uses {shown(engine.url)}; "
        f"wait for its end, or stop it first: nsa cancel {run_id}"
    )


@contextlib.contextmanager
def _file_lock(engine: Engine, run_id: str) -> Iterator[None]:
    database = Path(engine.url.database or "").resolve()  # one claim, whichever link leads to the file
    path = database.with_name(f"{database.name}.runs") / f"{quote(run_id, safe='')}.lock"
    try:
        fd = _locked(path)
    except BlockingIOError:
        raise _claimed(engine, run_id) from None
    except OSError as err:
        raise StoreError(
            f"{SETTING}: {shown(engine.url)!r}: {str(path)!r} cannot be locked ({err.strerror}); use another folder"
        ) from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if _is_at(path, fd):
                path.unlink()  # before it is unlocked: whoever opens it now sees that it is no longer there
            path.parent.rmdir()  # unless another run's claim is in it
        os.close(fd)


def _locked(path: Path) -> int:
    """Descriptor of the locked file at `path`. Raises BlockingIOError if another process has locked it."""
    while True:
        path.parent.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # its last user has just removed it or its folder
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(path, fd):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)


def _is_at(path: Path, fd: int) -> bool:
    return os.path.samestat(path.stat(), os.fstat(fd))


class _AdvisoryLock:
    """An advisory lock on a connection of its own, taken again when a server that went away is back."""

    def __init__(self, engine: Engine, run_id: str) -> None:
        digest = hashlib.sha256(f"nsa run {run_id}".encode()).digest()
        self._key = int.from_bytes(digest[:8], signed=True)
        self._engine = create_engine(
            engine.url, poolclass=NullPool, isolation_level="AUTOCOMMIT", connect_args={"connect_timeout": 10}
        )
        self._connection: Connection | None = None
        self._wire: socket.socket | None = None  # a duplicate of the connection's socket
        self._hanging_up = threading.Lock()
        self._released = threading.Event()
        with errors(engine.url):
            if not self._take():
                raise _claimed(engine, run_id)
        self._keeper = threading.Thread(target=self._keep, name=f"claim on {run_id}", daemon=True)
        self._keeper.start()

    def release(self) -> None:
        """Give the lock back: free on return, or as soon as a server that hangs goes on."""
        self._released.set()
        self._keeper.join(_UNLOCK_S)
        self._hang_up()
        self._keeper.join(_END_S)  # only in a connection attempt it takes longer, and holds nothing

    def _take(self) -> bool:
        """Connect and try to lock. Raises SQLAlchemy's DBAPIError."""
        self._connection = self._engine.connect()
        driver: Any = self._connection.connection.driver_connection
        with self._hanging_up:
            self._wire = socket.socket(fileno=os.dup(driver.fileno()))
        for name, value in _KEEPALIVE.items():
            self._connection.exec_driver_sql(f"SET {name} = {value}")
        taken = self._connection.exec_driver_sql(f"SELECT pg_try_advisory_lock({self._key})").scalar_one()
        if not taken or self._released.is_set():
            self._drop()
        return taken

    def _hang_up(self) -> None:
        """End the connection for the server and for a thread that waits for it.

        Closing it would not do: libpq allows that to the thread that uses the connection alone. Another one would go on
        with its descriptor, and swallow what the server tells a later connection that gets the same number.
        """
        with self._hanging_up:
            if self._wire is not None:
                with contextlib.suppress(OSError):  # it has ended already
                    self._wire.shutdown(socket.SHUT_RDWR)
                self._wire.close()
                self._wire = None

    def _unlock(self) -> None:
        """Unlock, and wait for the server to say so: a connection's end it notices some time later."""
        if self._connection is not None:
            with contextlib.suppress(Exception):  # the server is away, or `release` has hung up
                self._connection.exec_driver_sql(f"SELECT pg_advisory_unlock({self._key})")

    def _drop(self) -> None:
        """Close the connection, in the thread that uses it."""
        self._hang_up()  # else closing would ask a server that may hang
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(Exception):  # of a connection that is broken
                connection.invalidate()
                connection.close()

    def _keep(self) -> None:
        """Take the lock again whenever the connection is lost: a run outlives its database's restart."""
        while not self._released.wait(_CHECK_S):
            try:
                if self._connection is None:
                    self._take()
                else:
                    self._connection.exec_driver_sql("SELECT 1")
            except Exception:  # the server is away, or `release` has hung up
                self._drop()
        self._unlock()
        self._drop()
