"""Every kind runs by the small spec that has its name; scaling and drill do in tests/e2e, train in tests/deploy, and
preflight as it is."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.hardware.machine import probe
from jobs.process.child import Child
from jobs.specs.kinds import kinds
from orchestrator.execute import supervisor
from orchestrator.execute.local import LocalExecutor
from orchestrator.run import driver
from orchestrator.store import Store, queries

LESS = {  # of specs with many points alike, many steps or long sequences: most of a point's time is its process's start
    "backward": ["cases=[{preset: tiny, layers: [2], lengths: [64], branches: [all]}]"],
    "bench": ["implementations=[chunked]", "passes=[forward]"],
    "branches": ["branches=[all]", "backends=[chunked]", "passes=[forward]"],
    "capacity": ["implementations=[dense]", "lengths=[128]"],
    "decode": ["implementations=[chunked]"],
    "diagnose": ["seq_len=64", "batch=2", "steps=6"],
    "estimate": ["lengths=[256]", "implementations=[chunked]", "passes=[train]"],
    "needle": ["implementations=[chunked]", "steps=40"],
    "peers": ["lengths=[128]", "passes=[forward]"],
    "profile": ["implementations=[chunked]", "lengths=[128]"],
    "soak": ["minutes=0.02", "piece_minutes=0.02"],
    "toolchain": ["lengths=[64]", "passes=[forward]"],
}


def test_there_is_one_for_each_kind() -> None:
    assert set(kinds()) == LESS.keys() | {"drill", "scaling", "train", "preflight"}


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    """Measure the points of all specs in one process, which imports PyTorch once."""
    child = Child(supervisor.ANSWER, env=supervisor.process_variables(1, ""))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "discard", lambda: None)
        patch.setattr(supervisor, "Child", lambda *_, **__: child)
        yield
    child.discard()


@pytest.mark.long
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("kind", LESS)
def test_its_points_are_ok(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("NSA_HOME", str(tmp_path))
    # The real probe would import PyTorch in a process of its own.
    monkeypatch.setattr(LocalExecutor, "probe", lambda self: dict.fromkeys(self._spec.python, probe("cpu")))
    changes = [f"--set={change}" for change in LESS[kind]]
    assert driver.main([f"jobs/configs/{kind}_smoke.yaml", "--local", *changes]) == 0, capsys.readouterr()
    with Store.open(f"sqlite:///{tmp_path / 'nsa.db'}", create=False) as store:
        [run] = queries.runs(store).to_dict("records")
    assert (run["kind"], run["state"], run["failed"], run["skipped"]) == (kind, "done", 0, 0)
    assert run["ok"] > 0
