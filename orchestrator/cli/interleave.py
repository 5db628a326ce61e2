"""Measures a spec with the sources of several commits in turns, A B A B, and finds the commit that made it slower.

A turn is a driver of its own on this machine, `python -m jobs SPEC --local`, that imports one commit's sources: what
drifts, as clocks or a neighbour's load, meets all commits alike, and each commit is measured by several processes. A
turn stores into a scratch database, as a commit may know other tables, and its journal is then imported.
"""

import io
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from jobs.schema.plain_text import shown
from orchestrator.errors import UserError
from orchestrator.git import git
from orchestrator.provenance import GitState, git_state
from orchestrator.report.compare import Change, Compared, Comparison, Side, compare, coordinates, word
from orchestrator.run.plan import new_run_id
from orchestrator.settings import PACKAGES, SOURCES, Settings
from orchestrator.store import Store, importer
from orchestrator.store.journal import NAME
from orchestrator.terminal import say

IN_UPLOAD = "at"  # the folder of an upload with the sources of commits, a folder each: a job on a cluster has no git


@dataclass(frozen=True)
class Sources:
    """Sources that a turn imports: a commit's, or today's."""

    name: str
    folder: Path
    state: GitState


@dataclass(frozen=True)
class Turns:
    """How often each commit measures which spec."""

    settings: Settings
    spec: Path
    overrides: Sequence[str]
    number: int

    def measure(self, store: Store, sources: Sequence[Sources]) -> list[Side]:
        """Take the turns, and store the runs. Raises UserError: a commit cannot measure the spec."""
        run_ids: dict[str, list[str]] = {each.name: [] for each in sources}
        folder = self.settings.artifacts_dir / new_run_id("interleaved")
        with tempfile.TemporaryDirectory(prefix="nsa-turns-") as scratch:
            for turn, each in product(range(1, self.number + 1), sources):
                say(f"turn {turn} of {self.number}: {each.name}")
                journals = folder / each.name / str(turn)
                try:
                    code = self._drive(each, journals, f"sqlite:///{scratch}/{each.name}.db")
                finally:
                    for journal in journals.glob(f"*/{NAME}"):
                        importer.import_file(store, journal)
                        run_ids[each.name].append(journal.parent.name)
                if code not in (0, 1):  # 1: a point failed, which the comparison says
                    problem = f"the sources of {each.name} cannot measure it (exit code {code}, see above)"
                    raise UserError(f"SPEC: {str(self.spec)!r}: {problem}")
        return [Side(name, tuple(found), pooled=True) for name, found in run_ids.items()]

    def _drive(self, sources: Sources, journals: Path, database: str) -> int:
        """The exit code of a turn's driver, which ends its run upon Ctrl-C."""
        path = [str(sources.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {
            **os.environ,
            "NSA_DATABASE_URL": database,
            "NSA_ARTIFACTS": str(journals),
            "NSA_ARTIFACT_STORE": self.settings.artifact_store_url,
            "NSA_WEBHOOK": "",  # nobody waits for a turn
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONSAFEPATH": "1",  # not the sources in the current folder
            **sources.state.variables,
        }
        variables.pop("RAY_JOB_CONFIG_JSON_ENV_VAR", None)  # a turn is no job of its own
        options = [item for each in self.overrides for item in ("--set", each)]
        command = [sys.executable, "-m", "jobs", str(self.spec), *options, "--local"]
        driver = subprocess.Popen(command, env=variables)
        try:
            return driver.wait()
        except KeyboardInterrupt as interrupt:
            # Ctrl-C and `ray job stop` reach the driver as well, and the same signal again would kill it; a plain kill
            # does not, and `nohup` has it ignore SIGHUP.
            driver.send_signal(signal.SIGINT if interrupt.args else signal.SIGTERM)
            driver.wait()
            raise


def today() -> Sources:
    return Sources("today", SOURCES, git_state())


@contextmanager
def sources_at(commits: Mapping[str, str]) -> Iterator[list[Sources]]:
    """The sources of commits, in folders that are removed at the end, also upon SIGTERM.

    The commits are by the name of the user's field, which a UserError names.
    """

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with tempfile.TemporaryDirectory(prefix="nsa-sources-") as scratch:
            yield [_sources(field, commit, Path(scratch)) for field, commit in commits.items()]
    finally:
        signal.signal(signal.SIGTERM, before)


def _sources(field: str, commit: str, scratch: Path) -> Sources:
    if (sent := SOURCES / IN_UPLOAD / commit).is_dir():
        return Sources(commit[:7], sent, GitState(commit, dirty=False))
    full = commit_of(field, commit)
    done = git(SOURCES, "archive", full, *PACKAGES)
    if done.returncode:
        raise UserError(f"{field}: {commit!r}: has no sources to measure with ({_told(done)}); name another commit")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(scratch / full, filter="data")
    return Sources(full[:7], scratch / full, GitState(full, dirty=False))


def commit_of(field: str, text: str) -> str:
    """The whole name of the checkout's commit that `text` names. Raises UserError, which names the user's field."""
    done = git(SOURCES, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{text}^{{commit}}")
    if done.returncode:
        why = _told(done) or "no such commit"
        raise UserError(
            f"{field}: {shown(text)}: is none of the checkout {SOURCES} ({why}); run in one, and name its own"
        )
    return done.stdout.decode().strip()


def _told(done: subprocess.CompletedProcess[bytes]) -> str:
    return os.fsdecode(done.stderr).strip().partition("\n")[0]


def bisect(
    store: Store, turns: Turns, good: str, bad: str, metric: str, threshold: float
) -> tuple[list[str], Compared | None]:
    """The first commit after `good` at which a cell got worse, and how much at `bad`; several commits, if those between
    could not be told; none, if no cell is worse at `bad`. The cell is the one that is worst at `bad`.

    Each commit is measured in turns with `good`. Raises UserError: `good` is no ancestor of `bad`, or they have no cell
    in common.
    """
    good, bad = commit_of("GOOD", good), commit_of("BAD", bad)
    listed = git(SOURCES, "rev-list", "--reverse", "--first-parent", "--ancestry-path", f"{good}..{bad}")
    commits = [good, *listed.stdout.decode().split()]
    if good == bad or commits[-1] != bad:
        raise UserError(f"GOOD: {good[:7]}: is no earlier commit than {bad[:7]}; name an ancestor of it")

    def compared(commit: str) -> Comparison:
        with sources_at({"GOOD": good, "BAD": commit}) as sources:
            sides = turns.measure(store, sources)
        return compare(store, sides[0], sides[1:], metric, threshold)[0]

    at_bad, worse = compared(bad), (Change.FAILED, Change.WORSE)
    if not at_bad.cells:
        fix = "give a spec or overrides by which both measure the same, or a later GOOD"
        raise UserError(f"BAD: {bad[:7]}: has no cell in common with GOOD {good[:7]}; {fix}")
    worst = at_bad.cells[0]
    where = " ".join(filter(None, coordinates(worst.cell).values()))
    say(f"{bad[:7]}: {word(worst.change, at_bad.quantity)}, {worst.ratio:.3f}: {where}")
    if worst.change not in worse:
        return [], None
    low, high, untold = 0, len(commits) - 1, set()
    while between := [place for place in range(low + 1, high) if place not in untold]:
        middle = between[len(between) // 2]
        found, result = None, "lacks the cell"
        try:
            found = next((each for each in compared(commits[middle]).cells if each.cell == worst.cell), None)
        except UserError as err:
            result = str(err)
        say(f"{commits[middle][:7]}: {f'{found.change}, {found.ratio:.3f}' if found else result}")
        if found is None or found.change in (Change.AMBIGUOUS, Change.LACKING):
            untold.add(middle)
        elif found.change in worse:
            high = middle
        else:
            low = middle
    return commits[low + 1 : high + 1], worst
