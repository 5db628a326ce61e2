"""The toolchain kind: a pass under two interpreters and settings, and the differences that it names."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from other_interpreters import make_interpreter, own_packages
from travelling import NSA, QUICK, travelled, values_of

from jobs import toolchain
from jobs.schema.point import Beat, Machine, Measurement, Metric, Point
from jobs.schema.quantities import PEAK_EXTRA_MEMORY, TIME
from jobs.specs.load import parse_spec
from jobs.toolchain import Case, OutputsDiffer, Toolchain, ToolchainFailed, compare_outputs, measure

CPU = Machine("cpu", "test processor", 8 * 2**30, {"torch": "2"})
OTHER = Machine("cpu", "test processor", 8 * 2**30, {"torch": "3"})
PLAIN = {"ATEN_CPU_CAPABILITY": "default"}


def _points(**changes: Any) -> list[Point]:
    data: dict[str, Any] = {"kind": "toolchain", "name": "t", "preset": "tiny", "implementations": ["chunked"]}
    data |= {"passes": ["forward+backward"], "lengths": [32], "nsa": NSA, "timing": QUICK}
    data["tolerance"] = {"time_percent": 10000}
    spec = parse_spec(data | changes)
    return spec.all_points({None: CPU} | {python: OTHER for python in spec.python if python})


def _measure(point: Point, warnings: list[str] | None = None) -> Measurement:
    class Reporter:
        def __call__(self, phase: str, done: int = 0, total: int = 0) -> None: ...
        def sample(self, *_: Any) -> None: ...
        def warn(self, text: str) -> None:
            assert warnings is not None, text
            warnings.append(text)

    return measure(travelled(point), Reporter())


def test_every_toolchain_but_the_first_is_compared_with_it() -> None:
    points = _points(env=[{}, PLAIN], python=[None, "/b/python"], lengths=[64, 32])
    assert [(p.axes.seq_len, p.axes.python, p.axes.env) for p in points] == [
        *[(length, None, "ATEN_CPU_CAPABILITY=default") for length in (32, 64)],
        *[(length, "/b/python", None) for length in (32, 64)],
        *[(length, "/b/python", "ATEN_CPU_CAPABILITY=default") for length in (32, 64)],
    ]
    assert {(point.python, str(point.env)) for point in points} == {(None, "{}")}
    assert all(travelled(point).toolchains[0] == Toolchain() for point in points)
    assert len({point.label for point in points}) == len({point.key("code", CPU) for point in points}) == 6
    versions = [travelled(point).versions["torch"] for point in points]
    assert versions == ["2", "2", "3", "3", "3", "3"]  # of the other interpreter, so that the key has them


def test_a_second_interpreter_and_setting_give_the_same_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)  # or both would have the same
    other = make_interpreter(tmp_path / "other", *own_packages())
    point = _points(python=[None, other], env=[{}, PLAIN])[-1]
    assert (point.axes.python, point.axes.env) == (other, "ATEN_CPU_CAPABILITY=default")
    result = _measure(point)
    values = values_of(result)
    assert 0 < values["output_difference"] < 1e-4  # other instructions, other roundings
    assert values["tensors_equal"] < 100
    assert (values["differences"], values["memory_change"]) == (0, 0)
    assert min(values["time"], values["first_time"], values["first_memory"]) > 0
    assert values["oracle_error"] <= values["oracle_error_bound"]
    assert result.environment["interpreter"] == other
    assert f"torch=={torch.__version__}" in str(result.files["lock-1.txt"]).splitlines()
    assert f"{other}\n" in str(result.files["lock-2.txt"])
    assert "ATEN_CPU_CAPABILITY in effect: DEFAULT" in str(result.files["lock-2.txt"])


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements instead of the processes of both toolchains, which run different kernels."""

    def run(case: Case, number: int, name: str, folder: Path, beat: Beat) -> Measurement:
        outputs = {"loss": torch.ones(()), "gradient of w": torch.full((4,), 10.0 + number)}
        torch.save(outputs, folder / f"outputs-{number}.pt")
        metrics = Metric.of(TIME, 100.0 * number), Metric.of(PEAK_EXTRA_MEMORY, 100.0 + 10 * number)
        there = {"python": "3", "interpreter": "/python", "platform": "Linux", "settings": {}}
        packages = {"torch": f"2.{number}", "numpy": "2.0"}
        return Measurement(metrics, {"slc": "ab"[number - 1]}, {**there, "distributions": packages})

    monkeypatch.setattr(toolchain, "run_under", run)


@pytest.mark.usefixtures("measured")
def test_differences_beyond_their_tolerance_are_named() -> None:
    (point,) = _points(env=[{}, PLAIN], tolerance={"outputs": 0.2, "time_percent": 99, "memory_percent": 5})
    warnings: list[str] = []
    result = _measure(point, warnings)
    assert [text.partition(": ")[2] for text in warnings] == [
        "time +100.0 %, beyond 99 %",
        "peak memory +9.1 %, beyond 5 %",
        "branch slc ran b, not a",
    ]
    values = values_of(result)
    assert (values["differences"], values["time_change"], values["tensors_equal"]) == (3, 100, 50)
    assert values["output_difference"] == pytest.approx(1 / 11)
    table = str(result.files["comparison.txt"])
    assert "  torch: 2.1, 2.2" in table
    assert "numpy" not in table
    assert result.route == {"slc": "b"}
    assert "distributions" not in result.environment


@pytest.mark.usefixtures("measured")
def test_other_outputs_are_an_error_that_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    (point,) = _points(env=[{}, PLAIN], tolerance={"outputs": 0.05})
    with pytest.raises(OutputsDiffer, match=r"toolchain 2 \(ATEN_.*\): 1 of 2 outputs .* gradient of w by 9\.1e-02"):
        _measure(point)
    printed = capsys.readouterr().err  # kept as stderr.txt
    assert "  torch: 2.1, 2.2" in printed
    assert "no difference" not in printed
    assert "torch==2.1" in printed
    assert "torch==2.2" in printed


@pytest.mark.parametrize(
    ("failed", "error", "reason"),
    [
        ("sys.exit(3)", ToolchainFailed, "crash: exited with code 3 and no result"),
        ("""os.write(int(sys.argv[3]), b'["Failure", {"state": "oom", "reason": "full"}]\\n')""", MemoryError, "full"),
    ],
)
def test_a_toolchain_under_which_the_pass_fails_is_named(
    failed: str, error: type[Exception], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = toolchain.run_under  # the first one's, which would take seconds, is left out
    monkeypatch.setattr(toolchain, "run_under", lambda *args: None if args[1] == 1 else run(*args))
    interpreter = tmp_path / "python"
    interpreter.write_text(f"#!{sys.executable}\nimport os, sys\n{failed}\n")
    interpreter.chmod(0o755)
    (point,) = _points(python=[None, str(interpreter)])
    with pytest.raises(error, match=rf"toolchain 2 \({interpreter}\): {reason}"):
        _measure(point)


def test_outputs_that_are_not_finite_or_missing_differ() -> None:
    one, nan = torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])
    found, equal = compare_outputs(
        {"a": one, "b": one, "c": one, "e": 0 * one}, {"a": one, "b": nan, "d": one, "e": one}
    )
    assert found == {"a": 0, "b": float("inf"), "c": float("inf"), "d": float("inf"), "e": 3**0.5}
    assert equal == 1
