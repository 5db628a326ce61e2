"""What an attention operator allocates, forward and backward, written down tensor by tensor beside the code it follows.

Every function names the code that it accounts for. Tensors below a thousandth of the whole (positions, offsets) are
left out. Sizes in bytes; symbols as in the operators: B batch, S tokens, Hq and Hkv heads, D head dim, Nc compressed
tokens, P one branch's scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from ._ledger import Ledger
from .backends import _chunks
from .config import NSAConfig
from .errors import InputError
from .routes import Branch

BRANCHES: tuple[Branch, ...] = ("cmp", "slc", "win")
ACCOUNTS = ("chunked", "naive", "reference", "dense")  # what `footprint` knows


@dataclass(frozen=True)
class Sizes:
    """The tensors of one call."""

    batch: int
    seq_len: int
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def element(self) -> int:
        return self.dtype.itemsize

    @property
    def wide(self) -> int:
        """Bytes of what softmax and sums run in."""
        return max(4, self.element)

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_len

    @property
    def q(self) -> int:
        """[B,S,Hq,D]: queries, and the output."""
        return self.tokens * self.heads * self.dim * self.element

    @property
    def kv(self) -> int:
        """[B,S,Hkv,D]: keys or values of one branch."""
        return self.tokens * self.kv_heads * self.dim * self.element

    @property
    def gates(self) -> int:
        """[B,S,Hq,3]."""
        return self.tokens * self.heads * 3 * self.element

    def compressed(self, config: NSAConfig) -> int:
        """[B,Nc,Hkv,D]."""
        return self.batch * config.cmp_tokens(self.seq_len) * self.kv_heads * self.dim * self.element

    def blocks(self, config: NSAConfig) -> int:
        """int32 [B,S,Hkv,n]: the selection."""
        return self.tokens * self.kv_heads * config.slc_count * 4


class Footprint(Protocol):
    """One implementation's account."""

    def forward(self, ledger: Ledger, grad: bool) -> None:
        """Run forward. Holds the output (as activation) and, with `grad`, what the backward needs."""
        ...

    def backward(self, ledger: Ledger) -> None:
        """Run backward. Releases what it needed, the output not included, and holds the gradients of q, k and v."""
        ...


def footprint(implementation: str, sizes: Sizes, config: NSAConfig, *, compresses: bool) -> Footprint:
    """The account of `implementation`.

    Args:
        compresses: whether it compresses one k and one v for all branches, or is given three of each, compressed ones
            included, by a layer.

    Raises:
        InputError: nothing is known about it.
    """
    if implementation == "dense":
        return Dense(sizes)
    if implementation == "chunked":
        return Chunked(sizes, config, compresses)
    if implementation in ("naive", "reference"):
        return Masked(sizes, config, compresses, exhaustive=implementation == "reference")
    raise InputError("implementation", repr(implementation), f"use one of {', '.join(ACCOUNTS)}")


@dataclass(frozen=True)
class Dense:
    """scaled_dot_product_attention's fused kernels; k and v are the caller's, nothing but lse is kept beside out."""

    sizes: Sizes

    @property
    def _lse(self) -> int:
        return self.sizes.tokens * self.sizes.heads * 4

    def forward(self, ledger: Ledger, grad: bool) -> None:
        ledger.hold("activations", self.sizes.q + self._lse)
        if self.sizes.device.type == "cpu":
            rows, keys = self._cpu_tile()
            ledger.touch(torch.get_num_threads() * rows * (keys + 2 + self.sizes.dim) * 4)
        if not grad:
            ledger.release("activations", self._lse)

    def backward(self, ledger: Ledger) -> None:
        s = self.sizes
        ledger.hold("gradients", s.q + 2 * s.kv)
        if s.device.type == "cpu":
            rows, keys = self._cpu_tile()
            ledger.touch(torch.get_num_threads() * 2 * rows * keys * 4)
        else:  # the flash kernel sums dq in float32, and dk, dv of every query head before those of the group
            grouped = 2 * s.q if s.heads != s.kv_heads else 0
            ledger.touch(s.tokens * s.heads * s.dim * 4 + grouped + self._lse)
        ledger.release("activations", self._lse)

    def _cpu_tile(self) -> tuple[int, int]:
        """Rows and keys of a thread's tile in PyTorch's FlashAttentionKernel.cpp."""
        length = self.sizes.seq_len
        rows = 256 if length >= 768 else 64 if length >= 192 else 32
        return min(rows, length), min(512, length)


