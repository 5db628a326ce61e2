"""The model of a spec: a preset by its name, or sizes of one's own."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, Field, model_validator

from jobs.specs.fields import NSA, Count, Layers, refuse_unknown
from jobs.specs.spec import JobSpec, Strict
from nsa_core import NSAConfig
from nsa_core.model import PRESETS, ModelConfig

MODELS: Mapping[str, ModelConfig] = {
    **PRESETS,
    # The seeds' small model: they give its width alone.
    "small_128": replace(PRESETS["m7c_125m"], dim=128, heads=2, kv_heads=1, ffn_dim=384),
}
BYTES = 256  # tokens of a text that is read as bytes


def _known(name: str) -> str:
    if name not in MODELS:
        raise ValueError(f"there is no such preset; use one of {', '.join(MODELS)}")
    return name


class ModelSpec(Strict):
    """Sizes of a model of one's own."""

    layers: Layers
    dim: Count = Field(description="width of the residual stream")
    heads: Count = Field(description="query heads")
    kv_heads: Count | None = Field(default=None, description="a divisor of heads; None: as many")
    head_dim: Count | None = Field(default=None, description="even; None: dim / heads")
    ffn_dim: Count | None = Field(
        default=None, description="hidden width of SwiGLU; None: 8/3 of dim, up to a multiple of 64"
    )
    vocab_size: Count | None = Field(
        default=None, description="None: what the text needs; to be given where there is none, as in estimate"
    )
    tied: bool = Field(default=True, description="whether the output head shares the embedding's weights")
    nsa: NSA | None = Field(default=None, description="None: the defaults")

    @model_validator(mode="before")
    @classmethod
    def _name_known_keys(cls, value: Any) -> Any:
        return refuse_unknown(value, cls.model_fields)

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.head_dim is None and self.dim % self.heads:
            raise ValueError(f"head_dim: missing; dim {self.dim} is no multiple of heads {self.heads}, so give it")
        self.config()
        return self

    def config(self) -> ModelConfig:
        """The model. Raises InputError."""
        return ModelConfig(
            vocab_size=self.vocab_size or BYTES,
            dim=self.dim,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads or self.heads,
            head_dim=self.head_dim or self.dim // self.heads,
            ffn_dim=self.ffn_dim or -(-8 * self.dim // 3 // 64) * 64,
            nsa=self.nsa or NSAConfig(),
            tie_embeddings=self.tied,
        )


class ModelChoice(Strict):
    """A preset, or a model of one's own; of some kinds instead of a model the shape of attention alone."""

    DEFAULT: ClassVar[str | None] = None  # the preset without any of them
    RANDOM_TOKENS: ClassVar[bool] = True  # whether no text tells the vocabulary

    preset: Annotated[str, AfterValidator(_known)] | None = Field(
        default=None,
        description=f"a model by its name: {', '.join(MODELS)}",
        json_schema_extra={"enum": [*MODELS, None]},
    )
    model: ModelSpec | None = Field(default=None, description="a model of one's own, instead of a preset")

    @model_validator(mode="after")
    def _check_one_model(self) -> Self:
        both = [name for name in ("preset", "model", "shape") if getattr(self, name, None) is not None]
        if len(both) > 1:
            raise ValueError(f"{both[0]}: {both[1]} is given as well; keep one of the two")
        if not both and self.DEFAULT is None:
            shape = ", or a shape" if "shape" in type(self).model_fields else ""
            raise ValueError(f"preset: missing; use one of {', '.join(MODELS)}, or give a model{shape}")
        if self.model is not None and isinstance(layers := getattr(self, "layers", None), int):
            raise ValueError(f"layers: {layers}: model has its own; leave it out, or set model.layers")
        whole = getattr(self, "workload", "model") == "model"
        if self.RANDOM_TOKENS and whole and self.model is not None and self.model.vocab_size is None:
            raise ValueError(f"model.vocab_size: missing: there is no text to tell it; give it, {BYTES} for bytes")
        if self.model is not None and self.model.nsa is not None and self.own_nsa is not self.model.nsa:
            raise ValueError("nsa: model has its own; keep one of the two")
        return self

    @property
    def own_nsa(self) -> NSAConfig | None:
        """The sizes of the sparse attention that the spec gives, if any."""
        return getattr(self, "nsa", None) or (self.model and self.model.nsa)

    @property
    def base(self) -> ModelConfig:
        """The model that is chosen."""
        return MODELS[self.preset or self.DEFAULT or ""] if self.model is None else self.model.config()

    @property
    def model_name(self) -> str:
        """The model in labels; of models of equal layers and width the digest differs."""
        if (own := self.model) is None:
            return self.preset or self.DEFAULT or ""
        return f"{own.layers}x{own.dim}-{zlib.crc32(repr(own.config()).encode()):08x}"


class ModelledSpec(ModelChoice, JobSpec):
    """Fields of the kinds that have a model."""

    nsa: NSA | None = Field(default=None, description="None: the model's")

    @property
    def base(self) -> ModelConfig:
        base = super().base
        return replace(base, nsa=self.nsa or base.nsa)
