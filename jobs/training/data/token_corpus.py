"""A corpus of tokens: documents one after the other, each followed by the end token."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from jobs.schema.point import Beat
from jobs.training.data.base import DataError, spread_windows
from jobs.training.data.documents import Documents, TrainingDocuments
from jobs.training.data.spec import DataSpec
from jobs.training.data.tokenizer import TextTokenizer, load_tokenizer

_BYTES_A_TOKEN = 4  # about; decides only how many documents are tokenized together


class TokenCorpus:
    """Tokens of a dataset's documents; held-out ones are in memory, those to learn from are streamed.

    Args:
        heldout: [tokens] of held-out documents.
    """

    def __init__(self, documents: Documents, tokenizer: TextTokenizer, heldout: Tensor) -> None:
        self._documents = documents
        self._tokenizer = tokenizer
        self._heldout = heldout

    def batches(self, batch: int, seq_len: int, seed: int) -> TokenBatches:
        """Endless (tokens, targets), int64 [batch, seq_len] each, of documents in a row; a token is a target once."""
        return TokenBatches(self._documents.training(seed), self._tokenizer, batch, seq_len)

    def heldout_batches(self, batch: int, seq_len: int, count: int) -> list[tuple[Tensor, Tensor]]:
        """`count` fixed (tokens, targets) as in `batches`, from places spread evenly over the held-out tokens."""
        return spread_windows(self._heldout, batch, seq_len, count)

    def text_bytes(self, targets: Tensor) -> int:
        """Bytes of text that `targets` stand for; the end of a document counts as one."""
        return self._tokenizer.text_bytes(targets)

    def about(self) -> dict[str, Any]:
        """Tokenizer, and the held-out text that was read: its size, digest and bytes a token."""
        size = self.text_bytes(self._heldout)
        return {
            "vocabulary": self._tokenizer.size,
            "tokenizer_sha256": self._tokenizer.sha256,
            "heldout_tokens": len(self._heldout),
            "heldout_bytes": size,
            "heldout_sha256": hashlib.sha256(self._heldout.numpy().tobytes()).hexdigest(),
            "bytes_a_token": size / len(self._heldout),
        }


class TokenBatches(Iterator[tuple[Tensor, Tensor]]):
    """Endless batches of a corpus (TokenCorpus.batches), whose position can be kept and taken up again."""

    def __init__(self, documents: TrainingDocuments, tokenizer: TextTokenizer, batch: int, seq_len: int) -> None:
        self._documents = documents
        self._tokenizer = tokenizer
        self._shape = (batch, seq_len)
        self._rest = torch.empty(0, dtype=torch.int32)  # tokens of documents that were read, not yet in a batch

    def __next__(self) -> tuple[Tensor, Tensor]:
        count = self._shape[0] * self._shape[1]
        while (missing := count + 1 - len(self._rest)) > 0:
            self._rest = torch.cat((self._rest, _tokens(self._documents, self._tokenizer, missing)))
        taken, self._rest = self._rest[: count + 1].long(), self._rest[count:].clone()
        return taken[:-1].view(self._shape), taken[1:].view(self._shape)

    def state_dict(self) -> dict[str, Any]:
        """The position: that in the documents, and the tokens that are left of those read, int32."""
        return {"documents": self._documents.state_dict(), "rest": self._rest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position that `state_dict` gave."""
        self._documents.load_state_dict(state["documents"])
        self._rest = state["rest"]

    def about(self) -> dict[str, Any]:
        """Documents read, one that was read again included, and epochs begun."""
        return {"documents": self._documents.count, "epochs": self._documents.epoch + 1}


def load_tokens(spec: DataSpec, vocabulary: int, batch: int, seq_len: int, beat: Beat) -> TokenCorpus:
    """Open a dataset, and read as many of its held-out documents as the held-out loss needs.

    Args:
        vocabulary: of the model; that of the tokenizer must not be larger.
        batch, seq_len: of the batches; the held-out text must be longer than `seq_len` tokens.

    Raises:
        DataError: tokenizer or dataset cannot be used, or there is too little held-out text.
    """
    tokenizer = load_tokenizer(spec)
    if tokenizer.size > vocabulary:
        raise DataError(
            f"{spec.tokenizer_source}: has {tokenizer.size} tokens, but the model was planned for {vocabulary}: it is "
            "another one on the host that planned; give the same on all hosts"
        )
    documents = Documents(spec)
    wanted = spec.heldout_batches * batch * (seq_len + 1)
    parts, found, texts = [], 0, documents.heldout(beat)
    while found < wanted and len(part := _tokens(texts, tokenizer, wanted - found)):
        parts.append(part)
        found += len(part)
    if found <= seq_len + 1:
        raise documents.too_few("held-out", f"{found} tokens, too few for seq_len {seq_len}")
    return TokenCorpus(documents, tokenizer, torch.cat(parts)[:wanted])


def _tokens(documents: Iterator[str], tokenizer: TextTokenizer, about: int) -> Tensor:
    """About as many tokens, of the next whole documents, int32; none if there are no more documents."""
    texts, size = [], 0
    for text in documents:
        texts.append(text)
        size += len(text)
        if size >= about * _BYTES_A_TOKEN:
            break
    ids = [number for found in tokenizer.encode(texts) for number in (*found, tokenizer.end)]
    return torch.tensor(ids, dtype=torch.int32)
