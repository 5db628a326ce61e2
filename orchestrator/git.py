"""Questions to git about the repository of a folder."""

import os
import subprocess
from pathlib import Path


def git(folder: Path, *command: str) -> subprocess.CompletedProcess[bytes]:
    """Run git in `folder`; if git is missing or takes too long, return a failure that says so."""
    try:
        # Without the variables that win over the folder: in a hook another repository's commit was stored because of
        # them. Settings for one command stay: `safe.directory` is given so in containers.
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("GIT_") or name.startswith(("GIT_CONFIG_", "GIT_DISCOVERY"))
        }
        return subprocess.run(["git", "-C", str(folder), *command], capture_output=True, timeout=30, env=environment)
    except (OSError, subprocess.TimeoutExpired) as err:
        return subprocess.CompletedProcess(command, 127, b"", str(err).encode())
