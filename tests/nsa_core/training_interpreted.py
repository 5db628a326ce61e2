"""The kernels of compiled training in Triton's interpreter: heads, SwiGLU, norms, the loss, against PyTorch's own."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from nsa_core import NativeSparseAttention, layer, loss, model
from nsa_core.kernels._launch import Started, observe
from nsa_core.model import PRESETS, ModelConfig, NSATransformer, SwiGLU, add_norm

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="the interpreter is for machines without a GPU: see tests/gpu"
    ),
]


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if training were compiled for a GPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for module in (layer, loss, model):
        monkeypatch.setattr(module, "in_compiled_training", lambda x: True)
    from nsa_core.kernels import heads, norm, swiglu  # noqa: F401  Kernels are made for the interpreter when first imported.


def of(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def are_near(got: list[Tensor], want: list[Tensor], within: float) -> bool:
    """Whether all are, relative to those wanted; NaN never is."""
    pairs = zip(got, want, strict=True)
    return all(x.shape == y.shape and (x.double() - y).norm() <= within * y.norm() for x, y in pairs)


def kernels(started: list[Started]) -> set[str]:
    return {one.kernel for one in started}


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 1, 16), (6, 2, 12), (3, 3, 64)])
def test_heads_apart_compressed_and_their_gradients(
    heads: int, kv_heads: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the layer's own way has them, in float64."""

    def project(attention: NativeSparseAttention, x: Tensor) -> list[Tensor]:
        q, keys, values, gates = attention._project(x, 0)
        results = [q, *keys, *values, gates, *attention._compress(keys[0], values[0], 0)]
        dy = [of(i, *y.shape).to(y.dtype) for i, y in enumerate(results)]
        return results + list(torch.autograd.grad(results, [x, *list(attention.parameters())[:-1]], dy))

    torch.manual_seed(0)
    attention, x = NativeSparseAttention(24, heads, kv_heads, head_dim), of(1, 2, 37, 24).requires_grad_()
    torch.nn.init.normal_(attention.gate_proj.bias)
    with observe() as started:
        got = project(attention, x)
    assert kernels(started) == {"_heads", "_mean", "_spread"}
    monkeypatch.setattr(layer, "in_compiled_training", lambda x: False)
    want = project(attention.double(), x.detach().double().requires_grad_())
    assert are_near(got, want, 1e-6)


@pytest.mark.parametrize(("tokens", "hidden"), [(1, 4), (37, 52), (5, 1024)])
def test_swiglu_and_its_gradients(tokens: int, hidden: int) -> None:
    torch.manual_seed(0)
    layer, x, dy = SwiGLU(24, hidden), of(1, 2, tokens, 24).requires_grad_(), of(2, 2, tokens, 24)
    leaves = [x, *layer.parameters()]
    with observe() as started:
        got = [layer(x), *torch.autograd.grad(layer(x), leaves, dy)]
    assert kernels(started) == {"_swiglu", "_swiglu_backward"}
    wide = layer.double()
    y = wide.down(nn.functional.silu(wide.gate(x.double())) * wide.up(x.double()))
    want = [y, *torch.autograd.grad(y, [x, *wide.parameters()], dy.double())]
    assert are_near(got, want, 1e-6)


def test_columns_of_padding_are_no_part_of_swiglu() -> None:
    torch.manual_seed(0)
    layer, x = SwiGLU(8, 6), of(1, 2, 5, 8)
    want = layer.down(nn.functional.silu(layer.gate(x)) * layer.up(x))
    torch.testing.assert_close(layer(x), want)


NORM = {"_add_norm", "_add_norm_backward"}


def norm_of(dim: int) -> nn.RMSNorm:
    """With weights of their own."""
    norm = nn.RMSNorm(dim, eps=1e-6)
    nn.init.normal_(norm.weight)
    return norm


@pytest.mark.parametrize(("tokens", "dim"), [(1, 24), (37, 52), (601, 768)])  # 601: a program has more than one turn
@pytest.mark.parametrize("reads_on", [False, True], ids=["last", "read on"])
def test_added_and_normalised_and_the_gradients(tokens: int, dim: int, reads_on: bool) -> None:
    """As RMSNorm of the sum has them, in float64; the last norm's sum is read by nobody else."""
    torch.manual_seed(0)
    norm, x, delta = norm_of(dim), (3 * of(1, 2, tokens, dim)).requires_grad_(), of(2, 2, tokens, dim).requires_grad_()
    dy = [of(3, 2, tokens, dim), of(4, 2, tokens, dim)][not reads_on :]
    with observe() as started:
        total, normed = add_norm(x, delta, norm)
        got = torch.autograd.grad([total, normed][not reads_on :], [x, delta, norm.weight], dy)
    assert kernels(started) == NORM
    wide = [y.detach().double().requires_grad_() for y in (x, delta)]
    norm, exact = norm.double(), wide[0] + wide[1]
    want = [exact, norm(exact)]
    grads = torch.autograd.grad(want[not reads_on :], [*wide, norm.weight], [y.double() for y in dy])
    assert are_near([total, normed, *got], [*want, *grads], 1e-6)


