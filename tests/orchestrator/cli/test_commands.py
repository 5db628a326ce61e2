"""The `nsa` commands: output, exit codes, and one line without a traceback for bad input."""

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest
from nsa_command import Nsa

from jobs.schema.states import PointState
from orchestrator.provenance import user
from orchestrator.run import plan
from orchestrator.store import Store, journal, queries
from orchestrator.store.journal import Journal
from orchestrator.store.records import Record, StartRecord

DEMO = Path(__file__).resolve().parents[3] / "jobs" / "configs" / "demo.yaml"
RUN = "20261120-120000-demo-abcd"


@pytest.fixture
def results(home: Path, sweep: Callable[..., list]) -> None:
    """A stored sweep with one point that hung."""
    laws = {"chunked": 1.02, "naive": 1.95, "dense": 1.5}
    with Store.open(f"sqlite:///{home / 'nsa.db'}") as store:
        store.apply_many(sweep(RUN, laws=laws, failures={PointState.HANG: "no progress for 120 s"}))


@pytest.mark.usefixtures("results")
class TestWithResults:
    @pytest.mark.parametrize(
        ("command", "texts"),
        [
            (["runs"], [rf"{RUN} +scaling +measured +done"]),
            (["show", "last"], ["no progress for 120 s", r"( ok (.|\n)*){12}"]),
            (["show", "20261120", "--point", "0"], ["peak_extra_memory", "MiB"]),  # a unique beginning
            (["logs", "last", "--point", "0"], [r"stdout\.txt"]),
            (["report", "last"], [r"1\.95", r"1\.02"]),
            (["cancel", "last"], ["has ended already: done"]),
        ],
    )
    def test_a_command_prints_what_is_stored(self, nsa: Nsa, command: list[str], texts: list[str]) -> None:
        done = nsa(*command)
        assert done.code == 0
        assert all(re.search(text, done.out) for text in texts), done.out

    def test_export_writes_rows(self, nsa: Nsa, tmp_path: Path) -> None:
        assert nsa("export", "--out", str(tmp_path / "r.csv")).code == 0
        rows = pd.read_csv(tmp_path / "r.csv")
        assert (rows["metric"] == "peak_extra_memory").sum() == 12  # 3 implementations, 4 lengths
        assert nsa("export", "--out", str(tmp_path / "r.json")).code == 0
        assert json.loads((tmp_path / "r.json").read_text())[0]["run_id"] == RUN

    def test_cancel_is_journalled_so_that_resuming_and_importing_agree(
        self, nsa: Nsa, home: Path, sweep: Callable[..., list]
    ) -> None:
        path = self.unfinished(home, sweep)
        assert "marked 4 unfinished points" in nsa("cancel", "r2").out
        found = plan.history(journal.read(path))
        assert found is not None
        ended = {(point.attempt, point.attempts[1].state) for point in found.points.values()}
        assert ended == {(1, PointState.CANCELLED)}
        unreadable = home / "bad.jsonl"
        unreadable.write_text("{}")
        told = nsa("import", str(unreadable), str(path))
        assert (told.code, told.err.count("error: ")) == (2, 1), "a bad file costs no other"
        with Store.open(f"sqlite:///{home / 'nsa.db'}") as store:
            assert set(queries.points(store, "r2")["state"]) == {"cancelled"}
        assert nsa("show", "r2").out.count(f"cancelled by {user()} with nsa cancel") == 4
        with Store.open(f"sqlite:///{home / 'nsa.db'}") as store:
            begun = StartRecord(run_id="r2", point_id="r2/0", attempt=2)
            store.apply_many([begun])  # a resumed run's first attempt shows at once
            assert queries.points(store, "r2")["state"].tolist() == ["running"] + ["cancelled"] * 3

    @staticmethod
    def unfinished(home: Path, sweep: Callable[..., list]) -> Path:
        """The journal of a stored run whose driver died before its first point."""
        path = home / "artifacts" / "r2" / "journal.jsonl"
        records = [r for r in sweep("r2", laws={"chunked": 1.0}) if r.type in ("run", "point")]
        records[0] = records[0].model_copy(update={"artifacts": str(path.parent)})
        with Journal(path) as kept, Store.open(f"sqlite:///{home / 'nsa.db'}") as store:
            kept.append(records)
            store.apply_many(records)
        return path


