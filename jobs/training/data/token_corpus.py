"""A corpus of tokens: documents one after the other, each followed by the end token.

The package `datasets` streams the documents, and its own state is the position in them.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jobs.schema.point import Beat
from jobs.training.data.base import Batches, DataError, files_below, is_heldout, spread_windows
from jobs.training.data.spec import TOKENIZER_FIX, DataSpec, missing_extra, tokenizer_file

_READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text"}
_OPTIONS = {
    "parquet": {"batch_size": 1000},  # rows; without it as many as the first row group has, and an empty one fails
    "json": {"encoding": "utf8", "encoding_errors": "replace"},  # under its usual name "utf-8" nothing is replaced
    "text": {"encoding_errors": "replace", "sample_by": "document"},
}
_BYTES_A_TOKEN = 4  # about; decides only how many documents are tokenized together
_GPT2_REPOSITORY = "openai-community/gpt2"
_SAMPLE = "The cat — äß, 日本語 и 🙂\t\n\r\n  def f(x):\x00 ~"  # all kinds of bytes


@dataclass(frozen=True)
class TokenCorpus:
    """Tokens of a dataset's documents: held-out ones in memory, int32 [tokens], those to learn from streamed."""

    documents: Documents
    tokenizer: TextTokenizer
    heldout: Tensor

    def batches(self, batch: int, seq_len: int, seed: int) -> TokenBatches:
        """Batches of documents in a row; a token is a target once."""
        return TokenBatches(self, self.documents.shuffled(seed), batch, seq_len)

    def heldout_batches(self, batch: int, seq_len: int, count: int) -> list[tuple[Tensor, Tensor]]:
        return spread_windows(self.heldout, batch, seq_len, count)

    def text_bytes(self, targets: Tensor) -> int:
        return self.tokenizer.text_bytes(targets)

    def about(self) -> dict[str, Any]:
        """Tokenizer, and the held-out text that was read: its size, digest and bytes a token."""
        size = self.text_bytes(self.heldout)
        return {
            "vocabulary": self.tokenizer.size,
            "tokenizer_sha256": self.tokenizer.sha256,
            "heldout_tokens": len(self.heldout),
            "heldout_bytes": size,
            "heldout_sha256": hashlib.sha256(self.heldout.numpy().tobytes()).hexdigest(),
            "bytes_a_token": size / len(self.heldout),
        }


