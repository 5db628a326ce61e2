"""The actor that the messages of a point's ranks go through; it imports no more than it needs, as it starts first."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence


class Mailbox:
    """Actor with the ranks' messages and the stop request; pickled messages, which only PyTorch could read."""

    def __init__(self) -> None:
        self._messages: list[bytes] = []
        self._arrived = asyncio.Event()
        self._stopped = False

    async def post(self, messages: Sequence[bytes]) -> bool:
        """Add messages of a rank. Returns whether the ranks are to end."""
        self._messages += messages
        if messages:
            self._arrived.set()
        return self._stopped

    async def receive(self, timeout: float) -> list[bytes]:
        """New messages, in the order of their arrival; waits up to `timeout` seconds for the first."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), timeout)
        self._arrived.clear()
        messages, self._messages = self._messages, []
        return messages

    async def stop(self) -> None:
        """Ask the ranks to end."""
        self._stopped = True
