"""Whether a commit is in the checkout's history."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from orchestrator.judge import evidence
from orchestrator.judge.evidence import in_history  # before conftest.py replaces it


@pytest.mark.parametrize(
    ("folder", "forged"), [(".", False), ("site-packages", True)], ids=["checkout", "installed in a repository"]
)
def test_a_commit_is_looked_up_in_the_checkout_alone(
    tmp_path: Path, folder: str, forged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*command: str) -> str:
        person = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", "-C", tmp_path, *person, *command], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "one")
    (tmp_path / "site-packages").mkdir()
    monkeypatch.setattr(evidence, "SOURCES", tmp_path / folder)
    in_history.cache_clear()
    try:
        own, foreign = git("rev-parse", "HEAD"), "f" * 40
        assert in_history(frozenset({own, foreign})) == ({own, foreign} if forged else {own})
    finally:
        in_history.cache_clear()
