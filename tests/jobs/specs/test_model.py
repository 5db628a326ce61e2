"""A model of one's own, in every kind that has one."""

from typing import Any

import pytest
from travelling import CPU, travelled

from jobs.specs.kinds import kinds
from jobs.specs.load import parse_spec
from nsa_core import NSAConfig, memory
from nsa_core.memory import MemoryEstimate

OWN = {"layers": 3, "dim": 48, "heads": 6, "kv_heads": 2, "nsa": {"window": 64}}
SIZED = OWN | {"vocab_size": 256}
PASSES: dict[str, Any] = {"implementations": ["chunked"], "lengths": [64]}
TRAIN: dict[str, Any] = {"seq_len": 64, "steps": 20, "optimizer": {"warmup_steps": 2}}
MORE = {
    "train": TRAIN,
    "diagnose": TRAIN,
    "soak": TRAIN | {"minutes": 1, "piece_minutes": 1, "checkpoints": {"every": 10}},
    "needle": PASSES | {"tokens": 64, "steps": 20},
    "toolchain": PASSES | {"env": [{}, {"A": "1"}]},
    "scaling": PASSES | {"workload": "model"},
    "decode": PASSES | {"workload": "model"},
    "backward": {"implementations": ["chunked"]},
}


@pytest.fixture(autouse=True)
def _no_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the predicted memory, which is in no axis and takes seconds."""
    monkeypatch.setattr(memory, "_along_tokens", lambda *_: MemoryEstimate(0, 0, 0, 0, 0, 0))


TEXTS = ("train", "diagnose", "soak", "needle")
MODELLED = [name for name, module in kinds().items() if "model" in module.Spec.model_fields]


def _points(kind: str, **changes: Any) -> Any:
    return parse_spec({"kind": kind, "name": "t", **MORE.get(kind, PASSES), **changes}).all_points({None: CPU})


def _sized(kind: str, model: dict[str, Any]) -> dict[str, Any]:
    """With a vocabulary, where no text tells it."""
    return model if kind in TEXTS else model | {"vocab_size": 256}


@pytest.mark.parametrize("kind", MODELLED)
def test_a_model_of_ones_own_is_measured(kind: str) -> None:
    model = travelled(_points(kind, model=_sized(kind, OWN))[0]).model
    assert (model.layers, model.dim, model.heads, model.kv_heads, model.head_dim) == (3, 48, 6, 2, 8)
    assert model.ffn_dim == 128, "8/3 of 48, up to a multiple of 64"
    assert model.nsa == NSAConfig(window=64)


@pytest.mark.parametrize("kind", MODELLED)
def test_only_a_model_of_ones_own_has_its_sizes_as_an_axis(kind: str) -> None:
    """The heads, their dim and the layers of the 125M model are evidence for its plan; another width is not."""
    alike = {"layers": 12, "dim": 64, "heads": 12, "kv_heads": 2, "head_dim": 64}
    (own, *_), (preset, *_) = _points(kind, model=_sized(kind, alike)), _points(kind, preset="m7c_125m")
    axes = {**own.axes.to_record()}
    assert axes.pop("model").startswith("dim 64, ffn_dim 192, ")
    assert axes == preset.axes.to_record()


@pytest.mark.parametrize("kind", MODELLED)
def test_models_that_differ_in_their_nsa_alone_share_no_cell(kind: str) -> None:
    changed = {"cmp_block": 64, "cmp_stride": 32, "slc_block": 128, "slc_count": 32, "window": 4096}
    changed |= {"init_blocks": 2, "local_blocks": 3}
    own = [
        _points(kind, model=_sized(kind, OWN | {"nsa": nsa}))[0] for nsa in ({"window": 64}, {"window": 32}, changed)
    ]
    presets = [_points(kind, preset="tiny")[0], _points(kind, preset="tiny", nsa={"window": 8})[0]]
    assert len({str(point.axes.to_record()) for point in (*own, *presets)}) == 5
    assert own[0].axes.more["model"].endswith(", window 64")
    assert "model" not in presets[0].axes.more


def test_a_backward_pass_has_the_sizes_of_each_case() -> None:
    points = _points(
        "backward", cases=[{"model": SIZED, "lengths": [64]}, {"model": SIZED, "layers": [1], "lengths": [64]}]
    )
    assert [travelled(point).model.layers for point in points] == [3, 1]
    assert all(point.axes.more["preset"].startswith("3x48-") for point in points)


def test_models_of_equal_layers_and_width_have_labels_of_their_own() -> None:
    own = [{"model": SIZED | {"heads": heads}, "lengths": [64]} for heads in (6, 2)]
    one, other = _points("backward", cases=own)
    assert one.label != other.label
