"""Probe of a trained model: its held-out loss by position, and whether it sees later tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from nsa_core.loss import IGNORED

Batch = tuple[Tensor, Tensor]  # tokens and targets [batch,S]
NEAR = (
    64  # positions of the first range, and of the rows before a cut: in the mean of more, a look at one would be lost
)


@dataclass(frozen=True)
class Probe:
    """Held-out losses [nat/byte] of a trained model."""

    ranges: tuple[int, ...]  # ends of the ranges of positions, each twice as long as all before it
    by_position: tuple[float, ...]  # one a range
    cuts: tuple[int, ...]  # positions from which on tokens were changed
    changes: tuple[float, ...]  # one a cut: of the loss of the NEAR positions before it; 0 in a causal model


def probe(loss_of: Callable[[Sequence[Batch]], float], heldout: Sequence[Batch], vocabulary: int) -> Probe:
    """Ask a trained model for its loss over parts of the held-out batches; `loss_of` gives the mean over targets.

    A model that sees what it predicts has another loss once the tokens from a cut on are others, while the targets
    before it are the same.
    """
    tokens, targets = heldout[0]
    length = tokens.shape[1]
    ends = [*(NEAR << i for i in range(length.bit_length()) if NEAR << i < length), length]
    by_position = [
        loss_of([(each, _only(wanted, start, end)) for each, wanted in heldout]) for start, end in pairwise([0, *ends])
    ]
    cuts = sorted({max(1, cut) for cut in (length // 4 + 1, length // 2, length // 2 + 1, length - 1)})
    changes = []
    for cut in cuts:
        near = _only(targets, max(0, cut - NEAR), cut)
        changed = torch.cat((tokens[:, :cut], (tokens[:, cut:] + vocabulary // 2) % vocabulary), 1)
        changes.append(loss_of([(changed, near)]) - loss_of([(tokens, near)]))
    return Probe(tuple(ends), tuple(by_position), tuple(cuts), tuple(changes))


def _only(targets: Tensor, start: int, end: int) -> Tensor:
    """Targets with only those of the positions start:end to be predicted."""
    position = torch.arange(targets.shape[1])
    return targets.where((position >= start) & (position < end), IGNORED)
