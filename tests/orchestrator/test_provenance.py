"""Provenance of sources whose git state is unusual."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from orchestrator.provenance import git_state


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a commit, in a folder whose name is not UTF-8 either."""
    for name in ("NSA_GIT_COMMIT", "NSA_GIT_BRANCH", "NSA_CHECKOUT"):
        monkeypatch.delenv(name, raising=False)
    root = tmp_path / os.fsdecode(b"caf\xe9")
    root.mkdir()
    name = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    for args in (("init", "-q"), (*name, "commit", "-q", "--allow-empty", "-m", "first")):
        subprocess.run(["git", "-C", str(root), *args], check=True, timeout=60)
    return root


def test_a_branch_that_is_not_utf_8_is_told_with_escapes(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    branch = b"refs/heads/caf\xe9"
    head = subprocess.run(["git", "-C", str(sources), "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    commit = head.stdout.strip()
    subprocess.run([b"git", b"-C", os.fsencode(sources), b"update-ref", branch, commit.encode()], check=True)
    subprocess.run([b"git", b"-C", os.fsencode(sources), b"symbolic-ref", b"HEAD", branch], check=True)
    found = git_state(sources)
    assert (found.commit, found.branch, found.dirty) == (commit, "caf\\xe9", False)
    for name, value in found.variables.items():
        monkeypatch.setenv(name, value)
    assert git_state(sources) == found
    monkeypatch.setenv("NSA_GIT_BRANCH", os.fsdecode(b"caf\xe9"))
    assert git_state(sources) == found