def test_a_gradient_of_the_sum_alone_is_passed_on() -> None:
    torch.manual_seed(0)
    norm, x, delta, dy = norm_of(24), of(1, 5, 24).requires_grad_(), of(2, 5, 24).requires_grad_(), of(3, 5, 24)
    dx, ddelta, dweight = torch.autograd.grad(add_norm(x, delta, norm)[0], [x, delta, norm.weight], dy)
    assert torch.equal(dx, dy)
    assert torch.equal(ddelta, dy)
    assert not dweight.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    """The stream and its gradient are float32, what a branch gives and reads, and its gradient, are not.

    To within the last bit: the interpreter cuts off bfloat16 where a device rounds.
    """
    torch.manual_seed(0)
    norm, x, delta = norm_of(52), of(1, 9, 52).requires_grad_(), of(2, 9, 52).to(dtype).requires_grad_()
    dy = [of(3, 9, 52), of(4, 9, 52).to(dtype)]
    with torch.autocast("cpu", dtype), observe() as started:
        total, normed = add_norm(x, delta, norm)
    dx, ddelta, dweight = torch.autograd.grad([total, normed], [x, delta, norm.weight], dy)
    assert kernels(started) == {"_add_norm"}
    wide = [y.detach().double().requires_grad_() for y in (x, delta)]
    norm, exact = norm.double(), wide[0] + wide[1]
    want = torch.autograd.grad([exact, norm(exact)], [*wide, norm.weight], [y.double() for y in dy])
    assert [y.dtype for y in (total, dx, dweight)] == [torch.float32] * 3
    assert are_near([total, dx, dweight], [exact, want[0], want[2]], 1e-6)
    for half, y in ((normed, norm(exact)), (ddelta, want[1])):
        torch.testing.assert_close(half, y.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("other", [torch.float64, torch.bfloat16])
def test_a_stream_that_is_not_float32_has_no_kernel(other: torch.dtype) -> None:
    norm, x, delta = norm_of(24).to(other), of(1, 5, 24).to(other), of(2, 5, 24).to(other)
    with observe() as started:
        total, normed = add_norm(x, delta, norm)
    assert started == []
    assert torch.equal(total, x + delta)
    assert torch.equal(normed, norm(total))


def step(config: ModelConfig, compiled: bool = False) -> tuple[list[Tensor], list[str]]:
    """Loss and gradients in half precision, and the norms' kernels."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, tokens = NSATransformer(config).train(), torch.arange(42).reshape(2, 21)
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    with observe() as started:
        with torch.autocast("cpu", torch.bfloat16):
            value = call(tokens[:, :-1], tokens[:, 1:])
        value.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    return [value.detach(), *gradients], sorted(one.kernel for one in started if one.kernel in NORM)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_model_adds_in_all_norms_but_the_first(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled or not, and checkpointed, where each block keeps one tensor, in the second norm of each."""
    config = replace(PRESETS["tiny"], attention=attention)  # type: ignore[arg-type]
    saving = replace(config, checkpointing=True)
    found = [step(config), step(config, compiled=True), step(saving), step(saving, compiled=True)]
    adds, backs = config.layers * ["_add_norm"], config.layers * ["_add_norm_backward"]
    assert [ran for _, ran in found] == [2 * adds + 2 * backs] * 2 + [2 * adds + backs] * 2  # saving: once more each
    for module in (layer, loss, model):
        monkeypatch.setattr(module, "in_compiled_training", lambda x: False)
    found.append(step(config))
    assert found[-1][1] == []
    for (one, _), (other, _) in pairwise(found):
        assert are_near(one, [x.double() for x in other], 0.05)


@pytest.mark.parametrize("vocabulary", [3, 256, 8200])  # 8200: more than a tile
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_the_loss_and_its_gradients(vocabulary: int, spread: float) -> None:
    x, weight = of(0, 13, 16).requires_grad_(), (spread * of(1, vocabulary, 16)).requires_grad_()
    targets = torch.randint(vocabulary, (13,), generator=torch.Generator().manual_seed(2))
    targets[3], targets[4] = 0, vocabulary - 1
    with observe() as started:
        value = loss.head_cross_entropy(x, weight, targets, rows=5)
    assert kernels(started) == {"_cross_entropy"}
    got = [value.detach(), *torch.autograd.grad(value, (x, weight), torch.tensor(2.0))]
    wide = [y.detach().double().requires_grad_() for y in (x, weight)]
    value = nn.functional.cross_entropy(wide[0] @ wide[1].T, targets)
    want = [value.detach(), *torch.autograd.grad(value, wide, torch.tensor(2.0).double())]
    assert are_near(got, want, 1e-5)


@pytest.mark.parametrize("wrong", [-100, 256])
def test_a_target_beyond_the_vocabulary_shows_in_the_loss(wrong: int) -> None:
    x, weight, targets = of(0, 13, 16).requires_grad_(), of(1, 256, 16), torch.zeros(13, dtype=torch.long)
    targets[7] = wrong
    assert loss.head_cross_entropy(x, weight, targets, rows=5) == torch.inf
