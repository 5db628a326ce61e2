"""Doors beside the operator on a CUDA device: a caller's blocks, a window, layers and their gradients, transformers."""

from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from nsa_core import NativeSparseAttention, NSAConfig, routes, selected_attention, window_attention
from nsa_core.transformers_attention import register

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAYOUTS = [(12, 2, 64, torch.bfloat16), (16, 4, 128, torch.bfloat16), (32, 2, 128, torch.float16)]


def callers_blocks(tokens: int, kv_heads: int, count: int, size: int) -> Tensor:
    """A random choice [1,tokens,kv_heads,count], ascending, of blocks at or before each query's own."""
    generator = torch.Generator("cuda").manual_seed(3)
    blocks, own = -(-tokens // size), torch.arange(tokens, device="cuda")[:, None, None] // size
    scores = torch.rand(tokens, kv_heads, blocks, generator=generator, device="cuda")
    scores = scores.masked_fill(torch.arange(blocks, device="cuda") > own, -1)
    best = scores.topk(count, dim=-1)
    chosen = best.indices.masked_fill(best.values < 0, blocks).sort(dim=-1).values
    return chosen.masked_fill(chosen == blocks, -1).int()[None]


def with_gradients(attend, leaves: list[Tensor]) -> list[Tensor]:
    out = attend(*leaves)
    towards = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda").to(out.dtype)
    return [out, *torch.autograd.grad(out, leaves, towards)]


def assert_as_exact_as_eager(attend, leaves: list[Tensor]) -> None:
    """Output and gradients of the kernels have at most twice an eager run's distance from float64."""
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    exact = with_gradients(lambda *x: attend(*x, backend="naive"), doubles)
    eager = with_gradients(lambda *x: attend(*x, backend="naive"), leaves)
    ours = with_gradients(lambda *x: attend(*x, backend="triton"), leaves)
    for x, plain, want in zip(ours, eager, exact, strict=True):
        assert (x.double() - want).norm() <= 2 * (plain.double() - want).norm() + 1e-6 * want.norm()


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "dtype"), LAYOUTS)
def test_a_callers_blocks_are_attended(make_case, heads, kv_heads, dim, dtype):
    case = make_case(1500, heads, kv_heads, dim, dtype)
    blocks = callers_blocks(1500, kv_heads, 5, 64)

    def attend(q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
        return selected_attention(q, k, v, blocks, backend=backend)

    assert_as_exact_as_eager(attend, case.leaves[:3])


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "dtype"), LAYOUTS)
def test_a_window_is_attended(make_case, heads, kv_heads, dim, dtype):
    case = make_case(1500, heads, kv_heads, dim, dtype)

    def attend(q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
        return window_attention(q, k, v, 300, backend=backend)

    assert_as_exact_as_eager(attend, case.leaves[:3])


@pytest.mark.parametrize("compression", ["mean", "mlp"])
def test_a_layer_takes_packed_documents_as_each_alone(compression):
    torch.manual_seed(0)
    layer = NativeSparseAttention(128, 12, 2, 64, NSAConfig(compress=compression)).cuda().bfloat16()
    x = torch.randn(1, 3000, 128, device="cuda", dtype=torch.bfloat16)
    bounds = [0, 700, 700, 1725, 3000]
    with torch.no_grad():
        packed = layer(x, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
        alone = torch.cat([layer(x[:, a:b]) for a, b in pairwise(bounds) if a < b], 1)
    assert (packed - alone).norm() <= 1e-2 * alone.norm()


def test_transformers_attend_by_the_kernels(tmp_path):
    transformers = pytest.importorskip("transformers")
    register()
    torch.manual_seed(0)
    sizes = {"hidden_size": 768, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 12}
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=4096, **sizes)
    config._attn_implementation = "nsa"
    llama = transformers.LlamaForCausalLM(config).cuda().bfloat16()
    tokens = torch.randint(64, (2, 1500), device="cuda")
    with routes.capture() as taken:
        loss = llama(tokens, labels=tokens).loss
        loss.backward()
    assert "triton" in str(taken)
    exact = llama.double()(tokens, labels=tokens).loss
    assert abs(loss.item() - exact.item()) < 2e-2 * exact.item()
    made = llama.bfloat16().eval().generate(tokens[:, :300], max_new_tokens=4, do_sample=False)
    assert made.shape == (2, 304)


def layer_and_input(config, tokens, backend):
    torch.manual_seed(0)
    layer = NativeSparseAttention(64, 12, 2, 64, config, backend=backend).cuda()
    for name in ("gate_proj.weight", "compress_k.place", "compress_v.place"):
        torch.nn.init.normal_(layer.get_parameter(name), std=0.3)
    return layer, torch.randn(1, tokens, 64, generator=torch.Generator("cuda").manual_seed(1), device="cuda")


def gradients(layer, x):
    """Output, and gradients of the input and of every parameter, by name."""
    x = x.detach().requires_grad_()
    out = layer(x)
    weights = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(2), device="cuda").to(out.dtype)
    names = [name for name, _ in layer.named_parameters()]
    found = torch.autograd.grad(out, [x, *layer.parameters()], weights)
    return dict(zip(["out", "input", *names], [out.detach(), *found], strict=True))


def with_backend(layer, backend, dtype):
    other = deepcopy(layer).to(dtype)
    other.backend = backend
    return other


def test_learned_compression_in_float32_is_the_oracle():
    config = NSAConfig(cmp_block=8, cmp_stride=4, slc_block=16, slc_count=4, window=24, compress="mlp")
    layer, x = layer_and_input(config, 333, "triton")
    exact = gradients(with_backend(layer, "reference", torch.float64), x.double())
    ours = gradients(layer, x)
    assert {"compress_k.place", "compress_v.up.weight", "compress_k.down.bias"} <= ours.keys()
    for name, want in exact.items():
        assert (ours[name] - want).norm() < 1e-4 * want.norm(), name


def test_learned_compression_in_half_precision_is_as_good_as_an_eager_run():
    """1,001 tokens: every block is selected, so that rounding cannot change the choice."""
    layer, x = layer_and_input(NSAConfig(compress="mlp"), 1001, "triton")
    half = layer.to(torch.bfloat16)
    exact = gradients(with_backend(half, "naive", torch.float64), x.bfloat16().double())
    eager = gradients(with_backend(half, "naive", torch.bfloat16), x.bfloat16())
    for name, got in gradients(half, x.bfloat16()).items():
        want = exact[name]
        assert (got - want).norm() <= 2 * (eager[name] - want).norm(), name
