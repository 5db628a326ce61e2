"""The commit of a run is that of its own sources, and is looked up in the checkout's history."""

import re
import shutil
from pathlib import Path

import pytest
from processes import git

from orchestrator.judge import evidence
from orchestrator.judge.evidence import in_history  # before conftest.py replaces it
from orchestrator.provenance import GitState, git_state


@pytest.fixture
def repositories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    for name in ("NSA_GIT_COMMIT", "NSA_CHECKOUT"):
        monkeypatch.delenv(name, raising=False)
    found = [tmp_path / "ours", tmp_path / "theirs"]
    for folder in found:
        folder.mkdir()
        git(folder, "init", "-q")
        git(folder, "commit", "-q", "--allow-empty", "-m", folder.name)
    return found


def test_a_hook_of_another_repository_changes_no_commit(
    repositories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = repositories
    before = git_state(ours)
    assert before.commit not in (None, git_state(theirs).commit)
    monkeypatch.setenv("GIT_DIR", str(theirs / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(theirs))
    monkeypatch.setenv("GIT_INDEX_FILE", str(theirs / ".git" / "index"))
    assert git_state(ours) == before


def test_a_job_is_not_told_that_sources_of_unknown_state_are_clean() -> None:
    assert GitState("c0ffee").variables == {"NSA_GIT_COMMIT": "c0ffee"}
    assert GitState("c0ffee", dirty=False).variables["NSA_GIT_DIRTY"] == "0"


def test_a_checkout_that_git_refuses_is_told_by_its_first_line(
    repositories: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    ours, _ = repositories
    shutil.rmtree(ours / ".git")
    assert git_state(ours) == GitState()
    assert capsys.readouterr().err == "", "an installed package has no repository"
    (ours / ".git").write_text("gitdir: gone")
    assert git_state(ours) == GitState()
    assert re.match(r"warning: .*ours: its commit is unknown \(fatal: not a git .*set NSA_", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("folder", "forged"), [(".", False), ("site-packages", True)], ids=["checkout", "installed in a repository"]
)
def test_a_commit_is_looked_up_in_the_checkout_alone(
    tmp_path: Path, folder: str, forged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "one")
    (tmp_path / "site-packages").mkdir()
    monkeypatch.setattr(evidence, "SOURCES", tmp_path / folder)
    in_history.cache_clear()
    try:
        own, foreign = git(tmp_path, "rev-parse", "HEAD"), "f" * 40
        assert in_history(frozenset({own, foreign})) == ({own, foreign} if forged else {own})
    finally:
        in_history.cache_clear()
