"""Checkpoints of a training and its exact resume: real processes, real files, gloo on CPUs."""

import json
import re
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from processes import descendants
from token_data import make_tokenizer, texts, write
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.state_dict_loader import load
from trainings import Watching, by_name, interrupt, of_the_kill, small, trains_alike, write_text
from travelling import CPU, travelled
from warm_ranks import WarmRanks

from jobs.schema.point import Measurement
from jobs.train import Spec, measure
from jobs.training.checkpoints import folder as folder_module
from jobs.training.checkpoints.folder import MANIFEST, CheckpointError, CheckpointFolder
from jobs.training.checkpoints.saving import Writer
from jobs.training.errors import Diverged, Stopped, Suspended
from nsa_core.model import PRESETS, NSATransformer

STEPS = 12


def _data(text: Path, **changes: Any) -> dict[str, Any]:
    return small(text, steps=STEPS, checkpoints={"every": 4}) | changes


def _train(text: Path, watching: Watching, **changes: Any) -> Measurement:
    spec = Spec.model_validate(_data(text, **changes))
    return measure(travelled(spec.points(CPU)[0]), watching)


def _losses(result: Measurement) -> tuple[float, ...]:
    return by_name(result)["loss"].samples


def _steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints, newest first."""
    return [manifest.step for manifest in CheckpointFolder(f"file://{folder}").complete()]


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    """The model's weights in the newest checkpoint."""
    model = NSATransformer(PRESETS["tiny"]).state_dict()
    newest = CheckpointFolder(f"file://{folder}").complete()[0]
    load({"model": model}, storage_reader=FsspecReader(f"file://{folder}/{newest.name}"), no_dist=True)
    return model


