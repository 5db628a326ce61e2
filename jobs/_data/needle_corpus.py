"""Synthetic retrieval: haystacks of random tokens with needles in them, pairs of a key and a value, and questions.

A sequence ends with the keys of its needles in any order, each of which asks for its value. Everywhere else the target
is silence, one token, so that the loss is that of the answers once silence is learned.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SILENCE = 0
_STRAW = 32  # different tokens of the haystack
_MULTIPLE = 64  # of a vocabulary: other widths are slower on GPUs


@dataclass(frozen=True)
class NeedleCorpus:
    """Sequences to learn from, and to be asked (jobs._data.base.Corpus).

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
        """Tokens that a model needs: silence, straw, keys, values; up to a multiple of 64."""
        return -(-(1 + _STRAW + 2 * self.alphabet) // _MULTIPLE) * _MULTIPLE

    def batches(self, batch: int, seq_len: int, seed: int) -> NeedleBatches:
        """Endless (tokens, targets), int64 [batch, seq_len] each, seeded by `seed`."""
        return NeedleBatches(self, batch, seq_len, seed)

    def heldout_batches(self, batch: int, seq_len: int, count: int) -> list[tuple[Tensor, Tensor]]:
        """`count` fixed (tokens, targets) as in `batches`, of other seeds."""
        generator = _generator("held out", self.seed)
        return [self.draw(batch, seq_len, generator) for _ in range(count)]

    def text_bytes(self, targets: Tensor) -> int:
        """Answers among `targets`, which losses are divided by."""
        return int((targets != SILENCE).sum())

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
            first: place of the needle that is asked for first; None: anywhere.
        """

        def distinct(among: int) -> Tensor:
            return torch.rand(batch, among, generator=generator).argsort(1)

        hay = seq_len - self.needles
        tokens = torch.randint(1, 1 + _STRAW, (batch, seq_len), generator=generator)
        places = distinct(self._places(seq_len))
        if first is not None:  # the first needle gets its place, and whichever had it the first needle's
            places = torch.where(places == first, places[:, :1], places)
            places[:, 0] = first
        places = 2 * places[:, : self.needles]
        keys = 1 + _STRAW + distinct(self.alphabet)[:, : self.needles]
        values = torch.randint(self.alphabet, keys.shape, generator=generator) + 1 + _STRAW + self.alphabet
        tokens.scatter_(1, places, keys)
        tokens.scatter_(1, places + 1, values)
        order = distinct(self.needles) if first is None else torch.arange(self.needles).expand(batch, -1)
        targets = torch.full_like(tokens, SILENCE)
        tokens[:, hay:], targets[:, hay:] = keys.gather(1, order), values.gather(1, order)
        return tokens, targets

    def _places(self, seq_len: int) -> int:
        """Places for needles in a sequence's haystack."""
        return (seq_len - self.needles) // 2


class NeedleBatches(Iterator[tuple[Tensor, Tensor]]):
    """Endless batches of a corpus (NeedleCorpus.batches), whose position can be kept and taken up again."""

    def __init__(self, corpus: NeedleCorpus, batch: int, seq_len: int, seed: int) -> None:
        self._corpus = corpus
        self._shape = (batch, seq_len)
        self._generator = _generator("training", seed)

    def __next__(self) -> tuple[Tensor, Tensor]:
        return self._corpus.draw(*self._shape, self._generator)

    def state_dict(self) -> dict[str, Tensor]:
        """The position: the state of the generator, uint8."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go to the position that `state_dict` gave."""
        self._generator.set_state(state["generator"])

    def about(self) -> dict[str, Any]:
        """Nothing: sequences are drawn at random."""
        return {}


def _generator(use: str, seed: int) -> torch.Generator:
    """A generator for one use. Of a seed PyTorch's CPU generator takes 32 bits, so that they have to differ there."""
    digest = hashlib.sha256(f"{use} {seed}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