class TokenBatches(Batches):
    """Endless batches of a corpus (TokenCorpus.batches): epoch after epoch, each in another order of its documents."""

    def __init__(self, corpus: TokenCorpus, dataset: Any, batch: int, seq_len: int) -> None:
        self._corpus = corpus
        self._dataset = dataset
        self._shape = (batch, seq_len)
        self._rest = torch.empty(0, dtype=torch.int32)  # tokens of documents that were read, not yet in a batch
        self._epoch = self._count = 0  # times that the dataset was read to its end; documents so far
        self._position: Mapping[str, Any] = dataset.state_dict()
        self._texts = self._documents()

    def __next__(self) -> tuple[Tensor, Tensor]:
        count = self._shape[0] * self._shape[1]
        while (missing := count + 1 - len(self._rest)) > 0:
            self._rest = torch.cat((self._rest, self._corpus.tokenizer.tokens(self._texts, missing)))
        taken, self._rest = self._rest[: count + 1].long(), self._rest[count:].clone()
        return taken[:-1].view(self._shape), taken[1:].view(self._shape)

    def _documents(self) -> Iterator[str]:
        """Texts without the held-out part, from the dataset's position on, without end."""
        while True:
            for text, held in self._corpus.documents.read(self._dataset):
                if text and not held:
                    self._count += 1
                    self._position = self._dataset.state_dict()
                    yield text
            if not self._count:
                source = self._corpus.documents.spec.source
                raise DataError(f"{source}: its training part has no text; give more text or shorten seq_len")
            self._epoch += 1
            self._dataset.set_epoch(self._epoch)

    def state_dict(self) -> dict[str, Any]:
        documents = {"dataset": self._position, "epoch": self._epoch, "count": self._count}
        return {"documents": documents, "rest": self._rest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        documents, self._rest = state["documents"], state["rest"]
        self._epoch, self._count, self._position = documents["epoch"], documents["count"], documents["dataset"]
        self._dataset.load_state_dict(self._position)
        self._dataset.set_epoch(self._epoch)
        self._texts = self._documents()

    def about(self) -> dict[str, Any]:
        """Documents read, one that was read again included, and epochs begun."""
        return {"documents": self._count, "epochs": self._epoch + 1}


def load_tokens(spec: DataSpec, vocabulary: int, batch: int, seq_len: int, beat: Beat) -> TokenCorpus:
    """Open a dataset, and read as many of its held-out documents as the held-out loss needs.

    Raises:
        DataError: tokenizer or dataset cannot be used, the tokenizer has more tokens than the model, or the held-out
            text is not longer than `seq_len` tokens.
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
    while found < wanted and len(part := tokenizer.tokens(texts, wanted - found)):
        parts.append(part)
        found += len(part)
    if found <= seq_len + 1:
        size = f"{found} tokens, too few for seq_len {seq_len}"
        raise DataError(f"{spec.source}: its held-out part has {size}; give more text or shorten seq_len")
    return TokenCorpus(documents, tokenizer, torch.cat(parts)[:wanted])


class Documents:
    """Texts of a dataset, of which a part is held out by content. Raises DataError if it cannot be read."""

    def __init__(self, spec: DataSpec) -> None:
        self.spec = spec
        with self._reading():
            self._dataset = _opened(spec)
        if (names := self._dataset.column_names) is not None:
            self._check_field(names)

    def heldout(self, beat: Beat) -> Iterator[str]:
        """Texts that training never sees, once, in the dataset's own order; `beat` is told of all that are read."""
        for number, (text, held) in enumerate(self.read(self._dataset)):
            beat("corpus", number)
            if text and held:
                yield text

    def shuffled(self, seed: int) -> Any:
        """The dataset in an order that `seed` decides: of row groups of Parquet files, whole files of others.

        A buffer, which would mix documents too, is no part of the state of `datasets`: with one, a resumed training
        would read other documents.
        """
        return self._dataset.reshard().shuffle(seed=seed, buffer_size=1, max_buffer_input_shards=1)

    def read(self, dataset: Any) -> Iterator[tuple[str, bool]]:
        """Each document's text, and whether it is held out; "" for one without text."""
        field = self.spec.text_field
        with self._reading():
            for document in dataset:
                self._check_field(document)
                text = document[field] or ""
                if not isinstance(text, str):
                    kind = type(text).__name__
                    raise DataError(f"data.text_field: {field!r}: is {kind} in a document; name a field of text")
                yield text, is_heldout(hashlib.sha256(text.encode()).digest(), self.spec.heldout)

    def _check_field(self, names: Any) -> None:
        if (field := self.spec.text_field) not in names:
            fields = ", ".join(map(repr, names))
            raise DataError(f"data.text_field: {field!r}: no field of the documents; use one of {fields}")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Raise what `datasets` raises as a DataError."""
        try:
            yield
        except (DataError, MemoryError):
            raise
        except StopIteration:
            raise DataError(f"{self.spec.source}: its files are empty; give some with documents") from None
        except Exception as err:
            reason, fix = _first_line(err), "mend or remove the file"
            if type(err).__name__ == "CastError":  # its first line is "Couldn't cast"
                reason, fix = (
                    "fields of one file are not those of the first",
                    "give files whose documents have the same",
                )
            if self.spec.dataset is not None:
                fix = "correct it, its subset or split; without a network give a folder with its files as data.path"
            raise DataError(f"{self.spec.source}: cannot be read ({reason}); {fix}") from None


def _opened(spec: DataSpec) -> Any:
    """The dataset, an IterableDataset."""
    try:
        import datasets
    except ImportError:
        raise DataError(f"{spec.source}: {missing_extra(['datasets'])}") from None
    datasets.logging.set_verbosity_error()  # it warns of the contents of a buffer that holds nothing
    if spec.dataset is not None:
        options = {"name": spec.subset, "split": spec.split, "revision": spec.revision}
        return datasets.load_dataset(spec.dataset, streaming=True, **options)
    assert spec.path is not None
    files: dict[str, list[str]] = {}  # by their reader
    for file in files_below(spec.path, "*"):
        suffix = Path(file.name.removesuffix(".gz")).suffix
        if (reader := _READERS.get(suffix)) is not None and not (reader == "parquet" and file.suffix == ".gz"):
            files.setdefault(reader, []).append(glob.escape(str(file.absolute())))
    if len(files) != 1:
        has = f"documents as {' and as '.join(files)}" if files else "no documents"
        raise DataError(f"{spec.source}: has {has}; give a file or folder of {', '.join(_READERS)}, of one kind")
    reader, names = files.popitem()
    return datasets.load_dataset(reader, data_files=names, split="train", streaming=True, **_OPTIONS[reader])


class TextTokenizer:
    """A byte-level BPE tokenizer: its size, digest and the id of the token after each document."""

    def __init__(self, tokenizer: Any, spec: DataSpec) -> None:
        tokenizer.encode_special_tokens = True  # text that looks like a special token is text
        tokenizer.no_truncation()  # its file may ask for either
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        added = tokenizer.get_added_tokens_decoder()
        self.size = max(vocabulary.values()) + 1
        if spec.end_token not in vocabulary:
            special = [repr(token.content) for token in added.values() if token.special]
            raise DataError(
                f"data.end_token: {spec.end_token!r}: is no token of {spec.tokenizer_source}; "
                f"use {', '.join(special[:8]) or 'one of its tokens'}"
            )
        self.end = vocabulary[spec.end_token]
        self.sha256 = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
        # Bytes of each token: a character of a byte-level token is a byte, added tokens are plain text.
        self._bytes = torch.zeros(self.size, dtype=torch.int64)
        for token, number in vocabulary.items():
            self._bytes[number] = len(added[number].content.encode()) if number in added else len(token)
        self._bytes[self.end] = 1
        if self.text_bytes(torch.tensor(self._encode([_SAMPLE])[0])) != len(_SAMPLE.encode()):
            raise DataError(
                f"{spec.tokenizer_source}: loses or changes bytes of text, so that its loss would be no loss of the "
                "text; use a byte-level BPE tokenizer such as GPT-2's"
            )

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text's tokens, without special ones; on as many threads as PyTorch has here."""
        return [found.ids for found in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def tokens(self, documents: Iterator[str], about: int) -> Tensor:
        """About as many tokens, of the next whole documents, int32; none if there are no more documents."""
        texts, size = [], 0
        for text in documents:
            texts.append(text)
            size += len(text)
            if size >= about * _BYTES_A_TOKEN:
                break
        ids = [number for found in self._encode(texts) for number in (*found, self.end)]
        return torch.tensor(ids, dtype=torch.int32)

    def text_bytes(self, ids: Tensor) -> int:
        return int(self._bytes[ids].sum())


def load_tokenizer(spec: DataSpec) -> TextTokenizer:
    """The tokenizer of a spec. Raises DataError if it cannot be loaded, lacks the end token, or is not byte-level."""
    os.environ.setdefault("RAYON_NUM_THREADS", str(torch.get_num_threads()))  # else each rank takes all cores
    try:
        import tokenizers
    except ImportError:
        raise DataError(f"{spec.tokenizer_source}: {missing_extra(['tokenizers'])}") from None
    fix = TOKENIZER_FIX
    try:
        if spec.tokenizer_path is None:
            fix = f"without a network give a folder with tokenizer.json of {_GPT2_REPOSITORY} as data.tokenizer_path"
            tokenizer = tokenizers.Tokenizer.from_pretrained(_GPT2_REPOSITORY)
        elif (file := tokenizer_file(spec.tokenizer_path)).name != "vocab.json":
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        else:
            model = tokenizers.models.BPE.from_file(str(file), str(file.with_name("merges.txt")))
            tokenizer = tokenizers.Tokenizer(model)
            tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        return TextTokenizer(tokenizer, spec)
    except (DataError, MemoryError):
        raise
    except Exception as err:  # the package raises bare ones, and those of the network
        raise DataError(f"{spec.tokenizer_source}: cannot be loaded ({_first_line(err)}); {fix}") from None


def _first_line(err: BaseException) -> str:
    """The first line of an exception's text; its class if it has none."""
    return next((line.strip() for line in str(err).splitlines() if line.strip()), type(err).__name__)
