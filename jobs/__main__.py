"""Entry point: `python -m jobs SPEC.yaml` hands the spec to the orchestrator."""

from __future__ import annotations

import sys

from orchestrator.run.aside import leave
from orchestrator.run.driver import CANCELLED, main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    leave(code, at_once=code == CANCELLED and "ray" in sys.modules)
