"""Published peaks of GPUs. Imports nothing, so that every package can use it."""

from __future__ import annotations

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
