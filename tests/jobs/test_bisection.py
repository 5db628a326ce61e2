"""The search for the smallest size that fails, and the processes in which sizes are tried."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import descendants, is_alive

from jobs import backward
from jobs._bisection import Bisection, bisect, most_trials, smallest_failing
from jobs.process.trial import End, Limits, Trial, run_trial
from jobs.schema.point import Machine

pytestmark = pytest.mark.usefixtures("own_temporary_folder")
CPU = Machine("cpu", "test processor", 8 * 2**30)
LIMITS = Limits(startup_s=30, heartbeat_s=1.5, whole_s=30)
CODE = """
import os, signal, time

def run(config, beat):
    beat("begun", 1, 2)
    return {"value": eval(config["code"], {"os": os, "signal": signal, "time": time, "beat": beat, "config": config})}

def size(config, beat):
    beat("begun")
    if config["layers"] >= config["from_layers"] and config["seq_len"] >= config["from_length"]:
        os.kill(os.getpid(), signal.SIGSEGV)
    return {}

def work_on(beat):
    while True:
        beat("again")
        time.sleep(0.05)
"""


@pytest.fixture
def sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module for processes of trials, which imports no more than it needs."""
    (tmp_path / "tried_here.py").write_text(CODE)
    sources = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{sources}")
    return "tried_here"


def _quiet(*_: Any) -> None:
    pass


@pytest.mark.parametrize("frontier", list(itertools.product(range(4), range(5))))
def test_the_search_ends_where_both_neighbours_pass(frontier: tuple[int, int]) -> None:
    """With two corners from which on sizes fail; asked at most as often as predicted where there is one."""
    corner = 3 - frontier[0], 4 - frontier[1]

    def fails(*place: int) -> bool:
        asked.append(place)
        return any(a <= x and b <= y for x, y in [place] for a, b in corners)

    for corners in ([frontier], [frontier, corner]):
        asked: list[tuple[int, ...]] = []
        found = smallest_failing(fails, 4, 5)
        assert found in corners
        assert len(asked) == len(set(asked))
        assert all(place in asked for place in [(found[0] - 1, found[1]), (found[0], found[1] - 1)] if min(place) >= 0)
        assert len(corners) > 1 or len(asked) <= most_trials(4, 5)


def test_the_search_does_not_rest_on_larger_sizes_failing() -> None:
    failing = {(3, 3), (1, 2), (1, 1), (0, 0)}
    found = smallest_failing(lambda *place: place in failing, 4, 4)
    assert found in failing
    assert not {(found[0] - 1, found[1]), (found[0], found[1] - 1)} & failing


def test_nothing_fails_if_the_largest_size_passes() -> None:
    assert smallest_failing(lambda *_: False, 4, 5) is None


@pytest.mark.parametrize(
    ("code", "end", "reason"),
    [
        ("6 * 7", End.OK, ""),
        ("os.kill(os.getpid(), signal.SIGSEGV)", End.CRASH, "was killed by SIGSEGV (last in phase 'begun')"),
        ("os._exit(3)", End.CRASH, "exited with code 3 and no result (last in phase 'begun')"),
        ("time.sleep(60)", End.HANG, "no progress for 1.5 s (last in phase 'begun')"),
        ("1 / 0", End.ERROR, "ZeroDivisionError: division by zero"),
        ("bytearray(2**62)", End.OOM, "MemoryError: "),
    ],
)
def test_a_trial_ends_in_its_own_way(sizes: str, code: str, end: End, reason: str) -> None:
    told: list[tuple[Any, ...]] = []
    limits = LIMITS if end is End.HANG else replace(LIMITS, heartbeat_s=30)
    trial = run_trial(f"{sizes}:run", {"code": code}, limits, lambda *beat: told.append(beat))
    assert (trial.end, trial.reason) == (end, reason)
    assert trial.found == ({"value": 42} if end is End.OK else {})
    assert ("begun", 1, 2) in told or end is not End.HANG
    assert ("tried_here.py" in trial.stderr) == (end is not End.OK and "_exit" not in code)  # stacks or traceback
    assert not descendants(psutil.Process(), "jobs.process.trial")


def test_a_slow_trial_is_a_timeout_and_its_parent_is_told_of_silence(sizes: str) -> None:
    limits = Limits(30, 30, 5)
    told: list[str] = []
    trial = run_trial(f"{sizes}:run", {"code": "time.sleep(60)"}, limits, lambda phase, *_: told.append(phase))
    assert (trial.end, trial.reason) == (End.TIMEOUT, "not done after 5 s (last in phase 'begun')")
    assert len(told) >= 2  # a point whose trial says nothing for long is not itself hung