@dataclass(frozen=True)
class Masked:
    """backends/naive.py; the oracle, reference.py, keeps the same tensors and masks the selection more wastefully."""

    sizes: Sizes
    config: NSAConfig
    compresses: bool
    exhaustive: bool = False

    def forward(self, ledger: Ledger, grad: bool) -> None:
        run: dict[Branch, Callable[[], None]] = {
            branch: partial(self._branch_forward, ledger, branch, grad) for branch in BRANCHES
        }
        _branches_forward(ledger, self.sizes, self.config, self.compresses, grad, run, self._select)

    def backward(self, ledger: Ledger) -> None:
        s = self.sizes
        for branch in reversed(BRANCHES):
            self._branch_backward(ledger, branch)
            if branch == "win":
                ledger.hold("gradients", s.q)
            ledger.hold("gradients", _key_gradients(s, self.config, branch, self.compresses))
        ledger.release("activations", _kept(s, self.config, self.compresses))

    def _select(self, ledger: Ledger) -> None:
        """Over the compressed tokens: scores, masked ones, softmax and the mask as float."""
        ledger.touch(3 * self._scores("cmp") + self._cast_mask("cmp") + self._mask("cmp"))

    def _keys(self, branch: Branch) -> int:
        return self.config.cmp_tokens(self.sizes.seq_len) if branch == "cmp" else self.sizes.seq_len

    def _scores(self, branch: Branch) -> int:
        """P in the dtype of softmax."""
        return self.sizes.tokens * self.sizes.heads * self._keys(branch) * self.sizes.wide

    def _mask(self, branch: Branch) -> int:
        """Elements (of one byte) of the mask: per head where blocks are selected, else shared by all."""
        pairs = self.sizes.seq_len * self._keys(branch)
        return pairs * self.sizes.batch * self.sizes.heads if branch == "slc" else pairs

    def _cast_mask(self, branch: Branch) -> int:
        """On the CPU, p * mask first makes the mask a float tensor."""
        return self._mask(branch) * self.sizes.wide if self.sizes.device.type == "cpu" else 0

    def _saved(self, branch: Branch) -> int:
        """softmax, p, the mask and its inverse, keys and values per query head, and the output before its gate."""
        s = self.sizes
        narrow = self._scores(branch) * s.element // s.wide
        expanded = s.batch * self._keys(branch) * s.heads * s.dim * s.element
        own_queries = s.q if s.batch > 1 else 0  # batch and heads of q fold into one axis by a copy
        return self._scores(branch) + narrow + 2 * self._mask(branch) + 2 * expanded + s.q + own_queries

    def _branch_forward(self, ledger: Ledger, branch: Branch, grad: bool) -> None:
        scores, mask = self._scores(branch), self._mask(branch)
        narrow = scores * self.sizes.element // self.sizes.wide if self.sizes.element < self.sizes.wide else 0
        per_kv_head = self.sizes.tokens * self.sizes.kv_heads * self._keys(branch) if branch == "slc" else 0
        if self.exhaustive and branch == "slc":
            ledger.touch(per_kv_head * self.config.slc_count)
        # scores, softmax, product, the mask as float; per-token masks of the kv heads
        peak = 3 * scores + narrow + self._cast_mask(branch) + (2 if grad else 1) * mask + 2 * per_kv_head
        expanded = self.sizes.batch * self._keys(branch) * self.sizes.heads * self.sizes.dim * self.sizes.element
        ledger.touch(peak + (expanded if grad else 0))
        if grad:
            ledger.hold("activations", self._saved(branch))
            ledger.touch(self.sizes.q)  # the gated output beside the one before its gate
        else:
            ledger.touch(scores + narrow + mask + self.sizes.q + max(expanded, self.sizes.q))

    def _branch_backward(self, ledger: Ledger, branch: Branch) -> None:
        s, scores = self.sizes, self._scores(branch)
        expanded = s.batch * self._keys(branch) * s.heads * s.dim * s.element
        narrow = scores * s.element // s.wide
        ledger.touch(s.q + narrow + expanded)  # dout·gate, dp, dv per query head
        # p is gone, dp and its masked self are there
        ledger.touch(s.q + narrow + scores + self._cast_mask(branch) - narrow)
        ledger.release("activations", self._saved(branch))


