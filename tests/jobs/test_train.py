"""Training on bytes, with real runs of a tiny model."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from trainings import Keeping, small, trains_alike
from travelling import CPU, travelled, values_of

from jobs.schema.point import Measurement
from jobs.specs.spec import SpecError
from jobs.train import Case, Spec, measure
from jobs.training import parallel as parallel_model
from jobs.training.case import Layout, OptimizerSpec, learning_rate
from jobs.training.data.corpus import split_bytes
from jobs.training.errors import Ineffective
from jobs.training.live import LiveTraining
from jobs.training.parallel import ParallelModel
from jobs.training.probe import probe
from nsa_core.loss import IGNORED
from nsa_core.model import PRESETS, NSATransformer


def _spec(text: Path, **changes: Any) -> Spec:
    return Spec.model_validate(small(text, seq_len=48, steps=25) | changes)


def _train(spec: Spec, index: int = 0) -> Measurement:
    return measure(travelled(spec.points(CPU)[index]), lambda *_: None)


def test_the_loss_falls_on_held_out_text(text: Path) -> None:
    plan = {"steps": 1000, "tokens_per_step": 192, "hours": 2}
    spec = _spec(text, attention=["nsa", "dense"], plan=plan)
    assert [p.axes.implementation for p in spec.points(CPU)] == ["chunked", "dense"]
    for index, branches in ((0, {"cmp", "slc", "win", "select"}), (1, {"dense"})):
        result = _train(spec, index)
        found = values_of(result)
        assert found["heldout_loss_before"] > 5, "an untrained model knows nothing: ln(256) is 5.5"
        assert found["heldout_loss"] < 0.6 * found["heldout_loss_before"]
        assert set(result.route) == branches
        assert found["throughput"] == pytest.approx(4 * 48 / found["time"] * 1000, rel=0.2)
        assert found["planned_time"] == pytest.approx(1000 * 192 / found["throughput"] / 3600)
        assert found["throughput_needed"] == pytest.approx(1000 * 192 / 7200)
        assert found["peak_memory"] > 4 * 4 * result.environment["training"]["parameters"] / 2**20 * 0.7
        assert 0 < found["oracle_error"] <= found["oracle_error_bound"]
        assert "mfu" not in found, "the peak of this processor is not known"
        curve = next(m.samples for m in result.metrics if m.name == "loss")
        assert len(curve) == 25
        assert curve[-1] < curve[0]


def test_a_probe_gives_the_loss_by_position_and_sees_no_look_ahead(text: Path) -> None:
    result = _train(_spec(text, steps=5, seq_len=256, probe=True))
    found = {metric.name: metric for metric in result.metrics}
    by_position = found["late_loss"].samples
    assert len(by_position) == 3, "positions up to 64, 128 and 256"
    assert found["late_loss"].value == by_position[-1]
    whole = (by_position[0] + by_position[1] + 2 * by_position[2]) / 4
    assert whole == pytest.approx(found["heldout_loss"].value, rel=1e-5)
    assert found["foresight"].value < 1e-6


@pytest.mark.parametrize("ahead", [0, 1, 100])
def test_a_probe_finds_a_model_that_sees_ahead(ahead: int) -> None:
    """The model's loss is the token that it sees `ahead` positions later."""

    def loss_of(batches: Sequence[tuple[Tensor, Tensor]]) -> float:
        tokens, targets = batches[0]
        seen = torch.cat((tokens[:, ahead:], tokens[:, :ahead]), 1)
        return seen[targets != IGNORED].double().mean().item()

    tokens = torch.arange(256).expand(2, -1)
    changes = probe(loss_of, [(tokens, tokens)], 512).changes
    assert (max(map(abs, changes)) > 1) == (ahead > 0)


def test_checkpointing_is_reported_as_it_was_and_saves_memory(text: Path) -> None:
    plain, saving = (_train(_spec(text, steps=5, seq_len=256, checkpointing=on)) for on in (False, True))
    assert plain.environment["training"]["checkpointing"] is False
    assert saving.environment["training"]["checkpointing"] is True
    assert values_of(saving)["peak_memory"] < 0.9 * values_of(plain)["peak_memory"]


def test_cuda_graphs_that_were_not_captured_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: asked.append(options) or model)
    model = NSATransformer(PRESETS["tiny"])
    parallel = ParallelModel(model, Layout(1), torch.device("cpu"), compiled=True, cuda_graphs=True)
    options = {"deterministic": True, "triton.cudagraphs": True}  # torch's mode "reduce-overhead", and repeated bits
    assert asked == [{"fullgraph": True, "dynamic": False, "options": options}]
    monkeypatch.setattr(parallel_model, "graph_memory", lambda device: (0, 0))
    with pytest.raises(Ineffective, match="cuda_graphs"):
        parallel.check_effective()
    monkeypatch.setattr(parallel_model, "graph_memory", lambda device: (2, 1))
    parallel.check_effective()


