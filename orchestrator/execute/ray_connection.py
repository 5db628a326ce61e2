"""The connection of this process to a Ray cluster: its address, what is wrong there, and the files sent with it."""

import logging
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from jobs.schema.plain_text import in_a_line
from jobs.specs.spec import JobSpec
from orchestrator.background import in_background, interruptibly
from orchestrator.errors import ExecutorGone, UserError
from orchestrator.execute import ray_access
from orchestrator.execute.ray_access import connection, listens, local_address
from orchestrator.execute.upload import collect
from orchestrator.settings import Settings

NEVER_S = 600.0  # without any node that could run a point, busy or not, after which a run waits for none
_LOOK_S = 5.0
_REASON = 400  # characters
_GONE_S = 30.0  # after 60 s without its head Ray ends the driver, which could then record nothing
# How client and server of HTTP/2 begin (RFC 9113, 3.4). A channel of gRPC would do, but for its threads, which write
# tracebacks when it is left.
_FRAME, _SETTINGS = 9, b"\x04"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + _SETTINGS + bytes(5)


class ClusterWatch:
    """Whether the cluster's head still answers, and the cluster can ever run a point: nodes come and go meanwhile.

    `check` asks the head, in another thread; it raises UserError while no node, free or busy, can run a point.
    """

    def __init__(self, head: str, check: Callable[[], None] = lambda: None) -> None:
        self._head, self._check = head, check
        self._question: Future[bool] | None = None
        self._asked = self._possible = time.monotonic()
        self._silent: float | None = None  # since when, if the last question has no answer yet

    def look(self) -> None:
        """Look every 5 s, and wait for nothing: a frozen head takes a question and never answers.

        Raises ExecutorGone once the head was silent for 30 s, or no node could run a point for NEVER_S.
        """
        clock = time.monotonic()
        if self._question is None and clock - self._asked >= _LOOK_S:
            self._asked = clock
            self._silent = clock if self._silent is None else self._silent
            self._question = in_background(self._answers)
        if self._question is not None and self._question.done():
            question, self._question = self._question, None
            if question.result():
                self._silent = None
        if self._silent is not None and clock - self._silent > _GONE_S:
            raise ExecutorGone(f"the Ray cluster went away: its head at {self._head} does not answer")

    def _answers(self) -> bool:
        """Whether the head answers. One that is silent is asked for no more, as Ray would end this process over it."""
        if not answers(self._head):
            return False
        clock = time.monotonic()
        try:
            self._check()
            self._possible = clock
        except UserError as err:
            if clock - self._possible >= NEVER_S:
                reason = "; ".join(str(err).splitlines())
                raise ExecutorGone(f"waited {NEVER_S:g} s for a node that can run a point: {reason}") from None
        return True


def answers(address: str) -> bool:
    """Whether a gRPC server at an address, "host:port", answers, if only with its settings.

    A hanging one does not. Ray would wait for it, minutes long, and no signal would end that.
    """
    if os.environ.get("RAY_USE_TLS") == "1":  # its certificates are Ray's matter
        return listens(address)
    with suppress(OSError, ValueError), connection(address) as server:
        server.sendall(_PREFACE)
        return server.recv(_FRAME)[3:4] == _SETTINGS
    return False


def connect(spec: JobSpec, settings: Settings) -> str:
    """Connect this process to the cluster as a driver, whose tasks have the files that the spec names.

    Returns the address of its head. Raises UserError: no cluster answers there, or it lets no driver in; ExecutorGone:
    it fell silent meanwhile.
    """
    address = _address(settings)
    mistake = f"NSA_RAY_ADDRESS: {address or 'auto'!r}:"
    if address and address.startswith("ray://"):
        raise UserError(f"{mistake} is a Ray Client address; give host:port (6379) of the head")
    if address is None or not listens(address):
        raise UserError(f"{mistake} no Ray cluster answers; start one (nsa up), name yours (HOST:PORT) or use --local")
    if not answers(address):
        raise UserError(
            f"{mistake} takes connections, but answers nothing: no Ray cluster, or its head hangs; correct it, restart "
            "the cluster or use --local"
        )
    host, _, port = address.rpartition(":")
    if host in ("127.0.0.1", "localhost"):
        of_host = (one for interface in psutil.net_if_addrs().values() for one in interface)
        others = [one.address for one in of_host if one.family == socket.AF_INET and not one.address.startswith("127.")]
        if not any(listens(f"{other}:{port}") for other in others):
            # Else Ray itself takes loopback for the address that others reach.
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray_access.send_token()
    import ray

    with tempfile.TemporaryDirectory(prefix="nsa-upload-") as folder:
        env = None
        # A job's own upload reaches the workers.
        if "RAY_JOB_CONFIG_JSON_ENV_VAR" not in os.environ and (upload := collect(spec)).files:
            upload.write(package := Path(folder) / "upload.zip")
            env = {"working_dir": str(package)}
        options: dict[str, Any] = {"runtime_env": env, "log_to_driver": False, "logging_level": logging.ERROR}
        try:
            with _own_sigterm() as look_for_it:
                watch = ClusterWatch(address)
                # A cluster that falls silent meanwhile would let no signal through.
                interruptibly(lambda: ray.init(address, **options), lambda: (look_for_it(), watch.look()))
        except ExecutorGone:
            raise
        except ConnectionError:
            raise UserError(
                f"{mistake} answers, but lets no driver in: no Ray cluster, or one that asks for a token which is not "
                "this user's (RAY_AUTH_TOKEN, ~/.ray/auth_token)"
            ) from None
        except Exception as err:  # other versions, a wrong token: Ray's message is the reason
            raise UserError(f"{mistake} {in_brief(err)}; correct it or use --local") from None
    return address


def _address(settings: Settings) -> str | None:
    """The cluster's address: from the Ray job of this process, NSA_RAY_ADDRESS, RAY_ADDRESS, else of `nsa up`.

    Ray's own search ("auto") also finds other users' clusters, which would get this user's token and code.
    """
    inherited = os.environ.get("RAY_ADDRESS", "")
    if inherited.startswith("http"):  # the job server's address, for `ray job` only
        inherited = ""
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ and inherited:
        return inherited
    for address in (settings.ray_address, inherited, local_address(settings)):
        if address and address != "auto":
            return address
    return None


@contextmanager
def _own_sigterm() -> Iterator[Callable[[], None]]:
    """Keep SIGTERM's handler, which Ray replaces, and the signal away while one of Ray's ends the process.

    The function given, to be called meanwhile, raises KeyboardInterrupt if the signal waits; the handler then gets it.
    """
    handler = signal.getsignal(signal.SIGTERM)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def look() -> None:
        if signal.SIGTERM in signal.sigpending():
            raise KeyboardInterrupt
        signal.signal(signal.SIGTERM, handler)  # a thread that was there before would let Ray's have it

    try:
        yield look
    finally:
        signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def in_brief(err: BaseException) -> str:
    """An exception's message on one line, shortened, without colours; without one its class."""
    inner = getattr(err, "health_check_failure", err)  # Ray Train wraps the death of a worker
    return in_a_line(re.sub(r"\x1b\[[0-9;]*m", "", str(inner)), _REASON) or type(inner).__name__
