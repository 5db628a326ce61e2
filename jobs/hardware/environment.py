"""Record of versions, hardware, and the environment variables that steer PyTorch and this project."""

import os
import platform
import re
import socket
import sys
from collections.abc import Mapping
from typing import Any

import torch

from jobs.hardware import nvml
from jobs.hardware.machine import cpu_name, installed

_PACKAGES = ("torch", "triton", "numpy", "flash-attn", "flash-attn-4", "ray", "nvidia-ml-py")
_VARIABLES = re.compile(
    r"^(NSA|ATEN|CUDA|CUDNN|PYTORCH|TORCH|TORCHDYNAMO|TORCHINDUCTOR|TRITON|NCCL|OMP|MKL|KMP|GOMP|MALLOC|CUBLAS|CUBLASLT)_"
    r"|^NVIDIA_(VISIBLE_DEVICES|TF32_OVERRIDE)$"
)
_SECRET = re.compile(r"TOKEN|PASSWORD|SECRET|WEBHOOK|PERSON|KEY|URL|CREDENTIAL", re.IGNORECASE)


def environment(device: torch.device) -> dict[str, Any]:
    """JSON-able description of this process's environment, for a point measured on `device`."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "interpreter": sys.executable,
        "packages": {name: version for name in _PACKAGES if (version := installed(name))},
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "arithmetic": {
            "matmul.fp32_precision": matmul.fp32_precision,
            "matmul.bf16_reduced_precision_reduction": matmul.allow_bf16_reduced_precision_reduction,
            "matmul.fp16_reduced_precision_reduction": matmul.allow_fp16_reduced_precision_reduction,
            "cudnn.conv.fp32_precision": cudnn.conv.fp32_precision,
            "cudnn.benchmark": cudnn.benchmark,
            "cudnn.deterministic": cudnn.deterministic,
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        },
        "variables": steering(os.environ),
    }
    if device.type == "cuda":
        found["cuda"] = torch.version.cuda
        found["cudnn"] = torch.backends.cudnn.version()
        found["gpu"] = _gpu(device)
    return found


def steering(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that steer PyTorch and this project; values that may be secret are withheld."""
    shown = {name: value for name, value in sorted(variables.items()) if _VARIABLES.match(name)}
    return {name: "(set, withheld)" if _SECRET.search(name) else value for name, value in shown.items()}


def _gpu(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    found: dict[str, Any] = {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_mib": properties.total_memory // 2**20,
    }
    uuid = str(getattr(properties, "uuid", ""))
    try:
        found |= nvml.describe(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
    except nvml.NvmlError as err:
        found["nvml"] = str(err)
    return found
