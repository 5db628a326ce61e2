"""The transformer: shapes, causality, checkpointing, learning."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from nsa_core.errors import InputError
from nsa_core.loss import IGNORED
from nsa_core.model import PRESETS, NSATransformer
from nsa_core.packed_sequences import document_bounds

TINY = PRESETS["tiny"]


def model_of(**changes: object) -> NSATransformer:
    torch.manual_seed(0)
    return NSATransformer(replace(TINY, **changes))  # type: ignore[arg-type]


def gradients(model: NSATransformer) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_m7c_has_the_parameters_that_its_name_says() -> None:
    with torch.device("meta"):
        model = NSATransformer(PRESETS["m7c_125m"])
    attention = 768 * (768 + 3 * 128 + 3 * 128 + 768) + (768 + 1) * 36
    layer = attention + 3 * 768 * 2_304 + 2 * 768
    assert sum(p.numel() for p in model.parameters()) == 50_304 * 768 + 12 * layer + 768 == 123_919_536


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@torch.no_grad()
def test_later_tokens_change_nothing_before_them(attention: str) -> None:
    model, tokens = model_of(attention=attention), torch.randint(256, (2, 90))
    changed = tokens.clone()
    changed[:, 60:] = (changed[:, 60:] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :60], after[:, :60])
    assert not torch.equal(before[:, 60:], after[:, 60:])


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the loss of 2 or 3 times 58 tokens run in chunks, the last one shorter."""
    monkeypatch.setattr("nsa_core.model.LOSS_ROWS", 50)


@pytest.mark.parametrize("ignored", [0, 40])
def test_gradients_of_the_loss_are_those_of_the_logits(few_rows: None, ignored: int) -> None:
    tokens = torch.randint(256, (2, 59))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    targets = targets.clone()
    targets[:, :ignored] = IGNORED
    chunked, whole = model_of().double(), model_of().double()
    loss = chunked(inputs, targets)
    torch.testing.assert_close(loss, cross_entropy(whole(inputs).flatten(0, 1), targets.flatten()))
    loss.backward()
    cross_entropy(whole(inputs).flatten(0, 1), targets.flatten()).backward()
    for actual, expected in zip(gradients(chunked), gradients(whole), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "changes", [{}, {"nsa": replace(TINY.nsa, compress="mlp"), "checkpointing": True}, {"attention": "dense"}]
)
def test_packed_documents_train_as_one_by_one(changes: dict[str, object]) -> None:
    """Losses of five steps in float32; documents also begin with each row, and may be of one token."""
    tokens, targets = torch.randint(1, 256, (2, 2, 90))
    tokens[0, [30, 31, 60]] = tokens[1, [5, 89]] = 0
    bounds = document_bounds(tokens, 0)
    assert bounds.tolist() == [0, 31, 32, 61, 90, 96, 180]
    documents = [x.flatten().split(bounds.diff().tolist()) for x in (tokens, targets)]
    packed, single = model_of(**changes).train(), model_of(**changes).train()
    losses: list[list[float]] = [[], []]
    for model, found in zip((packed, single), losses, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        for _ in range(5):
            if model is packed:
                loss = model(tokens, targets, bounds)
            else:
                each = [model(x[None], y[None]) * len(x) for x, y in zip(*documents, strict=True)]
                loss = torch.stack(each).sum() / tokens.numel()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] < losses[0][0]
    with pytest.raises(InputError, match=r"^cu_seqlens: \[7\]: leave it out: a cache holds a batch"):
        packed(tokens, None, bounds, cache=packed.new_cache())


@pytest.mark.parametrize("wrong", [-1, 256])
@pytest.mark.parametrize("grad", [False, True])
def test_a_target_beyond_the_vocabulary_shows_in_the_loss(wrong: int, grad: bool) -> None:
    tokens = torch.randint(256, (1, 20))
    targets = tokens.clone()
    targets[0, 7] = wrong
    with torch.set_grad_enabled(grad):
        assert model_of()(tokens, targets) == torch.inf


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_checkpointing_keeps_loss_and_gradients_to_the_bit(attention: str) -> None:
    tokens = torch.randint(256, (2, 71))
    plain, saving = model_of(attention=attention), model_of(attention=attention, checkpointing=True)
    losses = []
    for model in (plain, saving):
        losses.append(model(tokens[:, :-1], tokens[:, 1:]))
        losses[-1].backward()
    assert (plain.checkpointing_effective, saving.checkpointing_effective) == (False, True)
    assert torch.equal(*losses)
    assert len(gradients(plain)) == len(list(plain.parameters()))
    for expected, actual in zip(gradients(plain), gradients(saving), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layers": 0}, "layers"),
        ({"kv_heads": 3}, "kv_heads"),
        ({"attention": "sparse"}, "attention"),
        ({"attention": "dense", "backend": "naive"}, "backend"),
        ({"branches": ("win", "selected")}, "branches"),
        ({"attention": "dense", "branches": ("win",)}, "branches"),
    ],
)
def test_impossible_models_are_named(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InputError, match=f"^{field}: "):
        replace(TINY, **changes)  # type: ignore[arg-type]
