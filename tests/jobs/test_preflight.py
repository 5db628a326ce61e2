"""The kind preflight: a point a card; on a CPU everything is unknown, in words."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from travelling import CPU, travelled, values_of

from jobs import preflight
from jobs.hardware import health
from jobs.hardware.machine import probe
from orchestrator.cli.commands import main
from orchestrator.execute.local import LocalExecutor
from orchestrator.run import driver


def test_a_card_is_a_point_and_rates_are_amounts_a_second() -> None:
    spec = preflight.Spec(kind="preflight", name="t", cards=2, size=256, copy_mib=1, load_s=0.01)
    points = spec.points(CPU)
    assert [point.axes.more for point in points] == [{"card": 0}, {"card": 1}]
    result = preflight.measure(travelled(points[0]), lambda *_: None)
    assert values_of(result).keys() == {"gemm_rate", "copy_rate"}
    assert all(value > 0 for value in values_of(result).values())


@pytest.mark.parametrize(("code", "log"), [(1, None), (0, "[1] NVRM: Xid (PCI:0000:3b:00): 79, fell off\n")])
def test_the_kernels_log_that_may_not_be_read_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, log: str | None
) -> None:
    monkeypatch.setattr(health.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=code, stdout=log))
    monkeypatch.setattr(health, "_KERNEL_LOG", tmp_path / "none")
    assert health._kernel_log() == log
    assert log is None or health.xids(log, "00000000:3B:00.0") == [79]


def test_on_a_cpu_all_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("NSA_HOME", str(tmp_path))
    monkeypatch.setattr(LocalExecutor, "probe", lambda self: dict.fromkeys(self._spec.python, probe("cpu")))
    assert driver.main(["jobs/configs/preflight.yaml", "--local", "--set=load_s=0.1", "--set=size=64"]) == 0
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["nsa", "fleet"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().out
    assert ended.value.code == 3
    assert "UNKNOWN" in said
    assert "the point ran on the CPU: nothing of a card was measured" in said
    assert not {"BAD", "WARN", "OK"} & set(said.split())
