"""The shape of a Native Sparse Attention (arXiv 2502.11089): block sizes, counts and the window."""

from dataclasses import dataclass, fields
from typing import Literal, get_args

from .errors import InputError

Compression = Literal["mean", "mlp"]
Slots = Literal["packed", "exact"]
_CHOICES = {"compress": get_args(Compression), "slots": get_args(Slots)}


@dataclass(frozen=True)
class NSAConfig:
    """Sizes in tokens, counts in blocks; the paper's symbol in brackets.

    Attributes:
        cmp_block: tokens that one compressed token covers [l].
        cmp_stride: distance between the starts of two compressed tokens [d]; divides cmp_block and slc_block.
        slc_block: tokens of a selection block [l']; at least cmp_block.
        slc_count: blocks selected per query and kv head, the forced ones included [n].
        init_blocks: first blocks of the sequence, always selected.
        local_blocks: last blocks, the query's own included, always selected.
        window: tokens that the window branch sees, the query's own included [w].
        compress: "mean", or "mlp" for the layer's learned compression.
        slots: outputs and gradients of selected blocks on their way to their sum: "packed" into 12 bits a number where
            the kernels can, with an error of up to 2^-11 of the largest of 32 columns (kernels/shared/packed_slots.py),
            which is more than bf16's for columns far smaller than others; "exact" in q's dtype.

    Raises:
        InputError: a value is not a valid size, or sizes do not fit together.
    """

    cmp_block: int = 32
    cmp_stride: int = 16
    slc_block: int = 64
    slc_count: int = 16
    init_blocks: int = 1
    local_blocks: int = 2
    window: int = 512
    compress: Compression = "mean"
    slots: Slots = "packed"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if (known := _CHOICES.get(field.name)) is not None:
                if value not in known:
                    quoted = " or ".join(f'"{name}"' for name in known)
                    raise InputError(field.name, repr(value), f"use {quoted}")
                continue
            least = 0 if field.name in ("init_blocks", "local_blocks") else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(field.name, repr(value), f"use a whole number >= {least}")
        for name in ("cmp_block", "slc_block"):
            size = getattr(self, name)
            if size % self.cmp_stride:
                raise InputError("cmp_stride", self.cmp_stride, f"use a divisor of {name} = {size}")
        if self.cmp_block > self.slc_block:
            raise InputError("cmp_block", self.cmp_block, f"use at most slc_block = {self.slc_block}")
        forced = self.init_blocks + self.local_blocks
        if forced > self.slc_count:
            fix = f"use at least init_blocks + local_blocks = {forced}: forced blocks count among the selected"
            raise InputError("slc_count", self.slc_count, fix)

    @property
    def free_blocks(self) -> int:
        """Blocks that a query chooses by score."""
        return self.slc_count - self.init_blocks - self.local_blocks

    def cmp_tokens(self, seq_len: int) -> int:
        """Compressed tokens of a sequence of `seq_len` tokens; as many are visible to a query at seq_len - 1."""
        return max(0, (seq_len - self.cmp_block) // self.cmp_stride + 1)

    def slc_blocks(self, seq_len: int) -> int:
        """Selection blocks of a sequence of `seq_len` tokens, the last one possibly partial."""
        return -(-seq_len // self.slc_block)
