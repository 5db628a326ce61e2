"""Entry point of the console script `nsa`; it imports the commands, most of a start, where Ctrl-C is answered."""

from __future__ import annotations

import sys

from orchestrator.interruption import INTERRUPTED, AtOnce, end_at_once


def main() -> None:
    """The `nsa` command. Exit codes as of `commands.main`."""
    try:
        with AtOnce():
            from orchestrator.cli import commands
        commands.main()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        end_at_once()
