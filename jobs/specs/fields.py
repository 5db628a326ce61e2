"""Spec fields that several kinds share; among them the model, a preset by its name or sizes of one's own."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from jobs.specs.spec import JobSpec, Strict
from jobs.specs.validation import each_once
from nsa_core import NSAConfig
from nsa_core.backends import BACKENDS, WINDOW_BACKENDS, backend_names, dense
from nsa_core.model import PRESETS, ModelConfig

DType = Annotated[Literal["float32", "bfloat16", "float16"], Field(description="of the operands")]


def _nsa(value: Any) -> Any:
    """NSAConfig from a mapping, with an error that names the field, its value and the fix."""
    refuse_unknown(value, [field.name for field in fields(NSAConfig)])
    return NSAConfig(**value) if isinstance(value, Mapping) else value


def refuse_unknown(value: Any, known: Collection[str]) -> Any:
    """The value; of a mapping with other keys the error that names the known ones."""
    for key in value if isinstance(value, Mapping) else ():
        if key not in known:
            raise ValueError(f"{key}: unknown key (value {value[key]!r}); use {', '.join(known)}")
    return value


def _without_a_layer(nsa: NSAConfig) -> NSAConfig:
    if nsa.compress != "mean":
        raise ValueError(f"compress: {nsa.compress!r}: is learned by a layer; use mean")
    return nsa


# Implementations that are dense attention, and dense_attention's backend: the fastest kernel available, or one by name.
DENSE_KERNELS = {"dense": "auto"} | {f"dense-{name}": name for name in dense.KERNELS}
# Backends that compute the window branch and no other.
WINDOW_ALONE = tuple(name for name in WINDOW_BACKENDS if name not in BACKENDS)


def computes(backend: str, branch: str) -> bool:
    """Whether a backend computes a branch, or "all" of them."""
    return branch == "win" or backend not in WINDOW_ALONE


NSA = Annotated[NSAConfig, BeforeValidator(_nsa)]
BareNSA = Annotated[NSA, AfterValidator(_without_a_layer)]  # of an operator that no layer surrounds
Unique = AfterValidator(each_once)
T = TypeVar("T")
Several = Annotated[list[T], Field(min_length=1), Unique]  # each is measured


def names_among(what: str, *more: str, known: Callable[[], Iterable[str]] = backend_names) -> AfterValidator:
    """Check of a list of names: each is `known`, by default as a backend of the sparse operator, or one of `more`."""

    def check(names: list[str]) -> list[str]:
        for name in names:
            if name not in (all_names := [*known(), *more]):
                raise ValueError(f"{name!r} is no {what}; use {', '.join(all_names)}")
        return names

    return AfterValidator(check)


# Bounds far beyond any machine, so that a typing mistake is refused at once.
MOST = 2**20
Count = Annotated[int, Field(ge=1, le=MOST)]
Batch = Annotated[Count, Field(description="sequences of a pass")]
Layers = Annotated[int, Field(ge=1, le=2**12)]
Length = Annotated[int, Field(ge=1, le=2**27)]  # tokens of a sequence
Large = Annotated[int, Field(ge=1, le=2**40)]  # steps, or tokens in all

Pass = Literal["forward", "forward+backward"]
_OF_NSA = f"of NSA: {', '.join(BACKENDS)}, or one of another distribution"
Implementations = Annotated[
    Several[str],
    Field(description=f"{_OF_NSA}; dense attention: {', '.join(DENSE_KERNELS)}"),
    names_among("implementation", *DENSE_KERNELS),
]
Backends = Annotated[
    Several[str],
    Field(description=f"{_OF_NSA}; of the window alone: {', '.join(WINDOW_ALONE)}"),
    names_among("implementation", *WINDOW_ALONE),
]
OrDense = Annotated[
    Several[str],
    Field(description=f"{_OF_NSA}; dense"),
    names_among("implementation", "dense"),
]
Passes = Annotated[Several[Pass], Field(description="each is measured")]
Lengths = Annotated[Several[Length], Field(description="tokens of a sequence")]


class HeadsSpec(Strict):
    """Heads of the attention."""

    query_heads: Count
    kv_heads: Count = Field(description="a divisor of query_heads")
    head_dim: Count = Field(description="even")

    @model_validator(mode="after")
    def _check_room(self) -> HeadsSpec:
        if self.query_heads % self.kv_heads:
            raise ValueError(f"kv_heads: {self.kv_heads}: use a divisor of query_heads = {self.query_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: {self.head_dim}: use an even number: RoPE turns pairs")
        return self

    @classmethod
    def of(cls, model: ModelConfig) -> HeadsSpec:
        return cls(query_heads=model.heads, kv_heads=model.kv_heads, head_dim=model.head_dim)

    def __str__(self) -> str:
        return f"{self.query_heads}/{self.kv_heads} heads of {self.head_dim}"


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