@pytest.mark.parametrize(
    ("variable", "value", "override", "error"),
    [
        ("NSA_GATES", "missing.yaml", "seed=1", "gates: 'missing.yaml'"),
        ("NSA_HOME", __file__, "seed=1", "NSA_HOME: "),
        ("NSA_PERSON", "ada", "implementations=[triton]", "implementations: 'triton'"),  # on no CPU
    ],
)
def test_nothing_is_submitted_that_cannot_work(
    nsa: Nsa, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, override: str, error: str
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr("orchestrator.cli.submission.submit", lambda *_: pytest.fail("submitted"))
    done = nsa("submit", str(DEMO), "--set", override)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert done.err.startswith(f"error: {error}")


def test_queries_before_any_run_give_a_fix_and_db_upgrade_is_one(nsa: Nsa) -> None:
    done = nsa("runs")
    assert done.code == 2
    assert "nsa db upgrade" in done.err
    assert nsa("db", "upgrade").code == 0
    assert nsa("status").code == 0


def test_what_a_terminal_acts_on_is_shown_as_an_escape(nsa: Nsa, home: Path, sweep: Callable[..., list]) -> None:
    with Store.open(f"sqlite:///{home / 'nsa.db'}") as store:
        store.apply_many(sweep(failures={PointState.ERROR: "\x1b[2J\x9b31m :warning: " + "x" * 3_000_000}))
    out = nsa("show", "last").out
    assert not {"\x1b", "\x9b"} & set(out)
    assert "\\x1b[2J\\x9b31m :warning: " in " ".join(out.split())
    assert len(out) < 20_000


@pytest.mark.parametrize("content", [None, b"", b"a torn line", b"no journal\n"])
def test_a_file_that_is_not_its_journal_stays_as_it_is(
    nsa: Nsa, home: Path, sweep: Callable[..., list[Record]], content: bytes | None
) -> None:
    """Its path comes with an imported journal, so it may be any. None: the journal of another run."""
    path = home / "other" / "journal.jsonl"
    first, *points = [r for r in sweep("r2", laws={"chunked": 1.0}) if r.type in ("run", "point")]
    with Store.open(f"sqlite:///{home / 'nsa.db'}") as store:
        store.apply_many([first.model_copy(update={"artifacts": str(path.parent)}), *points])
    if content is None:
        with Journal(path) as journal:
            journal.append(sweep("r1"))
        content = path.read_bytes()
    else:
        path.parent.mkdir()
        path.write_bytes(content)
    done = nsa("cancel", "r2")
    assert (done.code, done.err, done.out.count("\n")) == (0, "", 1)
    assert "marked 4 unfinished points of r2 as cancelled in the database alone: " in done.out
    with Store.open(f"sqlite:///{home / 'nsa.db'}") as store:
        assert set(queries.points(store, "r2")["state"]) == {"cancelled"}
    assert path.read_bytes() == content


MISUSED = [
    # arguments, the line expected
    (["runs", "--limit", "9" * 20], r"'--limit': .*less than or equal to 1000000, not '9+'; see `nsa runs --help`"),
    (["runs", "--limt", "3"], r".*: --limt .*--limit.*; see `nsa runs --help`"),
    (["runs", "--\x1b[31m"], r".*: --\\x1b\[31m; see `nsa runs --help`"),
    (["export"], r"--out: is missing; give it, see `nsa export --help`"),
    (["show", "a", "b", "c"], r".*\(b c\); see `nsa show --help`"),
]


@pytest.mark.parametrize(("args", "line"), MISUSED, ids=[" ".join(args)[:20] for args, _ in MISUSED])
def test_a_mistake_on_the_command_line_is_one_line(nsa: Nsa, args: list[str], line: str) -> None:
    code, out, err = nsa(*args)
    assert (code, out) == (2, "")
    assert re.fullmatch(f"error: .*{line}\n", err), err


def test_the_help_imports_nothing_heavy() -> None:
    code = "import sys; from orchestrator.cli.commands import app; app(['--help'], standalone_mode=False)"
    heavy = "print({'pandas', 'sqlalchemy', 'ray', 'torch', 'altair'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", f"{code}; {heavy}"], capture_output=True, text=True, check=True)
    assert "diagnose" in done.stdout
    assert done.stdout.endswith("set()\n")


ROOT = Path(__file__).resolve().parents[3]
INTERRUPTED = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(1)\n"
JOBS = ["-m", "jobs", "--help"]


def console_script() -> list[str]:
    """Arguments of Python for what pip makes of the console script `nsa`."""
    module, _, call = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["nsa"].partition(":")
    return ["-c", f"import sys; from {module} import {call}; sys.exit({call}())", "runs"]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT's handling, which processes started here inherit; tests that a shell runs in the background lack it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("command", "package"),
    [(console_script(), "typer"), (console_script(), "pydantic_settings"), (JOBS, "pydantic")],
    ids=["nsa-typer", "nsa-settings", "jobs-pydantic"],
)
def test_ctrl_c_during_imports_ends_without_a_traceback(tmp_path: Path, command: list[str], package: str) -> None:
    """A package that the command imports at its beginning is replaced by one in which the signal arrives."""
    (tmp_path / f"{package}.py").write_text(INTERRUPTED)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "NSA_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
