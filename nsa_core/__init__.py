"""Native Sparse Attention (arXiv 2502.11089): operators, layer, model, and predictions of their memory.

Imports torch only. Start at `nsa_attention`; `nsa_core.routes.capture` shows which kernels ran.
"""

from .backends import available_backends
from .config import NSAConfig
from .errors import BackendError, InputError
from .functional import (
    compress,
    dense_attention,
    nsa_attention,
    nsa_attn_varlen_func,
    select_blocks,
    selected_attention,
    window_attention,
)
from .layer import NativeSparseAttention
from .model import PRESETS, ModelConfig, NSATransformer

__version__ = "0.2.0"  # of both distributions: nsa-core and nsa-bench

__all__ = [
    "PRESETS",
    "BackendError",
    "InputError",
    "ModelConfig",
    "NSAConfig",
    "NSATransformer",
    "NativeSparseAttention",
    "available_backends",
    "compress",
    "dense_attention",
    "nsa_attention",
    "nsa_attn_varlen_func",
    "select_blocks",
    "selected_attention",
    "window_attention",
]
