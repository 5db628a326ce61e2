"""Entry point: `python -m jobs SPEC.yaml` hands the spec to the orchestrator."""

import sys

from orchestrator.interruption import end_at_once, end_during_imports

if __name__ == "__main__":
    end_during_imports()
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
