"""Ranks whose processes import PyTorch once and serve one training after another."""

import multiprocessing
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from jobs.schema.point import Rank, RanksEnded
from jobs.training.rank import TIMEOUT

T = TypeVar("T")


class WarmRanks:
    """As jobs.schema.point.Launcher, on CPUs: for trainings whose ranks end by themselves. To be closed."""

    name = "warm"

    def __init__(self, ranks: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._stop = context.Event()
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._stop), daemon=True)
            process.start()
            theirs.close()  # so that a dead process is the end of its pipe
            self._pipes.append(ours)
            self._processes.append(process)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()

    def run(
        self,
        ranks: int,
        device: str,
        main: Callable[[Rank], T],
        note: Callable[[Any], None],
        tell: Callable[[str], None],
        stop: threading.Event,
    ) -> list[T]:
        """As jobs.schema.point.Launcher."""
        assert (ranks, device) == (len(self._pipes), "cpu")
        self._stop.clear()
        with tempfile.TemporaryDirectory() as folder:
            for number, pipe in enumerate(self._pipes):
                pipe.send((main, number, ranks, Path(folder)))
            ended = self._ended(note, stop)
        if any(error for _, error in ended.values()):
            raise RanksEnded({}, {})
        return [ended[number][0] for number in range(ranks)]

    def _ended(self, note: Callable[[Any], None], stop: threading.Event) -> dict[int, tuple[Any, str]]:
        """Result and exception text of each rank; passes their messages on."""
        ended: dict[int, tuple[Any, str]] = {}
        while len(ended) < len(self._pipes):
            if stop.is_set():
                self._stop.set()
            for pipe in wait(self._pipes, 0.1):
                assert isinstance(pipe, Connection)
                message = pipe.recv()
                if isinstance(message, tuple):
                    ended[self._pipes.index(pipe)] = message
                else:
                    note(message)
        return ended


def _serve(pipe: Connection, stop: Event) -> None:
    """Be one rank after another, until killed."""
    sending = threading.Lock()

    def post(message: Any) -> None:
        with sending:
            pipe.send(message)

    while True:
        main, number, ranks, folder = pipe.recv()
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=number, world_size=ranks, timeout=TIMEOUT)
        result, error = None, ""
        try:
            result = main(Rank(number, "cpu", post, stop, folder))  # pyright: ignore[reportArgumentType]
        except Exception as err:
            error = repr(err)
            dist.destroy_process_group()
        post((result, error))
