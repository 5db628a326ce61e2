"""`python -m jobs` with a fixed machine instead of the child that probes the real one: a script for processes."""

import runpy
import sys

from jobs.schema.point import Machine

MACHINE = Machine("cpu", "test", 8 << 30, {"torch": "0"})

COMMAND = (sys.executable, "-P", __file__)
"""Beginning of a command line that runs it; its folder is not searched for modules."""

if __name__ == "__main__":
    from orchestrator.execute.local import LocalExecutor

    LocalExecutor.probe = lambda self: {None: MACHINE}
    runpy.run_module("jobs", run_name="__main__", alter_sys=True)