@pytest.mark.parametrize("changes", [{}, {"precision": "bfloat16", "micro_batch": 2}, {"asynchronous": True}])
def test_interrupted_and_resumed_is_uninterrupted_bit_by_bit(
    text: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    asynchronous = changes.pop("asynchronous", False)
    changes["checkpoints"] = {"every": 4, "asynchronous": asynchronous}
    whole = _train(text, Watching(tmp_path / "whole"), **changes)
    with pytest.raises(Suspended) as caught:
        _train(text, Watching(tmp_path / "parts", at=5, act=interrupt), **changes)
    assert str(caught.value) == (
        "SIGTERM ended the training after step 6 of 12; go on from the checkpoint of step 6: "
        "nsa submit SPEC --resume RUN"
    )
    watching = Watching(tmp_path / "parts")
    resumed = _train(text, watching, **changes)
    assert watching.trained[0] == 6
    assert _losses(resumed) == _losses(whole)
    for name in ("heldout_loss_before", "heldout_loss"):
        assert by_name(resumed)[name].value == by_name(whole)[name].value
    expected = _weights(tmp_path / "whole")
    assert all(torch.equal(weight, expected[name]) for name, weight in _weights(tmp_path / "parts").items())
    assert by_name(resumed)["resumed_step"].value == 6
    assert resumed.environment["training"]["resumed_from"] == [6]
    assert "resumed_step" not in by_name(whole)
    assert "3 after each resume left out" in by_name(resumed)["throughput"].method


def test_a_training_on_tokens_goes_on_with_the_documents_that_an_uninterrupted_one_reads(tmp_path: Path) -> None:
    """Over more than an epoch, in the middle of a file and of a document."""
    documents = write(tmp_path / "documents", texts(60), "parquet")
    tokenizer = make_tokenizer(tmp_path / "tokenizer.json")
    sources = {"path": str(documents), "tokenizer_path": str(tokenizer), "heldout": 0.2, "heldout_batches": 2}
    data = {"data": sources, "steps": 20}
    whole = _train(documents, Watching(tmp_path / "whole"), **data)
    assert whole.environment["training"]["corpus"]["epochs"] > 1
    for at in (2, 13):
        with pytest.raises(Suspended):
            _train(documents, Watching(tmp_path / "parts", at=at, act=interrupt), **data)
    resumed = _train(documents, Watching(tmp_path / "parts"), **data)
    assert _losses(resumed) == _losses(whole)
    assert resumed.environment["training"]["corpus"] == whole.environment["training"]["corpus"]
    assert by_name(resumed)["heldout_loss"].value == by_name(whole)["heldout_loss"].value


def _kill_last_rank() -> None:
    descendants(psutil.Process(), "spawn_main")[-1].kill()


class _KilledThenInterrupted(Watching):
    """A Watching that interrupts the training, too, once it was started again and has got further."""

    def warn(self, text: str) -> None:
        super().warn(text)
        if "; restart " in text:
            self._at, self._act = 11, interrupt


# Under ddp: tests/jobs/test_soak.py, and on Ray tests/e2e/test_ray_ranks.py.
def test_sharded_ranks_start_again_after_a_kill_and_another_number_of_ranks_goes_on_after_sigterm(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two ranks with sharded weights; then one rank reads what both wrote."""
    before = signal.getsignal(signal.SIGTERM)
    tame = {"steps": 80, "optimizer": {"warmup_steps": 3, "learning_rate": 1e-3}}  # what is rounded stays small
    watching = _KilledThenInterrupted(tmp_path, at=12, act=_kill_last_rank)
    with pytest.raises(Suspended, match=r"go on from the checkpoint of step (\d+): nsa submit SPEC --resume RUN"):
        _train(text, watching, **tame, checkpoints={"every": 5}, ranks=2, parallel="fsdp", restarts=1)
    assert signal.getsignal(signal.SIGTERM) is before
    written = capfd.readouterr().err
    assert all(re.search(rf"^\[rank {rank}\].*errors\.Suspended: ", written, re.MULTILINE) for rank in (0, 1)), written
    warning = of_the_kill(watching.warnings)
    assert "of 2 was killed by SIGKILL; restart 1 of 1 of all ranks from the last checkpoint" in warning
    (step, *_) = _steps(tmp_path)
    alone = _train(text, Watching(tmp_path), **tame, checkpoints={"every": 80})
    restarted, continued = alone.environment["training"]["resumed_from"]
    assert restarted in range(10, continued, 5)
    assert continued == step < 80
    whole = _train(text, Watching(None), **tame, checkpoints=None)
    assert "restarts" not in whole.environment["training"]
    trains_alike(_losses(alone), _losses(whole))
    assert _losses(alone) == pytest.approx(_losses(whole), rel=0.02), "a lost optimizer's state shows in more"
    assert len(_losses(alone)) == 80


def test_ranks_go_on_bit_by_bit_under_replicate_from_a_checkpoint_of_ddp(
    text: Path, tmp_path: Path, two_warm_ranks: WarmRanks
) -> None:
    """Two passes of one rank, and two ranks: sums of two have one order, and halves of them are exact."""
    two = {"ranks": 2, "steps": 60}
    whole = _train(text, Watching(tmp_path / "whole"), steps=60, micro_batch=2, checkpoints={"every": 60})
    begun = Watching(tmp_path / "parts", launcher=two_warm_ranks, at=5, act=interrupt)
    with pytest.raises(Suspended):
        _train(text, begun, **two, parallel="ddp")
    (step, *_) = _steps(tmp_path / "parts")
    assert 5 < step < 60
    watching = Watching(tmp_path / "parts")
    resumed = _train(text, watching, **two, parallel="replicate")
    assert watching.warnings == []
    assert by_name(resumed)["resumed_step"].samples == (step,)
    assert _losses(resumed) == _losses(whole)
    assert len(_losses(resumed)) == 60
    assert by_name(resumed)["heldout_loss"].value == by_name(whole)["heldout_loss"].value
    assert by_name(resumed)["rank_compute_time"].value > 0
    assert resumed.environment["training"]["launcher"] == "elastic", "as without a launcher"
    expected = _weights(tmp_path / "whole")
    assert all(torch.equal(weight, expected[name]) for name, weight in _weights(tmp_path / "parts").items())


def test_without_a_store_nothing_is_trained(text: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^checkpoints: there is no artifact store to keep them in"):
        _train(text, Watching(None))


# Which are kept


def test_the_newest_and_the_best_are_kept(text: Path, tmp_path: Path) -> None:
    """The losses rise after the first checkpoint, so that the best one is none of the newest."""
    rising = {"optimizer": {"warmup_steps": 11, "learning_rate": 3.0}}
    keep = {"every": 3, "keep_last": 2, "keep_best": True}
    watching = Watching(tmp_path)
    result = _train(text, watching, checkpoints=keep, **rising)
    heldout = watching.series["heldout_loss"]
    assert list(heldout) == [3, 6, 9, 12]
    best = min(heldout, key=lambda step: heldout[step])
    assert best < 9, "else this tests nothing"
    assert _steps(tmp_path) == [12, 9, best]
    assert len(list(tmp_path.iterdir())) == 3, "nothing else is left"
    found = by_name(result)
    assert len(found["checkpoint_time"].samples) == len(found["checkpoint_wait"].samples) == 4
    size = sum(file.stat().st_size for file in tmp_path.glob("*-step-12/*") if file.name != MANIFEST)
    assert found["checkpoint_size"].samples[-1] == pytest.approx(size / 2**20)
    assert found["checkpoint_failures"].value == 0
    assert result.environment["training"]["checkpoints"]["kept"] == [
        f"{number:06d}-step-{3 * number}" for number in (4, 3, best // 3)
    ]


def test_a_finished_training_is_not_repeated_and_other_code_begins_a_new_one(text: Path, tmp_path: Path) -> None:
    first = _train(text, Watching(tmp_path))
    again = Watching(tmp_path)
    assert _losses(_train(text, again)) == _losses(first)
    assert again.trained == []
    other = Watching(tmp_path, key="other code")
    result = _train(text, other)
    assert other.trained == list(range(STEPS))
    assert "resumed_step" not in by_name(result)
    assert _steps(tmp_path) == [12, 8], "the new training's"


# When it goes wrong


def test_a_process_killed_in_the_middle_of_saving_leaves_the_checkpoint_before(text: Path, tmp_path: Path) -> None:
    script = """
        import json, os, signal, sys
        from jobs.schema.point import Surroundings
        from jobs.train import Case, measure

        class Told:
            surroundings = Surroundings(sys.argv[2], "k")
            step = 0
            def __call__(self, phase, done=0, total=0):
                self.step = done if phase == "train" else self.step
                if phase == "checkpoint" and self.step == 7 and done > 500_000:
                    os.kill(os.getpid(), signal.SIGKILL)
            def sample(self, *_): pass
            def warn(self, text): print(text)
            def keep(self, *_): pass

        measure(Case.model_validate_json(sys.argv[1]), Told())
        """
    case = json.dumps(Spec.model_validate(_data(text)).points(CPU)[0].config)
    code = textwrap.dedent(script)
    done = subprocess.run([sys.executable, "-c", code, case, f"file://{tmp_path / 'parts'}"], timeout=120)
    assert done.returncode == -signal.SIGKILL
    (torn, *_) = sorted((tmp_path / "parts").iterdir(), reverse=True)
    assert torn.name == "000002-step-8"
    assert any(torn.iterdir()), "it was killed while it wrote"
    assert _steps(tmp_path / "parts") == [4]
    watching = Watching(tmp_path / "parts")
    resumed = _train(text, watching)
    assert watching.trained[0] == 4
    assert watching.warnings == []
    assert _losses(resumed) == _losses(_train(text, Watching(tmp_path / "whole")))
    assert not torn.exists()


@pytest.mark.parametrize("harm", ["cut", "gone"])
def test_a_damaged_checkpoint_is_reported_and_the_one_before_taken(text: Path, tmp_path: Path, harm: str) -> None:
    with pytest.raises(Suspended):
        _train(text, Watching(tmp_path, at=9, act=interrupt))
    (data,) = tmp_path.glob("*-step-10/*.distcp")
    if harm == "gone":
        data.unlink()
    else:
        data.write_bytes(data.read_bytes()[:-1])
    watching = Watching(tmp_path)
    result = _train(text, watching)
    (warning,) = watching.warnings
    assert warning.startswith("checkpoint of step 10 is damaged and not used: __0_0.distcp ")
    assert watching.trained[0] == 8
    assert result.environment["training"]["checkpoints"]["damaged"] == [warning]
    assert _steps(tmp_path) == [12, 8], "the damaged one took no place"


def test_another_text_is_refused_by_a_checkpoint(text: Path, tmp_path: Path) -> None:
    with pytest.raises(Suspended):
        _train(text, Watching(tmp_path / "kept", at=5, act=interrupt))
    other = write_text(tmp_path / "other")
    (other / "00.txt").write_text("a text that was not there before. " * 30)
    with pytest.raises(CheckpointError, match=r"^data: its text is not the one that the checkpoint of step 6 has lea"):
        _train(other, Watching(tmp_path / "kept"))
    assert by_name(_train(text, Watching(tmp_path / "kept")))["resumed_step"].value == 6


@contextmanager
def _full_disk(limit: int = 4096) -> Iterator[None]:
    """No file of this process can grow beyond `limit` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# With room for some of a file, torch.save ends with an error of its own.
@pytest.mark.parametrize(("asynchronous", "room"), [(False, 4096), (True, 60_000)])
def test_a_full_disk_costs_checkpoints_and_not_the_training(
    text: Path, tmp_path: Path, asynchronous: bool, room: int
) -> None:
    disk = _full_disk(room)

    def fill() -> None:
        while _steps(tmp_path) != [4]:  # still being written
            time.sleep(0.01)
        disk.__enter__()

    watching = Watching(tmp_path, at=5, act=fill)
    try:
        result = _train(text, watching, checkpoints={"every": 4, "asynchronous": asynchronous})
    finally:
        disk.__exit__(None, None, None)
    assert len(_losses(result)) == STEPS
    assert len(watching.warnings) == 2
    for step, warning in zip((8, 12), watching.warnings, strict=True):
        assert warning.startswith(f"checkpoint of step {step} was not saved: OSError: [Errno 27] File too large")
    assert watching.series["checkpoint_failures"] == {8: 1.0, 12: 2.0}
    assert by_name(result)["checkpoint_failures"].value == 2
    assert result.environment["training"]["checkpoints"]["failures"] == watching.warnings
    assert [path.name for path in tmp_path.iterdir()] == ["000001-step-4"], "the one before stays, torn ones do not"
    assert _steps(tmp_path) == [4]


def test_a_training_that_could_save_none_says_so(text: Path, tmp_path: Path) -> None:
    with _full_disk():
        watching = Watching(tmp_path)
        found = by_name(_train(text, watching))
        with pytest.raises(Stopped, match=r"after step 6 of 12; it has no checkpoint to go on from$") as caught:
            _train(text, Watching(tmp_path, at=5, act=interrupt))
    assert found["checkpoint_failures"].value == len(watching.warnings) == 3
    assert "checkpoint_size" not in found
    assert not isinstance(caught.value, Suspended)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(CheckpointError, match=r"^checkpoints: file:.*/file/of: cannot be read: NotADirectoryError"):
        _train(text, Watching(tmp_path / "file" / "of"))


def test_no_checkpoint_of_a_diverged_step_is_kept(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are ruined by step 8 itself, whose loss is still a number."""
    monkeypatch.setattr(
        "jobs.training.loop.learning_rate", lambda spec, step, steps: float("nan") if step == 7 else 1e-3
    )
    with pytest.raises(Diverged, match=r"^weights are not finite after step 8; lower optimizer\.learning_rate$"):
        _train(text, Watching(tmp_path))
    assert _steps(tmp_path) == [4]


def test_a_checkpoint_whose_files_the_first_node_does_not_see_is_none(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where ranks on other hosts write to disks of their own."""
    monkeypatch.setattr(folder_module, "_PATIENCE_S", 0.0)
    write_data = Writer.write_data

    def write_elsewhere(writer: Writer, *args: Any) -> Any:
        done = write_data(writer, *args)
        (Path(str(writer.path).removeprefix("file://")) / "__0_0.distcp").unlink()
        return done

    monkeypatch.setattr(Writer, "write_data", write_elsewhere)
    watching = Watching(tmp_path)
    _train(text, watching)
    assert "NSA_ARTIFACT_STORE: " in watching.warnings[0]
    assert "does not see __0_0.distcp, which a rank wrote there; name a store that all nodes" in watching.warnings[0]
    assert list(tmp_path.iterdir()) == []
