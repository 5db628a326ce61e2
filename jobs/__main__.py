"""Entry point: `python -m jobs SPEC.yaml` hands the spec to the orchestrator."""

from __future__ import annotations

import sys

from orchestrator.interruption import AtOnce, end_at_once

if __name__ == "__main__":
    with AtOnce():
        from orchestrator import terminal
        from orchestrator.background import leave
        from orchestrator.run.driver import CANCELLED, main
        from orchestrator.settings import misspelled
    terminal.prepare()
    for line in misspelled():
        terminal.warn(f"warning: {line}")
    code = main(sys.argv[1:])
    end_at_once()
    leave(code, at_once=code == CANCELLED and "ray" in sys.modules)
