"""The backward kind: points, the watched pass, a hang in a real child process."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from supervised import Ended, supervised
from torch import Tensor, nn
from travelling import CPU, travelled, values_of

from jobs.backward import LAYERS, BrokenGradient, LayerWatch, PassFailed, Spec, measure, repeated_pass
from jobs.measure.check import WrongResult
from jobs.process.child import ran_out_of_memory
from jobs.schema.point import Measurement, Point
from jobs.schema.states import PointState
from jobs.specs.spec import Deadlines
from nsa_core.routes import capture
from orchestrator.execute.supervisor import Conditions

pytestmark = pytest.mark.usefixtures("own_temporary_folder")
CASE: dict[str, Any] = {"preset": "tiny", "layers": [2], "lengths": [64]}
TIMING = {"repeats": 1, "min_s": 0, "max_s": 1, "warmup": 1}


def _points(*cases: dict[str, Any], **changes: Any) -> list[Point]:
    data = {"kind": "backward", "name": "t", "implementations": ["chunked"], "timing": TIMING}
    data |= {"cases": [CASE | case for case in cases or ({},)]}
    return list(Spec.model_validate(data | changes).points(CPU))


def _measure(point: Point, beats: list[str] | None = None) -> Measurement:
    told = [] if beats is None else beats
    return measure(travelled(point), lambda phase, done=0, total=0: told.append(phase))


@pytest.mark.parametrize("branch", ["all", "slc"])
def test_a_model_of_a_branch_is_watched_and_measured(branch: str) -> None:
    beats: list[str] = []
    (point,) = _points({"branches": [branch]})
    result = _measure(point, beats)
    assert set(result.route) - {"select"} == ({"cmp", "slc", "win"} if branch == "all" else {"slc"})
    back = ["backward of the loss", "backward of layer 2", "backward of layer 1", "backward of the embedding"]
    assert [place for place in beats if place.startswith("backward")] == back
    marks = json.loads(str(result.files[LAYERS]))
    assert [mark["place"] for mark in marks] == ["forward of layer 1", "forward of layer 2", *back, marks[-1]["place"]]
    assert all(mark["finite"] and mark["resident_mib"] > 0 for mark in marks)
    assert all("VmRSS" in str(result.files[f"memory_{side}.txt"]) for side in ("before", "after"))
    assert ("trace.txt" in result.files) == (branch != "all")
    values = values_of(result)
    parameters = sum(p.numel() for p in repeated_pass(travelled(point)).parameters) * 4 / 2**20
    assert parameters < values["forward_memory"] < values["peak_memory"]
    assert values["time"] > 0


def test_a_model_that_runs_another_branch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    (point,) = _points({"branches": ["win"]})
    case = travelled(point)
    whole = repeated_pass(case.model_copy(update={"model": replace(case.model, branches=("cmp", "slc", "win"))}))
    monkeypatch.setattr("jobs.backward.repeated_pass", lambda _: whole)
    with pytest.raises(WrongResult, match="a model of win ran cmp, select, slc, win"):
        measure(case, lambda *_: None)


def test_a_toy_repeats_a_branch_within_a_layer() -> None:
    (point,) = _points({"layers": [1], "branches": ["cmp"], "repeats": [3]})
    trial = repeated_pass(travelled(point))
    with capture() as runs:
        trial.run()
    assert [run.branch for run in runs] == ["cmp"] * 3
    assert all(p.grad is not None for p in trial.parameters)


class Changed(nn.Linear):
    """A layer whose output, or whose gradient, is changed."""

    def __init__(self, change: Any, *, gradient: bool = False) -> None:
        super().__init__(4, 4)
        self.change, self.gradient = change, gradient

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if not self.gradient:
            return self.change(out)
        out.register_hook(self.change)
        return out.clone()


class Unused(Changed):
    """A layer with a weight that its output does not depend on."""

    def __init__(self) -> None:
        super().__init__(lambda out: out)
        self.idle = nn.Parameter(torch.ones(1))


def _fail(message: str, kind: type[Exception] = RuntimeError) -> Any:
    def change(_: Tensor) -> Tensor:
        raise kind(message)

    return change


@pytest.mark.parametrize(
    ("second", "error", "words"),
    [
        (Changed(torch.detach), BrokenGradient, "layer 2 of 3 is the first without a gradient: none reaches"),
        (Unused(), BrokenGradient, "layer 2 of 3 is the first without a gradient: idle has none"),
        (Changed(lambda g: g * float("nan"), gradient=True), BrokenGradient, r"layer 2 of 3 .* not finite: .*weight"),
        (Changed(lambda out: out / 0), BrokenGradient, "the loss is nan; values are not finite from here on: forward"),
        (Changed(_fail("broken"), gradient=True), PassFailed, "^backward of layer 2: RuntimeError: broken"),
        (Changed(_fail("full", MemoryError)), PassFailed, "^forward of layer 2: MemoryError: full"),
    ],
    ids=["detached", "unused", "nan-gradient", "nan-loss", "raises-back", "memory"],
)
def test_the_first_layer_that_breaks_is_named(
    second: nn.Module, error: type[Exception], words: str, tmp_path: Path
) -> None:
    layers = [nn.Linear(4, 4), second, nn.Linear(4, 4)]
    head = (lambda out: out.sum()) if error is not BrokenGradient or "loss" not in words else (lambda out: out.std())
    whole, x = nn.Sequential(*layers), torch.ones(2, 4, requires_grad=True)
    watch = LayerWatch(layers, torch.device("cpu"), lambda *_: None, tmp_path)
    with pytest.raises(error, match=words) as caught:
        watch.run(lambda: head(whole(x)), lambda loss: loss.backward())
    assert ran_out_of_memory(caught.value) == ("MemoryError" in words)
    assert all(not layer._forward_hooks and not layer._forward_pre_hooks for layer in layers)


def test_a_hang_in_a_layer_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hang leaves its layer, stacks of all threads, memory by layer, environment, nvidia-smi."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho no process runs\n")
    (tools / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    points = _points({"branches": ["win"]}, drill={"hang_in_layer": 2, "from_length": 64})
    conditions = Conditions("cpu", Deadlines(startup_s=120, heartbeat_s=10, point_s=120))
    [hung] = [u for u in supervised(points, conditions, tmp_path / "store") if isinstance(u, Ended)]
    assert hung.outcome.state is PointState.HANG
    assert hung.outcome.reason == "no progress for 10 s (last in phase 'backward of layer 2')"
    assert not hung.outcome.metrics
    assert hung.outcome.environment["threads"]
    assert "_arrive" in hung.files["stderr.txt"]
    assert hung.files["stderr.txt"].count("hread 0x") >= 2
    assert {"stacks.txt", "processes.txt", "memory.txt"} <= set(hung.files)
    assert hung.files["nvidia-smi.txt"].startswith("no process runs")
    assert json.loads(hung.files[LAYERS])[-1]["place"] == "backward of layer 2"
