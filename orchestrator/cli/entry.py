"""Entry point of the console script `nsa`; it imports the commands where Ctrl-C is already answered."""

from __future__ import annotations

import sys

from orchestrator.interruption import INTERRUPTED, AtOnce, end_at_once


def main() -> None:
    """The `nsa` command. Exit codes as of `commands.main`."""
    try:
        with AtOnce():
            import jobs.specs.load  # noqa: F401  (with the commands, whose errors it has: most of the time of a start)
            from orchestrator.cli import commands
        commands.main()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        end_at_once()
