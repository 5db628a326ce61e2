"""Flash kernels without a GPU: the arguments that they get.

Stand-ins compute in plain PyTorch as the packages document: query i of S sees keys i + T - S - left to
i + T - S + right, where T is the number of keys, and -1 or None means no bound.
"""

import sys
from importlib.metadata import PackageNotFoundError
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from nsa_core import (
    BackendError,
    InputError,
    NSAConfig,
    available_backends,
    backends,
    dense_attention,
    functional,
    nsa_attention,
    routes,
)
from nsa_core.backends import chunked, dense, flash
from nsa_core.backends.flash import Host

BF16, FP32 = torch.bfloat16, torch.float32
H200 = (9, 0)


def _plain(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int | None, right: int | None) -> Tensor:
    """Attention [B,S,H,D] in float64, with window bounds as FlashAttention documents them."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0
    own = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    keys = torch.arange(k.shape[1])
    hidden = torch.zeros(q.shape[1], k.shape[1], dtype=torch.bool)
    hidden |= (keys < own - left) if left is not None and left >= 0 else hidden
    hidden |= (keys > own + right) if right is not None and right >= 0 else hidden
    wide = [x.double().transpose(1, 2) for x in (q, k, v)]
    k, v = (x.repeat_interleave(wide[0].shape[1] // x.shape[1], 1) for x in wide[1:])
    scores = (wide[0] @ k.mT * scale).masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).to(q.dtype)


def _plain_packed(q: Tensor, k: Tensor, v: Tensor, bounds: list[Tensor], scale: float, *sides: int | None) -> Tensor:
    assert all(x.dtype == torch.int32 for x in bounds)
    q_parts, k_parts, v_parts = (
        x.split(b.diff().tolist()) for x, b in ((q, bounds[0]), (k, bounds[1]), (v, bounds[1]))
    )
    parts = zip(q_parts, k_parts, v_parts, strict=True)
    return torch.cat([_plain(*(x[None] for x in part), scale, *sides)[0] for part in parts])


def _flash_attn(name: str, asked: list[bool]) -> ModuleType:
    """Version 2 gives an output, version 4 (`cute`) a pair."""

    def given(out: Tensor) -> Any:
        return (out, None) if name.endswith("cute") else out

    def flash_attn_func(q, k, v, *, softmax_scale, causal, window_size, deterministic):
        assert causal
        asked.append(deterministic)
        return given(_plain(q, k, v, softmax_scale, window_size[0], 0))

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, softmax_scale, causal, window_size,
        deterministic,
    ):  # fmt: skip
        assert causal
        assert max_seqlen_q >= cu_seqlens_q.diff().max()
        assert max_seqlen_k >= cu_seqlens_k.diff().max()
        return given(_plain_packed(q, k, v, [cu_seqlens_q, cu_seqlens_k], softmax_scale, window_size[0], 0))

    module = ModuleType(name)
    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    return module


def _varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    assert enable_gqa
    return _plain_packed(query, key, value, [cu_seq_q, cu_seq_k], scale, *window_size)


@pytest.fixture
def asked(monkeypatch):
    """Replace all kernels by stand-ins, on a host that has them; lists the `deterministic` they were given."""
    asked: list[bool] = []
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, _flash_attn(name, asked))
    monkeypatch.setattr(varlen, "varlen_attn", _varlen_attn)
    monkeypatch.setattr(flash, "here", lambda device: Host(H200, {}))
    monkeypatch.setattr(flash, "unavailable", lambda device, dtype: None)
    return asked


@pytest.fixture(params=flash.PROVIDERS)
def provider(request, asked, monkeypatch) -> str:
    """The only kernel available besides scaled_dot_product_attention."""
    monkeypatch.setattr(flash, "PROVIDERS", (request.param,))
    return request.param


def _gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad(out, leaves, weights)]


def _assert_near(actual: list[Tensor], expected: list[Tensor]) -> None:
    for got, want in zip(actual, expected, strict=True):
        assert got.dtype == BF16
        assert (got.double() - want.double()).norm() <= 1e-2 * want.norm() + 1e-6  # a window of one gives zeros


@pytest.mark.parametrize(("dim", "value_dim"), [(16, 16), (12, 20)])
@pytest.mark.parametrize(("rows", "window"), [(70, 1), (70, 69), (5, 24), (5, None), (1, 3)])
def test_windows_and_last_rows_agree_with_the_reference(provider, make_case, rows, window, dim, value_dim):
    case = make_case(70, batch=2, dim=dim, value_dim=value_dim, rows=rows, dtype=BF16)
    exact = case.to(torch.float64)
    with routes.capture() as runs:
        got = _gradients(dense_attention(*case.leaves[:3], window=window, scale=0.3), case.leaves[:3])
    assert [(run.branch, run.kernel) for run in runs] == [("dense", provider)]
    ones, config = torch.ones_like(exact.gates), NSAConfig(window=window or 70)
    want = nsa_attention(*exact.leaves[:3], ones, config, branches=("win",), scale=0.3, backend="reference")
    _assert_near(got, _gradients(want, exact.leaves[:3]))


@pytest.mark.parametrize("window", [1, 24, 500])
def test_the_window_branch_with_its_gates(provider, make_case, window):
    case = make_case(70, batch=2, dtype=BF16)
    exact, config = case.to(torch.float64), NSAConfig(window=window)
    backend = {"win": "flash", "cmp": "naive", "slc": "chunked", "select": "chunked"}
    with routes.capture() as runs:
        out = nsa_attention(*case.leaves, config, scale=0.3, backend=backend)
    assert {(run.branch, run.kernel) for run in runs} == {*backend.items(), ("win", provider)} - {("win", "flash")}
    want = nsa_attention(*exact.leaves, config, scale=0.3, backend="reference")
    _assert_near(_gradients(out, case.leaves), _gradients(want, exact.leaves))


@pytest.mark.parametrize("window", [None, 9])
def test_packed_sequences_are_computed_at_once(provider, make_case, window):
    lengths = [1, 5, 40, 24]
    case, bounds = make_case(70, dtype=BF16), torch.tensor([0, *lengths]).cumsum(0)
    packed = [x[0].detach() for x in case.leaves[:3]]
    with routes.capture() as runs:
        got = dense_attention(*packed, cu_seqlens=bounds, window=window)
    assert [run.kernel for run in runs] == [provider]
    parts = zip(*(x.double().split(lengths) for x in packed), strict=True)
    want = torch.cat([dense_attention(*(x[None] for x in part), window=window)[0] for part in parts])
    _assert_near([got], [want])
    with pytest.raises(InputError, match=r"cu_seqlens: \[0, 71\]"):
        dense_attention(*packed, cu_seqlens=torch.tensor([0, 71]))


def test_kernels_are_deterministic_where_pytorch_must_be(asked, make_case):
    case = make_case(70, dtype=BF16)
    for kernel in ("flash-attn-2", "flash-attn-4"):
        dense_attention(*case.leaves[:3], backend=kernel)
    torch.use_deterministic_algorithms(True)
    try:
        dense_attention(*case.leaves[:3], backend="flash-attn-4")
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [False, False, True]


def test_flash_is_for_the_window_alone(make_case, config):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert "flash" not in available_backends(cpu, BF16)
    assert "runs on cuda" in str(available_backends(cpu, BF16, "win")["flash"])
    assert available_backends(gpu, BF16, "win")["flash"] is None
    assert "not float32" in str(available_backends(gpu, FP32, "win")["flash"])
    case = make_case(70)
    for backend in ("flash", {"slc": "flash"}):
        with pytest.raises(
            BackendError, match=r"'flash': it computes the window alone; use backend=\{\"win\": \"flash"
        ):
            nsa_attention(*case.leaves, config, backend=backend)
    with pytest.raises(BackendError, match=r"'flash': it runs on cuda, not on cpu; use one of auto, .*chunked"):
        nsa_attention(*case.leaves, config, backend={"win": "flash"})


def test_torch_compile_traces_dense_attention_in_one_piece_at_any_length(make_case):
    compiled = torch.compile(dense_attention, backend="aot_eager", fullgraph=True)
    for tokens in (30, 41, 52):
        case = make_case(tokens)
        with routes.capture() as runs:
            out = compiled(*case.leaves[:3])
        torch.testing.assert_close(out, dense_attention(*case.leaves[:3]))
        torch.autograd.grad(out.sum(), case.leaves[:3])
        if tokens == 30:
            assert [run.kernel for run in runs] == ["sdpa-flash"]


class _Fused(ModuleType):
    """The chunked backend in the place of triton, which records the branches it computes at once."""

    def __init__(self) -> None:
        super().__init__("triton")
        self.at_once: list[tuple[str, ...]] = []
        for name in ("unavailable", "compressed", "select", "selected", "window"):
            setattr(self, name, getattr(chunked, name))

    def attend(self, operands, config, branches, scale, packed) -> Tensor:
        assert packed is None
        self.at_once.append(branches)
        given = operands.q, operands.keys, operands.values, operands.gates
        return nsa_attention(*given, config, branches=branches, scale=scale, backend="chunked")


@pytest.mark.parametrize(
    ("backend", "at_once"),
    [
        ("triton", [("cmp", "slc", "win")]),
        ({"cmp": "triton", "slc": "triton", "select": "triton", "win": "flash"}, [("cmp", "slc")]),
        ({"cmp": "triton", "slc": "triton", "win": "flash"}, []),  # another backend selects its blocks
        ({"cmp": "triton", "select": "triton", "win": "triton"}, [("cmp", "win")]),
    ],
)
def test_branches_of_triton_are_computed_at_once(asked, make_case, config, backend, at_once, monkeypatch):
    fused = _Fused()
    monkeypatch.setattr(functional, "triton", fused)
    everything = dict(backends.BACKENDS) | {"triton": fused}
    monkeypatch.setattr(backends, "BACKENDS", everything)
    monkeypatch.setattr(backends, "WINDOW_BACKENDS", everything | {"flash": flash})
    case = make_case(90, dtype=BF16)
    out = nsa_attention(*case.leaves, config, backend=backend)
    assert fused.at_once == at_once
    _assert_near([out], [nsa_attention(*case.to(torch.float64).leaves, config, backend="reference")])


A100, B200 = (8, 0), (10, 0)
NO_PACKAGES = flash.lacking({})
HOPPER = ("sdpa-cudnn", "sdpa-flash", "sdpa-efficient", "sdpa-math")
OTHERS = ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "sdpa-math")

CHOICES = [
    # capability, what lacks, dtype, head dim, case, the candidates
    (H200, {}, BF16, 64, "square", ("flash-attn-4",)),
    (H200, NO_PACKAGES, BF16, 64, "square", HOPPER),
    (H200, {}, BF16, 64, "one row", OTHERS),
    (H200, {}, BF16, 264, "square", HOPPER),
    (A100, {}, BF16, 64, "square", ("flash-attn-2",)),
    (A100, NO_PACKAGES, BF16, 64, "square", OTHERS),
    (B200, {}, BF16, 136, "square", HOPPER),
    (None, {}, BF16, 64, "square", OTHERS),
    (H200, {}, BF16, 64, "band", ("flash-attn-4",)),
    (H200, NO_PACKAGES, BF16, 64, "band", ("torch-varlen",)),
    (A100, {}, torch.float16, 64, "band", ("flash-attn-2",)),
    (H200, {}, FP32, 64, "band", ("chunked",)),
    (H200, {}, BF16, 264, "band", ("chunked",)),
    ((7, 5), {}, BF16, 64, "band", ("chunked",)),
]

REFUSALS = [
    # kernel, capability, what lacks, dtype, head dim, case, why
    ("flash-attn-4", A100, {}, BF16, 64, "square", r"9\.0 to 11\.x, this one has 8\.0; use one of auto, sdpa"),
    ("flash-attn-4", H200, NO_PACKAGES, BF16, 64, "band", "flash-attn-4 is not installed .*: pip install flash-a"),
    ("torch-varlen", H200, {}, FP32, 64, "square", "it computes bfloat16 and float16, not float32; use one of auto$"),
    ("sdpa-cudnn", H200, {}, BF16, 64, "band", "neither windows nor several rows"),
    ("sdpa-flash", H200, {}, BF16, 512, "square", "head dims up to 256 there, not 512"),
    ("flash9", H200, {}, BF16, 64, "square", "use one of auto, sdpa-cudnn, sdpa-flash, flash-attn-4, flash-attn-2"),
]


@pytest.mark.parametrize(("capability", "lacks", "dtype", "width", "case", "expected"), CHOICES)
def test_the_fastest_usable_kernel_is_taken(capability, lacks, dtype, width, case, expected):
    assert dense.candidates("auto", case, Host(capability, lacks), dtype, width) == expected


@pytest.mark.parametrize(("kernel", "capability", "lacks", "dtype", "width", "case", "why"), REFUSALS)
def test_an_unusable_kernel_is_refused_with_the_reason(kernel, capability, lacks, dtype, width, case, why):
    with pytest.raises(BackendError, match=rf"^backend: '{kernel}': .*{why}"):
        dense.candidates(kernel, case, Host(capability, lacks), dtype, width)


def test_a_package_that_does_not_load_is_not_taken(monkeypatch):
    def version(package: str) -> str:
        if package == "flash-attn":
            return "2.8.3"
        raise PackageNotFoundError(package)

    monkeypatch.setattr(flash.metadata, "version", version)
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # its import raises ImportError
    lacks = flash._lacking.__wrapped__()
    assert lacks["flash-attn-2"].startswith("flash-attn 2.8.3 does not load: ")
    assert lacks["flash-attn-4"] == "flash-attn-4 is not installed on the GPU host: pip install flash-attn-4"
