"""NSAConfig and the errors of the operators: every wrong value is named with its fix."""

import pickle

import pytest
import torch

from nsa_core import BackendError, InputError, NSAConfig, compress, dense_attention, nsa_attention, select_blocks

SMALL = NSAConfig(cmp_block=8, cmp_stride=4, slc_block=16, slc_count=4, window=24)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cmp_block", 0),
        ("slc_block", 64.0),
        ("init_blocks", -1),
        ("compress", "max"),
        ("slots", "12-bit"),
        ("cmp_stride", 5),
        ("cmp_block", 128),
        ("slc_count", 2),
    ],
)
def test_a_wrong_value_is_named_with_its_fix(field, value):
    with pytest.raises(InputError, match=f"^{field}: .*: use ") as caught:
        NSAConfig(**{field: value})
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


def test_errors_survive_pickling():
    error = pickle.loads(pickle.dumps(BackendError("backend", "'x'", "use one of auto")))
    assert isinstance(error, BackendError)
    assert str(error) == "backend: 'x': use one of auto"


def tensors(tokens=20, heads=4, kv_heads=2, dim=8):
    return (
        torch.randn(1, tokens, heads, dim),
        torch.randn(1, tokens, kv_heads, dim),
        torch.randn(1, tokens, kv_heads, dim),
        torch.rand(1, tokens, heads, 3),
    )


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"k": torch.randn(1, 20, 3, 8), "v": torch.randn(1, 20, 3, 8)}, "k"),
        ({"v": torch.randn(1, 18, 2, 8)}, "v"),
        ({"k": (torch.randn(1, 20, 2, 8),) * 2}, "k"),
        ({"v": tuple(torch.randn(1, 20, 2, dim) for dim in (8, 4, 8))}, "v"),
        ({"q": torch.ones(1, 20, 4, 8, dtype=torch.int64)}, "q"),
        ({"q": torch.randn(1, 20, 4, 8).to(torch.float8_e5m2)}, "q"),
        ({"branches": ("win", "win")}, "branches"),
        ({"backend": {"slc": "chunked"}, "branches": ("win",)}, r"backend\['slc'\]"),
        ({"backend": {"win": "nowhere"}}, "backend"),
        ({"config": NSAConfig(compress="mlp")}, "compress"),
        ({"scale": float("nan")}, "scale"),
        ({"scale": -0.5}, "scale"),
    ],
)
def test_more_wrong_operands_are_named(change, field):
    q, k, v, gates = tensors()
    arguments = {"q": q, "k": k, "v": v, "gates": gates, "config": SMALL} | change
    with pytest.raises(InputError, match=f"^{field}: "):
        nsa_attention(**arguments)


def test_other_operators_name_wrong_operands_too():
    q, k, v, _ = tensors()
    for window in (0, True):
        with pytest.raises(InputError, match=rf"^window: {window}: "):
            dense_attention(q, k, v, window=window)
    with pytest.raises(InputError, match=r"^cu_seqlens: \[2\] int16 on cpu: give an int32 tensor that ascends"):
        dense_attention(q[0], k[0], v[0], cu_seqlens=torch.tensor([0, 20], dtype=torch.int16))
    with pytest.raises(InputError, match=r"^k: "):
        select_blocks(q, k[..., :4], SMALL)
    with pytest.raises(InputError, match=r"^x: "):
        compress(k[0], SMALL)
    with pytest.raises(BackendError, match=r"^backend: .*chunked"):
        select_blocks(q, k, SMALL, backend="none")


def test_a_backend_that_cannot_run_says_why():
    q, k, v, gates = (x.to("meta") for x in tensors())
    with pytest.raises(BackendError, match="not on meta; use one of auto, reference"):
        nsa_attention(q, k, v, gates, SMALL, backend="packed")
