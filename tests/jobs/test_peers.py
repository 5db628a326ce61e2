"""The peers kind: a package of its own offers toy peers, right and wrong; the real ones are told to be missing."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from travelling import HEADS, NSA, QUICK, measured, values_of

from jobs import peers
from jobs.measure.check import WrongResult
from jobs.schema.point import Machine
from jobs.specs.kinds import offered_sources
from jobs.specs.load import parse_spec
from orchestrator.cli import doctor
from orchestrator.settings import Settings

RIGHT = """
import torch
from nsa_core import compress, nsa_attention, select_blocks

INSTALL = "pip install toy"
SHIFT = 0.0

def version():
    return "1.0"

def incompatible(shape, config, dtype, device):
    return "its heads are all alike" if shape.query_heads != shape.kv_heads and dtype == torch.float16 else None

def semantics(config):
    return config

def select(q, k, v, config):
    return select_blocks(q, k, config, backend="naive").flip(-1)

def attend(inputs, config, window_kernel):
    q, k, v = (inputs[name] for name in "qkv")
    return nsa_attention(q, k, v, torch.sigmoid(inputs["gates"]), config, backend="naive") + SHIFT
"""
NARROW = """
def attend(inputs, config, window_kernel):
    return narrower(inputs, __import__("dataclasses").replace(config, window=config.window + 1), window_kernel)
"""
LATEST = """
def select(q, k, v, config):
    last = torch.arange(q.shape[1])[None, :, None, None] // config.slc_block
    latest = (last - torch.arange(config.slc_count)).clamp(min=-1)
    return latest.expand(1, -1, k.shape[2], -1)
"""
TUNED = """
import triton

@triton.autotune([triton.Config({"BLOCK": 1}), triton.Config({"BLOCK": 2})], key=[], cache_results=True)
@triton.jit
def kernel(BLOCK: triton.language.constexpr):
    pass

tune = attend

def attend(inputs, config, window_kernel):
    kernel.cache.setdefault("length", inputs["q"].shape[1])
    return tune(inputs, config, window_kernel)
"""
DENSE = """
def semantics(config):
    return None

def attend(inputs, config, window_kernel):
    q, k, v = (inputs[name].transpose(1, 2) for name in "qkv")
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
"""
# Offsets are too large for their integer from the timed length on, in the last row of the last head.
OVERFLOW = """
right, chosen = attend, select

