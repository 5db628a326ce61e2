"""Synthetic retrieval: haystacks of random tokens with needles in them, pairs of a key and a value, and questions.

A haystack ends with the keys of its needles in any order, each of which asks for its value. No other token has a
target: thousands that can be told without looking back would drown the answers' gradient. Sequences to learn from have
haystacks of all lengths up to their own, since short ones are learned first, and more straw behind them.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from jobs.training.data.base import DrawnBatches
from nsa_core.loss import IGNORED

_Length = TypeVar("_Length", int, Tensor)
_STRAW = 32  # different tokens of the haystack
_MULTIPLE = 64  # of a vocabulary: other widths are slower on GPUs


@dataclass(frozen=True)
class NeedleCorpus:
    """Sequences to learn from, and to be asked (jobs.training.data.base.Corpus).

    Attributes:
        needles: pairs in a sequence.
        alphabet: different keys, and different values; a guess is right once in so many times.
        seed: of the held-out sequences and those with a needle at a depth.
    """

    needles: int
    alphabet: int
    seed: int = 0

    @property
    def vocabulary(self) -> int:
        """Tokens that a model needs: straw, keys, values; up to a multiple of 64."""
        return -(-(_STRAW + 2 * self.alphabet) // _MULTIPLE) * _MULTIPLE

    def batches(self, batch: int, seq_len: int, seed: int) -> DrawnBatches:
        """Endless (tokens, targets), int64 [batch, seq_len] each, seeded by `seed`."""
        return DrawnBatches(partial(self.draw, batch, seq_len), _generator("training", seed))

    def heldout_batches(self, batch: int, seq_len: int, count: int) -> list[tuple[Tensor, Tensor]]:
        """`count` fixed (tokens, targets) as in `batches`, of other seeds."""
        generator = _generator("held out", self.seed)
        return [self.draw(batch, seq_len, generator) for _ in range(count)]

    def text_bytes(self, targets: Tensor) -> int:
        """Answers among `targets`, which losses are divided by."""
        return int((targets != IGNORED).sum())

    def about(self) -> dict[str, Any]:
        """The task, for the result's environment."""
        return {"needles": self.needles, "alphabet": self.alphabet, "vocabulary": self.vocabulary}

    def asked(self, count: int, seq_len: int, depth: int) -> tuple[Tensor, Tensor]:
        """Sequences [count, seq_len] whose first question asks for the needle at a depth; values asked for [count].

        Args:
            depth: place of the needle in the haystack [%]: 0 is its first tokens, 100 the last before the questions.
        """
        generator = _generator(f"asked at {depth}", self.seed)
        last = self._places(seq_len) - 1
        tokens, targets = self.draw(count, seq_len, generator, first=round(depth * last / 100))
        return tokens, targets[:, seq_len - self.needles]

    def draw(
        self, batch: int, seq_len: int, generator: torch.Generator, first: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """(tokens, targets), int64 [batch, seq_len] each.

        Args:
            first: place of the needle that is asked for first, in a haystack as long as the sequence; None: anywhere,
                in haystacks of all lengths.
        """

        def distinct(among: int, first: Tensor | None = None) -> Tensor:
            """Numbers below `among` in any order, [batch, among]; those below `first` [batch, 1] before the others."""
            order = torch.rand(batch, among, generator=generator)
            return (order if first is None else order + (torch.arange(among) >= first)).argsort(1)

        lengths = self._lengths(batch, seq_len, generator) if first is None else torch.full((batch, 1), seq_len)
        tokens = torch.randint(_STRAW, (batch, seq_len), generator=generator)
        places = distinct(self._places(seq_len), self._places(lengths))
        if first is not None:  # the first needle gets its place, and whichever had it the first needle's
            places = torch.where(places == first, places[:, :1], places)
            places[:, 0] = first
        places = 2 * places[:, : self.needles]
        keys = _STRAW + distinct(self.alphabet)[:, : self.needles]
        values = torch.randint(self.alphabet, keys.shape, generator=generator) + _STRAW + self.alphabet
        tokens.scatter_(1, places, keys)
        tokens.scatter_(1, places + 1, values)
        order = distinct(self.needles) if first is None else torch.arange(self.needles).expand(batch, -1)
        asked = lengths - self.needles + torch.arange(self.needles)
        targets = torch.full_like(tokens, IGNORED)
        tokens.scatter_(1, asked, keys.gather(1, order))
        targets.scatter_(1, asked, values.gather(1, order))
        return tokens, targets

    def _lengths(self, batch: int, seq_len: int, generator: torch.Generator) -> Tensor:
        """Lengths of haystacks with their questions, [batch, 1]; their logarithms are uniform."""
        shortest = 4 * self.needles
        spread = torch.rand(batch, 1, generator=generator) * math.log((seq_len + 1) / shortest)
        return (shortest * spread.exp()).long().clamp(shortest, seq_len)

    def _places(self, length: _Length) -> _Length:
        """Places for needles in haystacks of `length` tokens with their questions."""
        return (length - self.needles) // 2


def _generator(use: str, seed: int) -> torch.Generator:
    """A generator for one use. Of a seed PyTorch's CPU generator takes 32 bits, so that they have to differ there."""
    digest = hashlib.sha256(f"{use} {seed}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