@dataclass(frozen=True)
class Piece:
    """Bytes of a chunk's tensors in backends/chunked.py.

    Attributes:
        rows: outputs of the chunk's queries, as large as the queries.
        queries: queries as operands, as large as the output's gradient; 0 where a view serves.
        keys: keys read, as large as values read; 0 where a view serves.
        key_sums: gradient of the keys read, as that of the values read.
        scores: P, in the accumulator's dtype.
        operand_scores: P once more, where products want another dtype.
        hidden: the mask.
        shared: P summed over the heads of a group.
        blocks: one float per selection block of every query.
    """

    rows: int
    queries: int
    keys: int
    key_sums: int
    scores: int
    operand_scores: int
    hidden: int
    shared: int
    blocks: int


@dataclass(frozen=True)
class Chunked:
    """backends/chunked.py: q, k, v, gates and the selection are kept; all else lives for one chunk."""

    sizes: Sizes
    config: NSAConfig
    compresses: bool

    def forward(self, ledger: Ledger, grad: bool) -> None:
        run: dict[Branch, Callable[[], None]] = {
            branch: partial(self._branch_forward, ledger, branch) for branch in BRANCHES
        }
        _branches_forward(ledger, self.sizes, self.config, self.compresses, grad, run, self._select)

    def backward(self, ledger: Ledger) -> None:
        s = self.sizes
        ledger.hold("gradients", s.q)
        for branch in reversed(BRANCHES):
            keys = s.compressed(self.config) if branch == "cmp" else s.kv
            sums = 2 * keys * s.wide // s.element
            own = (0 if branch == "win" else s.q) + self._copies(branch) + sums
            ledger.hold("workspace", own)
            self._backward_pieces(ledger, list(self._pieces(branch, backward=True)))
            ledger.release("workspace", own)
            ledger.hold("gradients", _key_gradients(s, self.config, branch, self.compresses))
        ledger.release("activations", _kept(s, self.config, self.compresses))

    def _copies(self, branch: Branch) -> int:
        """Keys and values with heads before tokens, where a view does not serve."""
        s = self.sizes
        size = s.compressed(self.config) if branch == "cmp" else s.kv
        copied = (s.batch > 1 and s.kv_heads > 1) or (branch == "slc" and s.kv_heads > 1)
        return 2 * size if copied else 0

    @property
    def _shape(self) -> _chunks.Shape:
        s = self.sizes
        narrow = s.element < 4 and s.device.type == "cuda"
        element = s.element if narrow else s.wide
        return _chunks.Shape(s.batch, s.seq_len, s.heads, s.dim, s.kv_heads, s.dim, element, s.device.type)

    def _pieces(self, branch: Branch, backward: bool) -> Iterator[Piece]:
        """As backends/_pieces.py cuts the queries; only those that can make the peak, so that S costs no time."""
        s, config, shape = self.sizes, self.config, self._shape
        if branch == "cmp":
            for start, stop in _last_ranges(0, s.seq_len, _chunks.span_rows(shape, config.cmp_tokens(s.seq_len))):
                yield self._piece(stop - start, config.cmp_tokens(stop), gathered=False)
        elif branch == "win":
            for start, stop in _last_ranges(0, s.seq_len, _chunks.band_rows(shape, config.window)):
                first = max(0, start - config.window + 1)
                yield self._piece(stop - start, stop - first, gathered=False)
        else:
            keys = config.slc_count * config.slc_block
            dense = min(keys, s.seq_len)
            for start, stop in _last_ranges(0, dense, _chunks.span_rows(shape, keys)):
                yield self._piece(stop - start, stop, gathered=False)
            for start, stop in _last_ranges(dense, s.seq_len, _chunks.gather_rows(shape, keys, backward)):
                yield self._piece(stop - start, keys, gathered=True)

    def _piece(self, rows: int, keys: int, gathered: bool) -> Piece:
        s, shape = self.sizes, self._shape
        pairs, own = s.batch * rows * keys, rows if gathered else 1
        converted = shape.element != s.element
        read = s.batch * s.kv_heads * own * keys * s.dim
        outputs = s.batch * rows * s.heads * s.dim
        in_place = s.kv_heads == 1 and (s.batch == 1 or rows == s.seq_len) and not converted
        return Piece(
            rows=outputs * s.wide,
            queries=0 if in_place else outputs * shape.element,
            keys=read * shape.element if gathered or converted else 0,
            key_sums=read * s.wide,
            scores=pairs * s.heads * s.wide,
            operand_scores=pairs * s.heads * shape.element if shape.element < s.wide else 0,
            hidden=pairs * s.kv_heads if gathered else rows * keys,
            shared=pairs * s.kv_heads * s.wide,
            blocks=s.batch * s.kv_heads * rows * self.config.slc_blocks(s.seq_len) * s.wide,
        )

    def _branch_forward(self, ledger: Ledger, branch: Branch) -> None:
        copies = self._copies(branch)
        ledger.hold("workspace", copies + self.sizes.q)
        self._forward_pieces(ledger, list(self._pieces(branch, backward=False)))
        ledger.release("workspace", copies + self.sizes.q)

    def _select(self, ledger: Ledger) -> None:
        """`select`: one chunk's names live until the next chunk's replace them."""
        before = 0
        for piece in self._pieces("cmp", backward=False):
            ledger.touch(before + piece.queries + piece.keys + 2 * piece.scores)
            ledger.touch(piece.scores + 2 * piece.shared + piece.blocks)
            ledger.touch(piece.scores + 6 * piece.blocks)  # scores, ranked ones, and 64-bit keys twice
            before = piece.scores + piece.blocks

    def _forward_pieces(self, ledger: Ledger, pieces: list[Piece]) -> None:
        p = part = 0
        for piece in pieces:
            ledger.touch(p + part + piece.hidden + piece.queries + piece.keys + 2 * piece.scores)
            p = piece.scores
            ledger.touch(p + part + piece.hidden + piece.keys + piece.operand_scores + piece.rows)
            part = piece.rows

    def _backward_pieces(self, ledger: Ledger, pieces: list[Piece]) -> None:
        queries = operands = p = ds = 0  # what the chunk before has left: queries and dout, keys and values, P, dS
        for piece in pieces:
            read = piece.queries + 2 * piece.keys + piece.hidden
            ledger.touch(2 * queries + operands + p + ds + read)
            ledger.touch(queries + p + ds + read + 2 * piece.scores)
            queries, operands, p = piece.queries, 2 * piece.keys, piece.scores
            read += piece.queries
            ledger.touch(p + ds + read + 2 * piece.rows)  # the output again, and dout times it
            read += piece.rows - piece.queries  # dout times the gate
            ledger.touch(p + ds + read + piece.operand_scores + piece.key_sums)
            ledger.touch(p + ds + read + piece.scores)
            ds = piece.scores
            ledger.touch(p + ds + read + piece.operand_scores + max(piece.key_sums, piece.rows))


