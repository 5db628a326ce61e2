"""A sequence that several ranks have together gives the values and gradients that one rank computes."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from nsa_core import InputError, NSAConfig, NSATransformer, dense_attention, nsa_attention
from nsa_core.context_parallel import share
from nsa_core.layer import NativeSparseAttention
from nsa_core.model import PRESETS

RANKS, LENGTH = 2, 48
SMALL = NSAConfig(cmp_block=8, cmp_stride=4, slc_block=8, slc_count=4, window=10)


def same_as_one_rank(attention: Any, weights: list[Tensor], **whole: Tensor) -> None:
    """Compare `attention(group, **tensors)` [B,S,..] of the ranks' shares with that of the whole sequences."""
    group = dist.group.WORLD
    assert group is not None
    shares = {name: share(x, group) for name, x in whole.items()}
    inputs = [
        {name: x.clone().requires_grad_(x.is_floating_point()) for name, x in each.items()} for each in (whole, shares)
    ]
    one, mine = attention(None, **inputs[0]), attention(group, **inputs[1])
    torch.testing.assert_close(mine, share(one, group), rtol=1e-10, atol=1e-12)
    dout = torch.randn(one.shape, dtype=one.dtype, generator=torch.Generator().manual_seed(1))
    sides = [[x for x in each.values() if x.requires_grad] for each in inputs]
    expected = torch.autograd.grad(one, [*sides[0], *weights], dout)
    gradients = torch.autograd.grad(mine, [*sides[1], *weights], share(dout, group))
    for number, (found, wanted) in enumerate(zip(gradients, expected, strict=True)):
        if number < len(sides[0]):
            wanted = share(wanted, group)
        else:
            dist.all_reduce(found)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


def compare_all(rank: int, rendezvous: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(2, LENGTH, *shape, dtype=torch.float64, generator=random)

    sides = {"q": draw(4, 8), "k": draw(2, 8), "v": draw(2, 6), "gates": draw(4, 3).sigmoid()}
    same_as_one_rank(lambda group, **x: nsa_attention(**x, config=SMALL, group=group), [], **sides)
    gates = sides.pop("gates")
    same_as_one_rank(lambda group, **x: dense_attention(**x, group=group), [], **sides)
    for compress, branches in (("mean", ("cmp", "slc", "win")), ("mlp", ("cmp", "slc", "win")), ("mean", ("slc",))):
        torch.manual_seed(0)
        layer = NativeSparseAttention(24, 4, 2, 8, replace(SMALL, compress=compress), branches=branches).double()

        def attend(group: Any, x: Tensor, layer: Any = layer) -> Tensor:
            layer.group = group
            return layer(x)

        same_as_one_rank(attend, list(layer.parameters()), x=draw(24))
    for attention in ("nsa", "dense"):
        torch.manual_seed(0)
        model = NSATransformer(replace(PRESETS["tiny"], attention=attention)).double()

        def logits(group: Any, tokens: Tensor, model: Any = model) -> Tensor:
            model.share_sequences(group)
            return model(tokens)

        same_as_one_rank(logits, list(model.parameters()), tokens=torch.randint(256, (2, LENGTH), generator=random))
    group = dist.group.WORLD
    with pytest.raises(InputError, match=r"^group: 2 ranks for 46 tokens: give sequences of a multiple of 4 tokens$"):
        share(draw(4, 8)[:, :46], group)
    attend = partial(nsa_attention, config=SMALL, group=group)
    with pytest.raises(InputError, match=r"^group: 2 ranks for 94 tokens"):
        attend(*(sides[name][:, :47] for name in ("q", "k", "v")), gates[:, :47])
    with pytest.raises(InputError, match=r"^k: 48 tokens: give the 24 of q's share"):
        attend(sides["q"][:, :24], sides["k"], sides["v"], gates[:, :24])
    with pytest.raises(InputError, match=r"^group: 2 ranks: leave out cu_seqlens: packed"):
        attend(*(sides[name][0] for name in ("q", "k", "v")), gates[0], cu_seqlens=torch.tensor([0, LENGTH]).int())
    with pytest.raises(InputError, match=r"^k: .* float32"):
        attend(sides["q"], sides["k"].float(), sides["v"], gates)
    for empty in (slice(0), (slice(None), slice(0))):
        nothing = attend(*(sides[name][empty] for name in ("q", "k", "v")), gates[empty])
        assert nothing.shape == (*sides["q"][empty].shape[:3], 6)
        layer.group = group
        assert layer(draw(24)[empty]).numel() == 0
    with pytest.raises(InputError, match=r"^group: 2 ranks: leave out cache and cu_seqlens"):
        model(torch.zeros(1, 4, dtype=torch.long), cache=model.new_cache())
    dist.destroy_process_group()


def test_two_ranks_give_what_one_does(tmp_path: Path) -> None:
    mp.spawn(compare_all, (tmp_path / "rendezvous",), nprocs=RANKS)
