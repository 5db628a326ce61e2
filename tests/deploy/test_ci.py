"""CI's workflow and the commit hooks, read from their files: valid, pinned, and running what `make` runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / ".github" / "workflows" / "ci.yml"


def test_matches_the_schema_of_workflows() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(FILE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_uv_takes_packages_from_where_pip_does() -> None:
    listed = (
        """:env:.index-url="https://f/it's"\n:env:.no-compile='1'\nglobal.index-url='https://a/simple'\n"""
        "global.extra-index-url='\\nfile:///b\\nfile:///c'\nglobal.find-links='/d /e'\ndownload.no-deps='1'\n"
    )
    command = [sys.executable, str(ROOT / ".ci" / "uv_settings.py")]
    done = subprocess.run(command, input=listed, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "export UV_INDEX_STRATEGY=unsafe-best-match",
        "export UV_DEFAULT_INDEX='https://f/it'\"'\"'s'",
        "export UV_INDEX='file:///b file:///c'",
        "export UV_FIND_LINKS=/d,/e",
    ]
