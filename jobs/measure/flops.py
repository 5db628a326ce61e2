"""Model FLOPs of training, and the peaks of the GPUs that publish one."""

from __future__ import annotations

from nsa_core.model import ModelConfig

# Dense (not sparse) bf16 tensor-core FLOP/s by the name the driver gives. Sources: NVIDIA's data sheets "A100 Tensor
# Core GPU" (312), "H100 Tensor Core GPU" (SXM 989.4, PCIe 756), "H200 Tensor Core GPU" (SXM 989.4); those
# that print only the sparse figure are halved. A GPU that is not listed has no peak here, and no MFU.
BF16_PEAKS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989.4e12,
}


def training_flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """FLOPs that one token of a training step needs, recomputation not counted.

    Six for every weight of a matrix product (two forward, four backward; embedding look-ups are none), and twelve per
    layer, query head, head dimension and key that the query attends to, on average over the sequence (arXiv 2204.02311,
    appendix B, with the keys that causal or sparse attention really visits). A learned compression is left out.
    """
    heads = config.heads * config.head_dim
    pairs, gates = (3, 3 * config.heads) if config.attention == "nsa" else (1, 0)  # NSA: keys and values per branch
    projections = config.dim * (2 * heads + 2 * pairs * config.kv_heads * config.head_dim + gates)
    weights = config.layers * (projections + 3 * config.dim * config.ffn_dim) + config.vocab_size * config.dim
    return 6 * weights + 12 * config.layers * heads * visited_keys(config, seq_len)


def visited_keys(config: ModelConfig, seq_len: int) -> float:
    """Keys that a query attends to on average: t+1 of dense attention, the three branches' of NSA.

    The query's own block is taken to be among the selected ones, and counts up to the query.
    """
    if config.attention == "dense":
        return (seq_len + 1) / 2
    nsa = config.nsa
    reach = nsa.slc_count * nsa.slc_block
    total = sum(
        nsa.cmp_tokens(t) + min(t, reach - -t % nsa.slc_block) + min(t, nsa.window) for t in range(1, seq_len + 1)
    )
    return total / seq_len