def test_a_trial_ends_with_its_parent(sizes: str) -> None:
    """A cancelled point's process group is killed."""
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        run_trial(f"{sizes}:run", {"code": "time.sleep(60)"}, Limits(60, 60, 60), _quiet)
        os._exit(0)
    deadline = time.monotonic() + 30
    while not (found := descendants(psutil.Process(pid), "jobs.process.trial")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while is_alive(found[0]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(found[0])


def test_a_search_names_the_smallest_size_and_keeps_what_explains_it(sizes: str) -> None:
    config = {"device": "cpu", "from_layers": 2, "from_length": 128}
    found = bisect(f"{sizes}:size", config, [1, 2, 4], [64, 128], LIMITS, _quiet)
    assert found.smallest == (2, 128)
    assert {size for size, trial in found.tried.items() if trial.end is End.OK} == {(1, 128), (2, 64), (4, 64)}
    values = {metric.name: metric.value for metric in found.metrics()}
    assert values == {"failing_layers": 2, "failing_length": 128, "sizes_tried": 5, "sizes_failed": 2}
    assert found.sentence.startswith("the smallest size that fails: 2 layers, S=128 (crash: was killed by SIGSEGV")
    assert found.sentence.endswith("; 1 layer, S=128 and 2 layers, S=64 pass")
    assert found.files["bisection.txt"].startswith(found.sentence)
    assert "tried_here.py" in found.files["2-layers-128-stderr.txt"]


@pytest.mark.parametrize(
    ("smallest", "passed", "told"),
    [
        ((8, 128), [(5, 128), (4, 128), (8, 64)], "5 layers, S=128 and 8 layers, S=64 pass"),
        ((1, 128), [(1, 64)], "1 layer, S=64 passes, fewer layers are not among the sizes"),
        ((8, 64), [(5, 64)], "5 layers, S=64 passes, shorter lengths are not among the sizes"),
        ((1, 64), [], "fewer layers are not among the sizes, shorter lengths are not among the sizes"),
    ],
)
def test_only_sizes_that_were_tried_are_said_to_pass(
    smallest: tuple[int, int], passed: list[tuple[int, int]], told: str
) -> None:
    trial = Trial(End.OOM, "full", 1.0, {}, "")
    found = Bisection(smallest, {smallest: trial, **{size: replace(trial, end=End.OK) for size in passed}})
    assert found.sentence.endswith(f" (oom: full); {told}")
    assert {metric.method for metric in found.metrics() if metric.method} == {
        f"bisection, each size in a process of its own; {told}"
    }


def _search(**changes: Any) -> backward.Spec:
    case = {"preset": "tiny", "layers": [3, 1], "lengths": [64]}
    data = {"kind": "backward", "name": "t", "implementations": ["chunked"], "cases": [case], "bisect": {"size_s": 200}}
    return backward.Spec.model_validate(data | changes)


def test_a_point_searches_with_the_model_in_real_processes() -> None:
    (point,) = _search().points(CPU)
    assert (point.axes.layers, point.axes.seq_len, point.axes.more["branch"]) == (None, None, "all")
    result = backward.measure(json.loads(json.dumps(point.config)), _quiet)
    assert {metric.name: metric.value for metric in result.metrics} == {"sizes_tried": 1, "sizes_failed": 0}
    sentence = str(result.files["bisection.txt"]).splitlines()[0]
    assert sentence == "nothing failed: 3 layers, S=64, the largest, passes; smaller sizes were not tried"


def test_a_point_warns_of_the_smallest_size_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Told:
        surroundings = None

        def __init__(self) -> None:
            self.warnings: list[str] = []

        def __call__(self, *_: Any) -> None: ...

        def sample(self, *_: Any) -> None: ...

        def warn(self, text: str) -> None:
            self.warnings.append(text)

    def always(function: str, config: Any, *_: Any) -> Trial:
        assert config["drill"] == {"hang_in_layer": 1, "from_length": 1}
        return Trial(End.HANG, "no progress", 1.0, {}, "stacks")

    monkeypatch.setattr("jobs._bisection.run_trial", always)
    (point,) = _search(drill={"hang_in_layer": 1}).points(CPU)
    backward.measure(json.loads(json.dumps(point.config)), told := Told())
    (warning,) = told.warnings
    assert warning.startswith("the smallest size that fails: 1 layer, S=64 (hang: no progress); ")


@pytest.mark.parametrize("branch", ["all", "win"])
def test_a_search_leaves_the_card_to_the_processes_that_it_starts(monkeypatch: pytest.MonkeyPatch, branch: str) -> None:
    asked: list[str] = []

    def passes(function: str, config: Any, *_: Any) -> Trial:
        assert config["device"] == "cuda"
        asked.append(function)
        return Trial(End.OK, "", 1.0, {"trace.txt": "traced"} if function.endswith(":check") else {}, "")

    for module in ("jobs.backward", "jobs._bisection"):
        monkeypatch.setattr(f"{module}.run_trial", passes)
    monkeypatch.setattr("torch.cuda._lazy_init", lambda: pytest.fail("CUDA is initialized here"))
    monkeypatch.setattr("jobs.backward.environment", lambda device: {})  # reads properties, without a context
    case = {"preset": "tiny", "layers": [3, 1], "lengths": [64], "branches": [branch]}
    (point,) = _search(cases=[case]).points(Machine("cuda", "test card", 2**36))
    result = backward.measure(json.loads(json.dumps(point.config)), _quiet)
    assert asked == ["jobs._backward:check", "jobs._backward:try_size"]
    assert result.files["trace.txt"] == "traced"


def test_a_search_whose_check_fails_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (point,) = _search().points(CPU)
    config = json.loads(json.dumps(point.config)) | {"implementation": "no such"}
    config["model"]["backend"] = "no such"
    with pytest.raises(backward.CheckFailed, match=r"^check: error: \w+: .*no such"):
        backward.measure(config, _quiet)
    monkeypatch.setattr("jobs.backward.run_trial", lambda *_: Trial(End.OOM, "OutOfMemoryError: full", 1.0, {}, ""))
    with pytest.raises(MemoryError, match="check: OutOfMemoryError: full"):
        backward.measure(config, _quiet)
    monkeypatch.setattr("jobs.backward.run_trial", lambda *_: Trial(End.HANG, "no progress", 1.0, {}, "its stacks"))
    with pytest.raises(backward.CheckFailed, match=r"^check: hang: no progress"):
        backward.measure(config, _quiet)
    assert "its stacks" in capsys.readouterr().err, "kept as stderr.txt"


def test_a_search_has_time_for_its_sizes() -> None:
    assert _search().deadlines.point_s == 900
    assert _search(bisect={"size_s": 1000}).deadlines.point_s == 1000 * (most_trials(2, 1) + 1)
