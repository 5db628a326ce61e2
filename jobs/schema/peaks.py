"""Published peaks of GPUs. Imports nothing, so that every package can use it."""

from __future__ import annotations

# Dense (not sparse) bf16 tensor-core FLOP/s by the name the driver gives. Sources: NVIDIA's data sheets "A100 Tensor
# Core GPU" (312), "H100 Tensor Core GPU" (SXM 989.4, PCIe 756), "H200 Tensor Core GPU" (SXM 989.4); if a
# sheet gives only the sparse figure, half of it. For other GPUs no MFU is reported.
BF16_PEAKS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989.4e12,
}

# Memory bandwidth [bytes/s], of the same sheets.
BANDWIDTHS = {
    "NVIDIA A100-SXM4-40GB": 1.555e12,
    "NVIDIA A100-SXM4-80GB": 2.039e12,
    "NVIDIA A100-PCIE-40GB": 1.555e12,
    "NVIDIA A100 80GB PCIe": 1.935e12,
    "NVIDIA H100 80GB HBM3": 3.35e12,
    "NVIDIA H100 PCIe": 2.0e12,
    "NVIDIA H200": 4.8e12,
}
