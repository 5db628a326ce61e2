"""Provenance of a result: commit, hash of the sources, hash of the spec, submission."""

import getpass
import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jobs.schema.plain_text import shown
from jobs.specs.kinds import offered_sources
from jobs.specs.spec import JobSpec
from orchestrator.errors import UserError
from orchestrator.git import git
from orchestrator.settings import SOURCES
from orchestrator.terminal import warn

_SOURCES = ("nsa_core", "jobs")
_COMMIT = re.compile(r"[ -~]{1,64}")
_JOB_LENGTH = 200  # of a submission id, as records and the database hold it


@dataclass(frozen=True)
class GitState:
    """Commit and branch of sources, and whether they differ from the commit; None: unknown, or no branch."""

    commit: str | None = None
    branch: str | None = None
    dirty: bool | None = None

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that tell it to a process without the checkout."""
        if self.commit is None:
            return {}
        dirty = None if self.dirty is None else str(int(self.dirty))
        told = {"NSA_GIT_COMMIT": self.commit, "NSA_GIT_DIRTY": dirty, "NSA_GIT_BRANCH": self.branch}
        return {name: value for name, value in told.items() if value}


def git_state(root: Path = SOURCES) -> GitState:
    """State of the sources in `root`.

    Ray's unpacked copy has no .git, nor has an installed package. There, it comes from the submitter
    (`GitState.variables`), or from the cluster's checkout (NSA_CHECKOUT, set by `nsa up`) if its sources are the same.
    Raises UserError: NSA_GIT_COMMIT is set to what is no commit.
    """
    if commit := os.environ.get("NSA_GIT_COMMIT"):
        if not _COMMIT.fullmatch(commit):
            fix = "set at most 64 plain characters, or remove it"
            raise UserError(f"NSA_GIT_COMMIT: {shown(commit)}: is no commit; {fix}")
        dirty, branch = os.environ.get("NSA_GIT_DIRTY"), os.fsencode(os.environ.get("NSA_GIT_BRANCH", ""))
        named = branch.decode(errors="backslashreplace") or None  # it may be any bytes
        return GitState(commit, named, dirty.lower() not in ("0", "false", "no") if dirty else None)
    beside = os.environ.get("NSA_CHECKOUT")
    if beside and Path(beside) != root and code_hash(Path(beside)) == code_hash(root):
        return git_state(Path(beside))
    found = git(root, "rev-parse", "--show-toplevel", "HEAD")
    top, _, commit = os.fsdecode(found.stdout).strip().rpartition("\n")
    if found.returncode or Path(top).resolve() != root.resolve():
        if (root / ".git").exists():  # git refuses another user's checkout: runs were stored without commit or word
            why = os.fsdecode(found.stderr).partition("\n")[0] or f"its repository is that of {top}"
            warn(f"warning: {root}: its commit is unknown ({why}), and no GO rests on such a run; set NSA_GIT_COMMIT")
        return GitState()
    changes, branch = git(root, "status", "--porcelain"), git(root, "branch", "--show-current")
    named = branch.stdout.strip().decode(errors="backslashreplace") or None
    return GitState(commit, named, None if changes.returncode else bool(changes.stdout.strip()))


def code_hash(root: Path = SOURCES, spec: JobSpec | None = None) -> str:
    """Hash of the sources that a measurement depends on; 16 hex digits.

    Those of nsa_core and jobs, and other distributions' of the spec's kind and implementations.
    """
    paths = sorted(path for package in _SOURCES for path in (root / package).rglob("*.py"))
    own = _hash_of(b"", {path.relative_to(root).as_posix(): path for path in paths})
    others = offered_sources(spec) if spec else {}
    return _hash_of(own.encode(), dict(sorted(others.items()))) if others else own


def _hash_of(begin: bytes, files: Mapping[str, Path]) -> str:
    digest = hashlib.sha256(begin)
    for name, path in files.items():
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def spec_hash(spec: JobSpec) -> str:
    """Hash of a validated spec, defaults included; 16 hex digits."""
    content = spec.model_dump(mode="json")
    if not content["only"]:  # hashes of versions that had no such field stay as they are
        del content["only"]
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def user() -> str | None:
    """The user of this process; None in a Ray job, which may be another's than its submitter."""
    with suppress(OSError, KeyError):  # a container's user without a name
        return None if submission_id() else getpass.getuser()
    return None


def submission_id() -> str | None:
    """Submission id of this process's Ray job, shortened to what is stored; None outside of a job."""
    try:
        config = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])
        return str(config["metadata"]["job_submission_id"])[:_JOB_LENGTH]
    except (KeyError, TypeError, json.JSONDecodeError):
        return None
