"""Questions to git about the repository of a folder."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path


def git(folder: Path, *command: str) -> subprocess.CompletedProcess[bytes]:
    """Run git in `folder`; if git is missing or takes too long, return a failure that says so."""
    try:
        environment = {name: value for name, value in os.environ.items() if name not in _of_a_repository()}
        return subprocess.run(["git", "-C", str(folder), *command], capture_output=True, timeout=30, env=environment)
    except (OSError, subprocess.TimeoutExpired) as err:
        return subprocess.CompletedProcess(command, 127, b"", str(err).encode())


@cache
def _of_a_repository() -> frozenset[str]:
    """The variables that win over the folder: in a hook another repository's commit was stored because of them.

    Not those that hold settings for one command: `safe.directory` is given so in containers.
    """
    listed = subprocess.run(["git", "rev-parse", "--local-env-vars"], capture_output=True, text=True, timeout=30)
    return frozenset(listed.stdout.split()) - {"GIT_CONFIG_PARAMETERS", "GIT_CONFIG_COUNT"}
