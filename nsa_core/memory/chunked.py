"""Memory of backends/chunked.py, a chunk of queries at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from ..backends import chunks
from ..config import NSAConfig
from ..functional import BRANCHES
from ..routes import Branch
from .branches import branches_forward, kept, key_gradients
from .ledger import Ledger
from .sizes import Sizes


@dataclass(frozen=True)
class PieceBytes:
    """Bytes of a chunk's tensors in backends/chunked.py.

    Attributes:
        rows: outputs of the chunk's queries; as many bytes as the queries.
        queries: queries as operands, as many bytes as the output's gradient; 0 where a view serves.
        keys: keys read, as many bytes as the values read; 0 where a view serves.
        key_sums: gradient of the keys read, as many bytes as that of the values.
        scores: P, in the accumulator's dtype.
        operand_scores: P once more, if products need another dtype.
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
    """Account of backends/chunked.py: q, k, v, gates and the selection are kept; all else lives for one chunk."""

    sizes: Sizes
    config: NSAConfig
    compresses: bool
    released = 0

    def forward(self, ledger: Ledger, grad: bool) -> None:
        run: dict[Branch, Callable[[], None]] = {
            branch: partial(self._branch_forward, ledger, branch) for branch in BRANCHES
        }
        branches_forward(ledger, self.sizes, self.config, self.compresses, grad, run, self._select)

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
            ledger.hold("gradients", key_gradients(s, self.config, branch, self.compresses))
        ledger.release("activations", kept(s, self.config, self.compresses))

    def _copies(self, branch: Branch) -> int:
        """Bytes of keys and values with heads before tokens; 0 where a view serves."""
        s = self.sizes
        size = s.compressed(self.config) if branch == "cmp" else s.kv
        copied = (s.batch > 1 and s.kv_heads > 1) or (branch == "slc" and s.kv_heads > 1)
        return 2 * size if copied else 0

    @property
    def _shape(self) -> chunks.CallShape:
        s = self.sizes
        narrow = s.element < 4 and s.device.type == "cuda"
        element = s.element if narrow else s.wide
        return chunks.CallShape(s.batch, s.seq_len, s.heads, s.dim, s.kv_heads, s.dim, element, s.device.type)

    def _pieces(self, branch: Branch, backward: bool) -> Iterator[PieceBytes]:
        """Pieces as backends/_pieces.py cuts them; only those that can reach the peak, for speed at any S."""
        s, config, shape = self.sizes, self.config, self._shape
        if branch == "cmp":
            for start, stop in _last_ranges(0, s.seq_len, chunks.span_rows(shape, config.cmp_tokens(s.seq_len))):
                yield self._piece(stop - start, config.cmp_tokens(stop), gathered=False)
        elif branch == "win":
            for start, stop in _last_ranges(0, s.seq_len, chunks.band_rows(shape, config.window)):
                first = max(0, start - config.window + 1)
                yield self._piece(stop - start, stop - first, gathered=False)
        else:
            keys = config.slc_count * config.slc_block
            dense = min(keys, s.seq_len)
            for start, stop in _last_ranges(0, dense, chunks.span_rows(shape, keys)):
                yield self._piece(stop - start, stop, gathered=False)
            for start, stop in _last_ranges(dense, s.seq_len, chunks.gather_rows(shape, keys, backward)):
                yield self._piece(stop - start, keys, gathered=True)

    def _piece(self, rows: int, keys: int, gathered: bool) -> PieceBytes:
        s, shape = self.sizes, self._shape
        pairs, own = s.batch * rows * keys, rows if gathered else 1
        converted = shape.element != s.element
        read = s.batch * s.kv_heads * own * keys * s.dim
        outputs = s.batch * rows * s.heads * s.dim
        in_place = s.kv_heads == 1 and (s.batch == 1 or rows == s.seq_len) and not converted
        return PieceBytes(
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
        """Account for `select`: one chunk's tensors live until the next chunk's take their names."""
        before = 0
        for piece in self._pieces("cmp", backward=False):
            ledger.touch(before + piece.queries + piece.keys + 2 * piece.scores)
            ledger.touch(piece.scores + 2 * piece.shared + piece.blocks)
            ledger.touch(piece.scores + 6 * piece.blocks)  # scores, ranked scores, and 64-bit keys twice
            before = piece.scores + piece.blocks

    def _forward_pieces(self, ledger: Ledger, pieces: list[PieceBytes]) -> None:
        p = part = 0
        for piece in pieces:
            ledger.touch(p + part + piece.hidden + piece.queries + piece.keys + 2 * piece.scores)
            p = piece.scores
            ledger.touch(p + part + piece.hidden + piece.keys + piece.operand_scores + piece.rows)
            part = piece.rows

    def _backward_pieces(self, ledger: Ledger, pieces: list[PieceBytes]) -> None:
        queries = operands = p = ds = 0  # left by the previous chunk: queries and dout, keys and values, P, dS
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


def _last_ranges(first: int, last: int, step: int) -> Iterator[tuple[int, int]]:
    """Last three of the ranges that _pieces.py uses.

    Pieces only grow from one to the next, except for the last, which may have fewer queries; and only the previous
    piece's tensors are still live. So the peak is that of the last piece, or of the one before it.
    """
    for start in range(first, last, step)[-3:]:
        yield start, min(start + step, last)
