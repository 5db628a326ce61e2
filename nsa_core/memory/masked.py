"""Memory of backends/naive.py and of the oracle, reference.py: S² scores under masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..config import NSAConfig
from ..functional import BRANCHES
from ..routes import Branch
from .branches import branches_forward, kept, key_gradients
from .ledger import Ledger
from .sizes import Sizes


@dataclass(frozen=True)
class Masked:
    """Account of backends/naive.py; and of reference.py, which keeps the same tensors but needs more for its masks."""

    sizes: Sizes
    config: NSAConfig
    compresses: bool
    exhaustive: bool = False
    released = 0

    def forward(self, ledger: Ledger, grad: bool) -> None:
        run: dict[Branch, Callable[[], None]] = {
            branch: partial(self._branch_forward, ledger, branch, grad) for branch in BRANCHES
        }
        branches_forward(ledger, self.sizes, self.config, self.compresses, grad, run, self._select)

    def backward(self, ledger: Ledger) -> None:
        s = self.sizes
        for branch in reversed(BRANCHES):
            self._branch_backward(ledger, branch)
            if branch == "win":
                ledger.hold("gradients", s.q)
            ledger.hold("gradients", key_gradients(s, self.config, branch, self.compresses))
        ledger.release("activations", kept(s, self.config, self.compresses))

    def _select(self, ledger: Ledger) -> None:
        """Account for `select`: scores, masked scores, softmax and the mask as float."""
        ledger.touch(3 * self._scores("cmp") + self._cast_mask("cmp") + self._mask("cmp"))

    def _keys(self, branch: Branch) -> int:
        return self.config.cmp_tokens(self.sizes.seq_len) if branch == "cmp" else self.sizes.seq_len

    def _scores(self, branch: Branch) -> int:
        """Bytes of P in the dtype of softmax."""
        return self.sizes.tokens * self.sizes.heads * self._keys(branch) * self.sizes.wide

    def _mask(self, branch: Branch) -> int:
        """Bytes of the mask, one per element: per head for the selected branch, else shared by all heads."""
        pairs = self.sizes.seq_len * self._keys(branch)
        return pairs * self.sizes.batch * self.sizes.heads if branch == "slc" else pairs

    def _cast_mask(self, branch: Branch) -> int:
        """Bytes of the mask as float, which p * mask makes on the CPU; 0 elsewhere."""
        return self._mask(branch) * self.sizes.wide if self.sizes.device.type == "cpu" else 0

    def _saved(self, branch: Branch) -> int:
        """Bytes that autograd saves: softmax, p, mask and inverse, expanded keys and values, the ungated output."""
        s = self.sizes
        narrow = self._scores(branch) * s.element // s.wide
        expanded = s.batch * self._keys(branch) * s.heads * s.dim * s.element
        own_queries = s.q if s.batch > 1 else 0  # q is copied to fold batch and heads into one axis
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