def fits(x, most):
    head, row = torch.arange(x.shape[0] * x.shape[2]).view(-1, 1, x.shape[2], 1), torch.arange(x.shape[1])
    return (head * x.shape[1] + row[:, None, None]) * (x.shape[1] // 16) < most
"""
ZERO_ROWS = """
def attend(inputs, config, window_kernel):
    out = right(inputs, config, window_kernel)
    return torch.where(fits(out, 16360), out, 0)
"""
NO_GRADIENT = """
def attend(inputs, config, window_kernel):
    k = inputs["k"]
    return right({**inputs, "k": torch.where(fits(k, 8170), k, k.detach())}, config, window_kernel)
"""
NO_BLOCKS = """
def select(q, k, v, config):
    blocks = chosen(q, k, v, config)
    return torch.where(fits(blocks, 8170), blocks, -1)
"""
TOYS = {
    "right": RIGHT,
    "zero_rows": RIGHT + OVERFLOW + ZERO_ROWS,
    "zero_rows_of_dense": RIGHT + DENSE + OVERFLOW + ZERO_ROWS,
    "no_gradient": RIGHT + OVERFLOW + NO_GRADIENT,
    "no_blocks": RIGHT + OVERFLOW + NO_BLOCKS,
    "tuned": RIGHT + TUNED,
    "shifted": RIGHT.replace("SHIFT = 0.0", "SHIFT = 0.1"),
    "narrow": RIGHT + "\nnarrower = attend\n" + NARROW,
    "blocks": RIGHT + LATEST,
    "unloadable": RIGHT.replace('return "1.0"', "import toy_extension"),
    "unimportable": "raise OSError('no driver\\nsecond line')",
    "partial": RIGHT.replace("def select(", "def selects("),
    "undecided": RIGHT.replace('return "its heads', 'raise KeyError("heads")\n    return "its heads'),
}


@pytest.fixture(autouse=True)
def _toys(install: Callable[..., Path]) -> None:
    """An installed distribution that offers the toy peers."""
    peers = {name: f"toys.{name}" for name in TOYS} | {"dense-pytorch": "toys.right"}
    install("toys", TOYS, version="2.0", peers=peers)


def _spec(*names: str, **changes: Any) -> Any:
    data = {"kind": "peers", "name": "t", "peers": [*names], "shapes": [HEADS], "lengths": [64], "tokens": 128}
    data |= {"passes": ["forward+backward"], "dtype": "float32", "nsa": NSA, "timing": QUICK}
    return parse_spec(data | changes)


def _here() -> Machine:
    """The machine as the probe finds it."""
    return Machine("cpu", "test processor", 8 * 2**30, peers.versions())


def test_a_peer_from_outside_is_checked_and_timed_like_an_implementation_beside_it() -> None:
    spec = _spec("right", "dense-pytorch", implementations=["naive"])
    points = spec.points(_here())
    names = ["right", "dense-pytorch", "naive"]
    assert [point.label for point in points] == [f"4/2 d8 {name} forward+backward S=64" for name in names]
    assert {(p.axes.batch, p.axes.seq_len, p.skip_reason) for p in points} == {(2, 64, None)}
    right, dense, naive = (measured(point) for point in points)
    for values in map(values_of, (right, dense, naive)):
        assert min(values["time"], values["peak_extra_memory"]) > 0
        assert values["oracle_error"] <= values["oracle_error_bound"]
        assert values["rows_error"] <= values["rows_error_bound"]
    assert right.environment["peer"]["version"] == "1.0"
    assert right.environment["peer"]["computes"]["window"] == 16
    assert dense.environment["peer"]["computes"] == "dense causal attention"
    assert right.route == naive.route
    assert set(offered_sources(spec)) == {f"toys/{name}.py" for name in ("__init__", *TOYS)}


def test_a_peers_kernels_are_tuned_with_the_sizes_that_are_measured() -> None:
    pytest.importorskip("triton")
    (point,) = _spec("tuned").points(_here())
    measured(point)
    kernel = import_module("toys.tuned").kernel
    assert kernel.cache == {"length": 64}, "the check's sequences have another length"
    assert not kernel.cache_results, "else a choice for other sizes is read from disk"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shifted", r"shifted: output is off by .* \(2 sequences, S=43, 4/2 heads of 8\)"),
        ("narrow", "narrow: .* is off by"),
        ("blocks", "blocks: selects other blocks than the oracle for .* of the queries"),
        ("zero_rows", r"zero_rows: .* is off by 1.00e\+00 .* rows of q \(1, 256, 4, 8\)"),
        ("zero_rows_of_dense", r"zero_rows_of_dense: .* is off by 1.00e\+00"),
        ("no_gradient", "no_gradient: gradient of k is off by"),
        ("no_blocks", "no_blocks: row 255 of 256 selects blocks"),
    ],
)
def test_a_peer_that_disagrees_with_the_oracle_is_an_error(name: str, message: str) -> None:
    (point,) = _spec(name, lengths=[256], tokens=256).points(_here())
    assert point.skip_reason is None
    with pytest.raises(WrongResult, match=message):
        measured(point)


def test_a_peer_that_cannot_run_is_skipped_with_the_reason() -> None:
    names = ["unloadable", "unimportable", "partial", "undecided", "Scalable-Flash-NSA"]
    reasons = {point.axes.implementation: point.skip_reason for point in _spec(*names).points(_here())}
    assert reasons["unloadable"] == "the module 'toy_extension' is not installed; pip install toy"
    offered = "toys 2.0, which offers it, "
    unimportable = "cannot be imported (OSError: no driver second line); mend or uninstall toys"
    assert reasons["unimportable"] == offered + unimportable
    assert reasons["partial"] == offered + "lacks select; mend or uninstall toys"
    undecided = "its adapter cannot say whether it computes this (KeyError: 'heads'); mend or uninstall it"
    assert reasons["undecided"] == undecided
    assert str(reasons["Scalable-Flash-NSA"]).startswith("the module 'flash_nsa' is not installed; pip install git+")
    (point,) = _spec("right", dtype="float16").points(_here())
    assert point.skip_reason == "its heads are all alike"
    findings = {finding.name: finding for finding in doctor.findings(Settings())}
    assert findings["peer right"].detail == "toys 2.0"
    assert findings["peer dense-pytorch"].detail == "toys 2.0: has a name that nsa-bench itself has taken"
