"""Native Sparse Attention in models of Hugging Face's transformers: `attn_implementation="nsa"`."""

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from .config import NSAConfig
from .errors import InputError
from .functional import nsa_attention
from .packed_sequences import require

# Arguments of attention that NSA lacks: a model that sets one would be computed wrongly.
_UNKNOWN = ("attention_dropout", "sliding_window", "softcap", "s_aux", "position_bias")


def register(config: NSAConfig | None = None, *, name: str = "nsa", backend: str | Mapping[str, str] = "auto") -> None:
    """Let `attn_implementation=name` attend by nsa_attention, in every causal model that takes its attention by name.

    The model's own are weights, RoPE, cache, training and generation. Keys are compressed after their rotation, anew in
    each decoding step. Gates are those of `add_gates`, or 1/3 each. Sequences may be packed, as
    DataCollatorWithFlattening(return_flash_attn_kwargs=True) does.

    Raises:
        ImportError: transformers is not installed. Of the model's passes, InputError: padding or dropout is asked for,
            sequences are packed without their bounds, the cache is static, or the model's attention is another one than
            softmax over all positions up to the query's.
    """
    from transformers import AttentionInterface, AttentionMaskInterface  # pyright: ignore[reportMissingImports]
    from transformers.masking_utils import flash_attention_mask  # pyright: ignore[reportMissingImports]

    sizes = config or NSAConfig()

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        scaling: float | None = None, dropout: float = 0.0, **more: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        if attention_mask is not None:
            fix = "pad nothing: give sequences of one length, or pack them"
            raise InputError("attention_mask", list(attention_mask.shape), fix)
        if not (getattr(module, "is_causal", True) and more.get("is_causal", True) is not False):
            raise InputError("is_causal", False, "use another attention: nsa sees only positions up to the query's")
        if kinds := getattr(getattr(module, "config", None), "layer_types", None):
            kind = kinds[cast(int, module.layer_idx)]
            if kind != "full_attention":  # their masks, of windows and chunks, are not handed on
                raise InputError("layer_types", kind, "use another attention: nsa sees all earlier positions")
        for field, given in {"attention_dropout": dropout or None, **more}.items():
            if field in _UNKNOWN and given is not None:
                raise InputError(field, given, "leave it out of the model's config: nsa has none")
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # [B,S,H,D]
        made = getattr(module, "nsa_gates", None)
        gates = q.new_full((*q.shape[:3], 3), 1 / 3) if made is None else torch.sigmoid(made(q))
        bounds, positions = more.get("cu_seq_lens_q"), more.get("position_ids")
        if bounds is None:
            if positions is not None and positions.ndim == 2:  # other attentions take sequences to be packed by them
                fix = "give their bounds, too: DataCollatorWithFlattening(return_flash_attn_kwargs=True)"
                require((positions[:, 1:] != 0).all(), "position_ids", "packed sequences", fix)
                fix = "use a cache that grows: a static one has keys that no token has written"
                require((positions[:, -1] + 1 >= key.shape[2]).all(), "cache", f"{key.shape[2]} keys", fix)
            return nsa_attention(q, k, v, gates, sizes, scale=scaling, backend=backend), None
        q, k, v, gates = (x.flatten(0, 1) for x in (q, k, v, gates))
        out = nsa_attention(q, k, v, gates, sizes, cu_seqlens=bounds, scale=scaling, backend=backend)
        return out[None], None

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, flash_attention_mask)  # None where nothing is padded


def add_gates(model: nn.Module) -> nn.Module:
    """Give every attention with a `q_proj` of its own gates, a linear map of each query head; returns the model.

    They begin at 1/3 each, as without them. Weights that are loaded before have none.
    """
    for module in model.modules():
        if isinstance(projection := getattr(module, "q_proj", None), nn.Linear):
            weight = projection.weight
            gates = nn.Linear(cast(int, module.head_dim), 3, device=weight.device, dtype=weight.dtype)
            nn.init.zeros_(gates.weight)
            nn.init.constant_(gates.bias, -math.log(2))
            module.nsa_gates = gates
    return model
