"""The kernels of compiled training in Triton's interpreter: heads, SwiGLU and the loss, against PyTorch's own."""

import pytest
import torch
from kernel_interpreter import MARKS
from torch import Tensor, nn

from nsa_core import NativeSparseAttention, layer, loss, model
from nsa_core.kernels.runtime.launch import Started, observe
from nsa_core.model import SwiGLU

pytestmark = MARKS


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that training is compiled for a GPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for module in (layer, loss, model):
        monkeypatch.setattr(module, "in_compiled_training", lambda x: True)
    from nsa_core.kernels.training import heads, swiglu  # noqa: F401  Kernels are made for the interpreter when first imported.


def of(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def are_near(got: list[Tensor], want: list[Tensor], within: float) -> bool:
    """Whether all tensors are near the wanted ones, by relative norm; false for NaN."""
    pairs = zip(got, want, strict=True)
    return all(x.shape == y.shape and (x.double() - y).norm() <= within * y.norm() for x, y in pairs)


def kernels(started: list[Started]) -> set[str]:
    return {one.kernel for one in started}


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 1, 16), (6, 2, 12), (3, 3, 64)])
def test_split_and_compressed_heads_and_their_gradients(
    heads: int, kv_heads: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the layer's plain PyTorch path, in float64."""

    def project(attention: NativeSparseAttention, x: Tensor) -> list[Tensor]:
        q, keys, values, gates = attention._project(x, torch.arange(x.shape[1]))
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


def test_swiglu_ignores_columns_of_padding() -> None:
    torch.manual_seed(0)
    layer, x = SwiGLU(8, 6), of(1, 2, 5, 8)
    want = layer.down(nn.functional.silu(layer.gate(x)) * layer.up(x))
    torch.testing.assert_close(layer(x), want)


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


@pytest.mark.parametrize("enabled", [True, False])
def test_an_ignored_target_has_no_part_in_the_loss(enabled: bool) -> None:
    x, weight = of(0, 13, 16).requires_grad_(), of(1, 256, 16).requires_grad_()
    targets = torch.randint(256, (13,), generator=torch.Generator().manual_seed(2))
    targets[:6] = targets[12] = loss.IGNORED
    with torch.set_grad_enabled(enabled):
        got = [value := loss.head_cross_entropy(x, weight, targets, rows=5)]
        none = loss.head_cross_entropy(x, weight, torch.full_like(targets, loss.IGNORED), rows=5)
    wide = [y.detach().double().requires_grad_() for y in (x, weight)]
    want = [nn.functional.cross_entropy(wide[0] @ wide[1].T, targets)]
    assert none == 0
    if enabled:
        got += torch.autograd.grad(value, (x, weight))
        want += torch.autograd.grad(want[0], wide)
        assert not got[1][:6].any()
    assert are_near([y.detach() for y in got], [y.detach() for y in want], 1e-5)


@pytest.mark.parametrize("wrong", [-1, 256])
def test_a_target_beyond_the_vocabulary_shows_in_the_loss(wrong: int) -> None:
    x, weight, targets = of(0, 13, 16).requires_grad_(), of(1, 256, 16), torch.zeros(13, dtype=torch.long)
    targets[7] = wrong
    assert loss.head_cross_entropy(x, weight, targets, rows=5) == torch.inf
