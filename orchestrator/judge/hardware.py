"""The machines that a decision is about, and the points that were measured on them."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_validator

from jobs.schema.axes import MORE

_SLICE = " MIG "
_ARCHITECTURES = {"A100": "sm80", "H100": "sm90", "H200": "sm90", "B200": "sm100"}
RANKS = f"{MORE}ranks"  # the GPUs that a point was measured on; kinds that use one do not declare it


class Hardware(BaseModel):
    """A number of cards of one sort, or a CPU.

    Attributes:
        name: the part of a verdict's name after the slash.
        gpu: pattern of the card's name as the driver gives it; None: a CPU. A slice of a card (MIG), "NVIDIA H200 MIG
            1g.18gb", is the card only for a pattern that names MIG.
        gpus: cards in the machine; 0: a CPU.
        architecture: cards of the same one run the same kernels, e.g. "sm90".
        accelerator: Ray's accelerator type of the card.
        power: the card's usual power limit [W]; evidence of a lower one is doubtful.
        price: dollars for an hour of one GPU; None: not known.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, max_length=40, pattern=r"^[a-z0-9][a-z0-9-]*$")
    title: str = Field(min_length=1, max_length=80)
    gpu: str | None = Field(None, min_length=1)
    gpus: StrictInt = Field(ge=0)
    architecture: str | None = Field(None, min_length=1)
    accelerator: str | None = Field(None, min_length=1)
    power: StrictInt | None = Field(None, ge=1)
    price: float | None = Field(None, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _card_or_cpu(self) -> Self:
        if (self.gpus > 0) != (self.gpu is not None):
            raise ValueError("a machine with gpus has a gpu (a pattern of its name), and one without has none")
        for card, architecture in _ARCHITECTURES.items():
            if card in (self.gpu or "") and self.architecture not in (None, architecture):
                raise ValueError(f"architecture: {self.architecture!r}: {self.gpu!r} is {architecture}; write that")
        return self

    def measured(self, row: Mapping[str, Any], *, whole: bool = False) -> bool:
        """Whether a point (a row of v_metrics or v_points) was measured here: on one card, or on all (`whole`)."""
        if self.gpu is None:
            return bool(row["device"] == "cpu")
        return self.is_card(row["gpu"]) and (row.get(RANKS) or 1) == (self.gpus if whole else 1)

    def is_card(self, name: str | None) -> bool:
        """Whether `name`, as the driver gives it, is this card; None: a CPU."""
        if self.gpu is None or name is None:
            return self.gpu is name
        return fnmatchcase(name, self.gpu) and (_SLICE in self.gpu or _SLICE not in name)

    def akin(self, other: Hardware) -> bool:
        """Whether `other` is another card of the same architecture."""
        return None not in (self.gpu, self.architecture) and (
            other.architecture == self.architecture and other.gpu not in (None, self.gpu)
        )
