"""Tokenizers by the package `tokenizers`, with the bytes of text that each token stands for."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jobs.training.data.base import DataError
from jobs.training.data.spec import DataSpec, missing_extra, tokenizer_file

_GPT2_REPOSITORY = "openai-community/gpt2"
_SAMPLE = "The cat — äß, 日本語 и 🙂\t\n\r\n  def f(x):\x00 ~"  # all kinds of bytes


class TextTokenizer:
    """A byte-level BPE tokenizer.

    Attributes:
        size: tokens of its vocabulary.
        end: id of the token after each document.
        sha256: digest of its vocabulary and merges.
    """

    def __init__(self, tokenizer: Any, spec: DataSpec) -> None:
        tokenizer.encode_special_tokens = True  # text that looks like a special token is text
        tokenizer.no_truncation()  # its file may ask for either
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.size = max(vocabulary.values()) + 1
        end = vocabulary.get(spec.end_token)
        if end is None:
            special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
            raise DataError(
                f"data.end_token: {spec.end_token!r}: is no token of {spec.tokenizer_source}; "
                f"use {', '.join(map(repr, special[:8])) or 'one of its tokens'}"
            )
        self.end = end
        self.sha256 = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
        self._bytes = _bytes_of(tokenizer, vocabulary, self.size)
        self._bytes[end] = 1
        ids = self.encode([_SAMPLE])[0]
        if self.text_bytes(torch.tensor(ids)) != len(_SAMPLE.encode()):
            raise DataError(
                f"{spec.tokenizer_source}: loses or changes bytes of text, so that its loss would be no loss of the "
                "text; use a byte-level BPE tokenizer such as GPT-2's"
            )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text's tokens, without special ones; on as many threads as PyTorch has here."""
        return [found.ids for found in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def text_bytes(self, ids: Tensor) -> int:
        """Bytes of text that tokens stand for; the end of a document counts as one."""
        return int(self._bytes[ids].sum())


def load_tokenizer(spec: DataSpec) -> TextTokenizer:
    """The tokenizer of a spec.

    Raises:
        DataError: it cannot be loaded, lacks the end token, or is not byte-level.
    """
    os.environ.setdefault("RAYON_NUM_THREADS", str(torch.get_num_threads()))  # else each rank takes all cores
    try:
        import tokenizers
    except ImportError:
        raise DataError(f"{spec.tokenizer_source}: {missing_extra(['tokenizers'])}") from None
    try:
        return TextTokenizer(_load(tokenizers, spec), spec)
    except (DataError, MemoryError):
        raise
    except Exception as err:  # the package raises bare ones, and those of the network
        fix = "give the tokenizer.json of a byte-level BPE tokenizer, or a folder with vocab.json and merges.txt"
        if spec.tokenizer_path is None:
            fix = f"without a network give a folder with tokenizer.json of {_GPT2_REPOSITORY} as data.tokenizer_path"
        raise DataError(f"{spec.tokenizer_source}: cannot be loaded ({first_line(err)}); {fix}") from None


def _load(tokenizers: Any, spec: DataSpec) -> Any:
    if spec.tokenizer_path is None:
        return tokenizers.Tokenizer.from_pretrained(_GPT2_REPOSITORY)
    file = tokenizer_file(spec.tokenizer_path)
    if file.name != "vocab.json":
        return tokenizers.Tokenizer.from_file(str(file))
    model = tokenizers.models.BPE.from_file(str(file), str(file.with_name("merges.txt")))
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def _bytes_of(tokenizer: Any, vocabulary: dict[str, int], size: int) -> Tensor:
    """Bytes of each token: a character of a byte-level token is a byte, added tokens are plain text."""
    lengths = torch.zeros(size, dtype=torch.int64)
    for token, number in vocabulary.items():
        lengths[number] = len(token)
    for number, added in tokenizer.get_added_tokens_decoder().items():
        lengths[number] = len(added.content.encode())
    return lengths


def first_line(err: BaseException) -> str:
    """The first line of an exception's text; its class if it has none."""
    return next((line.strip() for line in str(err).splitlines() if line.strip()), type(err).__name__)