def test_a_compiled_training_is_one_graph_and_records_it(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def without_a_c_compiler(model: torch.nn.Module, *, options: dict[str, Any], **others: Any) -> Any:
        asked.append(options)
        return compiled(model, backend="aot_eager", **others)

    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", without_a_c_compiler)
    spec, eager = (_spec(text, steps=5, attention=["dense"], compile=on) for on in (True, False))
    result, expected = _train(spec), _train(eager)
    assert asked == [{"deterministic": True}]
    assert result.environment["training"]["compile"] is True
    assert expected.environment["training"]["compile"] is False
    assert result.route == expected.route, "noted while tracing"
    losses, eagerly = (next(m.samples for m in each.metrics if m.name == "loss") for each in (result, expected))
    trains_alike(losses, eagerly)
    assert "compiled" in spec.points(CPU)[0].label
    bound, needed = spec.points(CPU)[0].estimate_bytes, eager.points(CPU)[0].estimate_bytes
    assert bound == needed, "what a compiler saves is not predicted"
    assert needed
    barely = replace(CPU, memory_bytes=int(0.8 * needed))
    assert [each.points(barely)[0].skip_reason is None for each in (spec, eager)] == [True, False]
    assert "estimate_error" not in values_of(result)


def test_it_trains_in_bfloat16_and_needs_the_memory_that_was_predicted(text: Path) -> None:
    found = values_of(_train(_spec(text, precision="bfloat16")))
    assert found["heldout_loss"] < found["heldout_loss_before"] - 1
    assert abs(found["estimate_error"]) < 10


def test_the_learning_rate_warms_up_and_decays_to_its_fraction() -> None:
    spec = OptimizerSpec(learning_rate=1.0, warmup_steps=4, final_fraction=0.1)
    rates = [learning_rate(spec, step, 20) for step in range(20)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)


def test_held_out_files_are_held_out_and_the_split_depends_on_contents_alone(text: Path) -> None:
    *parts, about = split_bytes(text, 0.2, 48)
    train, heldout = (bytes(part.tolist()) for part in parts)
    assert 2 <= heldout.count(b"\0") <= 16
    assert train.count(b"\0") + heldout.count(b"\0") == about["files"] == 40
    assert not {line for line in heldout.split(b"\0") if line} & set(train.split(b"\0"))
    assert about["sha256"].startswith("f04eca50c4e65ecc"), "checkpoints that are stored know the text by it"


def test_a_copy_that_is_cut_at_the_limit_is_on_the_side_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.training.data.corpus._MOST_BYTES", 12_500)
    draw = Random(0)
    for number in range(20):
        (tmp_path / f"{number}").write_bytes(draw.randbytes(500))
    sides = set()
    for _ in range(10):
        document = draw.randbytes(1500)
        for name in ("copy 1", "copy 2"):
            (tmp_path / name).write_bytes(document)
        sides.add(tuple(bytes(part.tolist()).count(document[:900]) for part in split_bytes(tmp_path, 0.5, 48)[:2]))
    assert sides == {(0, 2), (2, 0)}, "both on one side"


@pytest.mark.parametrize("count", [1, 3])
def test_few_files_keep_their_ends_which_a_dry_run_says(tmp_path: Path, count: int) -> None:
    for number in range(count):
        (tmp_path / f"{number}.txt").write_text("a" * 801 + "b" * 200)
    train, heldout, _ = split_bytes(tmp_path, 0.2, 16)
    assert set(train.tolist()) == {ord("a")}
    assert len(heldout) == 201 * count
    ends = "the end of the file" if count == 1 else "the end of each of 3 files"
    words = f"held out: {201 * count} of {1002 * count:,} bytes: {ends}"
    assert _spec(tmp_path, seq_len=64).notes() == (words,)
    with pytest.raises(SpecError, match=r"^data\.path: .*part has \d+ bytes, too few for seq_len 1024; "):
        _spec(tmp_path, seq_len=1024).notes()


def test_copies_of_one_file_are_named_as_such(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text("a" * 1001)
    with pytest.raises(SpecError, match=r"^data\.path: .*: its 20 files are copies, all on one side; give diff"):
        _spec(tmp_path, seq_len=64).notes()


def test_every_step_is_reported_as_it_was(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    norms: list[float] = []
    clip = torch.nn.utils.clip_grad_norm_

    def noted(*args: Any, **more: Any) -> torch.Tensor:
        norms.append(clip(*args, **more).item())
        return torch.tensor(norms[-1])

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", noted)
    report = Keeping()
    case: Case = travelled(_spec(text).points(CPU)[0])
    result = measure(case, report)
    losses = next(metric.samples for metric in result.metrics if metric.name == "loss")
    series = {name: list(values.values()) for name, values in report.series.items()}
    assert series.keys() == {"loss", "gradient_norm", "learning_rate", "throughput", "training_memory"}
    assert all(list(values) == list(range(1, 26)) for values in report.series.values())
    assert series["loss"] == list(losses)
    assert series["gradient_norm"] == pytest.approx(norms[:25])
    assert series["learning_rate"] == [learning_rate(case.optimizer, step, 25) for step in range(25)]
    assert all(50 < memory < 8 * 1024 for memory in series["training_memory"])


def test_the_throughput_is_that_of_the_last_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, *(0.25 * step for step in range(1, 9)), *(2 + 0.125 * step for step in range(1, 17))])
    monkeypatch.setattr("jobs.training.live.time.perf_counter", lambda: next(clock))
    report = Keeping()
    live = LiveTraining(report, tokens=100, device=torch.device("cpu"), flops=(6e6, 2.4e9))
    for step in range(89, 113):  # a resumed training begins at any step
        live.step(step, 1.0, 1.0, 1.0)
    speeds = list(report.series["throughput"].values())
    assert speeds[:8] == pytest.approx([400] * 8)
    assert speeds[-4:] == pytest.approx([800] * 4)
    assert list(report.series["mfu"].values())[:8] == pytest.approx([100] * 8), "400 tok/s x 6 MFLOPs"
