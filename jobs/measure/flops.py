"""Model FLOPs of training."""

from __future__ import annotations

from nsa_core.model import ModelConfig


def training_flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """FLOPs per token of a training step, without recomputation.

    Six for every weight of a matrix product (two forward, four backward; none for embedding look-ups), and twelve per
    layer, query head, head dimension and key that the query attends to, on average over the sequence (arXiv 2204.02311,
    appendix B, with the keys that causal or sparse attention really visits). A learned compression is not counted.
    """
    heads = config.heads * config.head_dim
    pairs, gates = (3, 3 * config.heads) if config.attention == "nsa" else (1, 0)  # NSA: keys and values per branch
    projections = config.dim * (2 * heads + 2 * pairs * config.kv_heads * config.head_dim + gates)
    weights = config.layers * (projections + 3 * config.dim * config.ffn_dim) + config.vocab_size * config.dim
    return 6 * weights + 12 * config.layers * heads * visited_keys(config, seq_len)


def visited_keys(config: ModelConfig, seq_len: int) -> float:
    """Average number of keys that a query attends to: t+1 at position t for dense, the sum of the branches' for NSA.

    The query's own block is assumed to be selected, and counts up to the query.
    """
    if config.attention == "dense":
        return (seq_len + 1) / 2
    nsa = config.nsa
    reach = nsa.slc_count * nsa.slc_block
    total = sum(
        nsa.cmp_tokens(t) + min(t, reach - -t % nsa.slc_block) + min(t, nsa.window) for t in range(1, seq_len + 1)
    )
    return total / seq_len
