"""Entry point of the console script `nsa`; Ctrl-C is answered before the commands, most of a start, are imported."""

import sys

from orchestrator.interruption import INTERRUPTED, end_at_once, end_during_imports


def main() -> None:
    """The `nsa` command. Exit codes as of `commands.main`."""
    end_during_imports()
    try:
        from orchestrator.cli import commands

        commands.main()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        end_at_once()
