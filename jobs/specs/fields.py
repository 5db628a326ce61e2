"""Spec fields that several kinds share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from jobs.specs.spec import Strict
from jobs.specs.validation import each_once
from nsa_core import NSAConfig
from nsa_core.backends import BACKENDS, WINDOW_BACKENDS, backend_names, dense
from nsa_core.model import ModelConfig

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
