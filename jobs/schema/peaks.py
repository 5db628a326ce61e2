"""Published peaks of GPUs, and the least work of attention beside them. Imports no other package of ours."""

from collections.abc import Mapping
from typing import Any

# By the name the driver gives: dense (not sparse) bf16 tensor-core FLOP/s, and memory bandwidth [bytes/s]. Sources:
# NVIDIA's data sheets "A100 Tensor Core GPU", "H100 Tensor Core GPU", "H200 Tensor Core GPU"; if a sheet gives only the
# sparse figure, half of it. For other GPUs no MFU is reported.
_SHEETS = {
    "NVIDIA A100-SXM4-40GB": (312e12, 1.555e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 2.039e12),
    "NVIDIA A100-PCIE-40GB": (312e12, 1.555e12),
    "NVIDIA A100 80GB PCIe": (312e12, 1.935e12),
    "NVIDIA H100 80GB HBM3": (989.4e12, 3.35e12),
    "NVIDIA H100 PCIe": (756e12, 2.0e12),
    "NVIDIA H200": (989.4e12, 4.8e12),
}
BF16_PEAKS = {card: flops for card, (flops, _) in _SHEETS.items()}
BANDWIDTHS = {card: bandwidth for card, (_, bandwidth) in _SHEETS.items()}


def least_work(
    tokens: int,
    seq_len: int,
    heads: tuple[int, int, int],
    itemsize: int,
    *,
    backward: bool,
    nsa: Mapping[str, Any] | None = None,
) -> tuple[float, float]:
    """FLOP and bytes that a call cannot do without: two products with each key that a query must see, thrice with
    gradients; and reading q, k and v once. Keys of the window are taken to be among the selected ones.

    Args:
        tokens: of all sequences of the call together.
        heads: query heads, key and value heads, head dim.
        nsa: the sizes of NSA's blocks and window; None: dense causal attention.
    """
    query_heads, kv_heads, head_dim = heads
    keys = (seq_len + 1) / 2
    if nsa is not None:
        most = min(max(nsa["window"], nsa["slc_count"] * nsa["slc_block"]), seq_len)
        keys = most - most * (most - 1) / (2 * seq_len) + max(0, (seq_len / 2 - nsa["cmp_block"]) / nsa["cmp_stride"])
    products = 4 * (3 if backward else 1) * tokens * query_heads * head_dim * keys
    return products, tokens * head_dim * (query_heads + 2 * kv_heads) * itemsize
