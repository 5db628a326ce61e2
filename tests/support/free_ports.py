"""Ports on loopback that nothing listens on."""

import contextlib
import socket


def free_ports(count: int) -> list[int]:
    """Different free ports; another process may take one before it is used."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
