"""The layer on a CUDA device: gradients of every parameter, those of the learned compression among them."""

from copy import deepcopy

import torch

from nsa_core import NSAConfig
from nsa_core.layer import NativeSparseAttention


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