def _kept(sizes: Sizes, config: NSAConfig, compresses: bool) -> int:
    """What the branches' backward needs beside the operator's own tensors: the compressed ones and the selection."""
    return (2 * sizes.compressed(config) if compresses else 0) + sizes.blocks(config)


def _key_gradients(sizes: Sizes, config: NSAConfig, branch: Branch, compresses: bool) -> int:
    """Gradients of keys and values that stay after a branch: one pair for all, or one for each given separately."""
    if compresses:
        return 2 * sizes.kv if branch == "win" else 0
    return 2 * sizes.compressed(config) if branch == "cmp" else 2 * sizes.kv


def _branches_forward(
    ledger: Ledger,
    sizes: Sizes,
    config: NSAConfig,
    compresses: bool,
    grad: bool,
    run: Mapping[Branch, Callable[[], None]],
    select: Callable[[Ledger], None],
) -> None:
    """functional._attend: branch after branch, each added to the first one's output."""
    compressed = sizes.compressed(config) if compresses else 0
    ledger.hold("activations", 2 * compressed)
    run["cmp"]()
    ledger.hold("activations", sizes.q - (0 if grad else 2 * compressed))
    ledger.hold("workspace", compressed)  # select compresses for itself
    select(ledger)
    ledger.release("workspace", compressed)
    ledger.hold("activations", sizes.blocks(config))
    run["slc"]()
    ledger.release("activations", 0 if grad else sizes.blocks(config))
    ledger.hold("workspace", sizes.q)  # the selected branch's output, until the window's takes its name
    run["win"]()
    ledger.release("workspace", sizes.q)


def _last_ranges(first: int, last: int, step: int) -> Iterator[tuple[int, int]]:
    """The last three of the ranges that _pieces.py goes through.

    Pieces only grow from one to the next, save for the last, which may have fewer queries; and a piece meets no more
    than what the one before it left. So the peak is the last's, or that of the one before it after its own predecessor.
    """
    for start in range(first, last, step)[-3:]:
        yield start, min(start + step, last)
