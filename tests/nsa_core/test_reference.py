"""The oracle against the definition as scalar loops over positions, blocks and heads."""

import pytest
import torch
from torch import Tensor

from nsa_core import NSAConfig, nsa_attention, select_blocks

CONFIGS = [
    NSAConfig(8, 4, 8, 3, init_blocks=1, local_blocks=1, window=5),
    NSAConfig(4, 4, 8, 4, init_blocks=0, local_blocks=0, window=1),
    NSAConfig(12, 4, 16, 3, init_blocks=2, local_blocks=1, window=7),
    NSAConfig(4, 1, 4, 4, init_blocks=0, local_blocks=2, window=3),
]
LENGTH = 41


def attend(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Output and probabilities of one query over keys [T,D], values [T,D]."""
    p = torch.softmax(keys @ query / len(query) ** 0.5, 0)
    return p @ values, p


def chosen(scores: list[float], t: int, c: NSAConfig) -> list[int]:
    own = t // c.slc_block
    forced = [j for j in range(own + 1) if j < c.init_blocks or j > own - c.local_blocks]
    rest = sorted((j for j in range(own + 1) if j not in forced), key=lambda j: (-scores[j], j))
    return sorted(forced + rest[: c.slc_count - len(forced)])


def one_query(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, t: int, c: NSAConfig) -> tuple[Tensor, list[int]]:
    """Outputs [G,D] of a group's queries [G,D] at position t, and their selected blocks."""
    starts = [i for i in range(0, t + 1, c.cmp_stride) if i + c.cmp_block - 1 <= t]
    out, scores = torch.zeros_like(q), [0.0] * (t // c.slc_block + 1)
    for head in range(len(q)) if starts else ():
        short_k, short_v = (torch.stack([x[i : i + c.cmp_block].mean(0) for i in starts]) for x in (k, v))
        attended, p = attend(q[head], short_k, short_v)
        out[head] += gates[head, 0] * attended
        for i, share in zip(starts, p.tolist(), strict=True):
            for position in range(i, i + c.cmp_block):  # Eq. 9, token by token
                scores[position // c.slc_block] += share / c.cmp_stride
    blocks = chosen(scores, t, c)
    selected = [s for s in range(t + 1) if s // c.slc_block in blocks]
    recent = list(range(max(0, t - c.window + 1), t + 1))
    for head in range(len(q)):
        for branch, tokens in ((1, selected), (2, recent)):
            out[head] += gates[head, branch] * attend(q[head], k[tokens], v[tokens])[0]
    return out, blocks


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_reference_is_the_definition(config: NSAConfig) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, LENGTH, h, 6, generator=generator, dtype=torch.float64) for h in (4, 2, 2))
    gates = torch.rand(1, LENGTH, 4, 3, generator=generator, dtype=torch.float64)
    out, blocks = torch.zeros_like(q), torch.full((1, LENGTH, 2, config.slc_count), -1, dtype=torch.int32)
    for t in range(LENGTH):
        for head in range(2):
            group = slice(2 * head, 2 * head + 2)
            found, selected = one_query(q[0, t, group], k[0, :, head], v[0, :, head], gates[0, t, group], t, config)
            out[0, t, group] = found
            blocks[0, t, head, : len(selected)] = torch.tensor(selected)
    for rows in (LENGTH, 9):  # all queries, and the last ones alone
        last = (q[:, -rows:], k, v, gates[:, -rows:])
        actual = nsa_attention(*last, config, backend="reference")
        torch.testing.assert_close(actual, out[:, -rows:], rtol=1e-10, atol=1e-12)
        assert torch.equal(select_blocks(*last[:2], config, backend="reference"), blocks[:, -rows:])
