"""Entry point: `python -m jobs SPEC.yaml` hands the spec to the orchestrator."""

from __future__ import annotations

import sys

from orchestrator.run.driver import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
