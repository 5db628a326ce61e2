"""A corpus of tokens: documents one after the other, each followed by the end token.

The package `datasets` streams the documents, and its own state is the position in them.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jobs.schema.point import Beat
from jobs.training.data.base import Batches, DataError, files_below, is_heldout, spread_windows
from jobs.training.data.spec import DataSpec, missing_extra, tokenizer_file

_READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text"}
_OPTIONS = {
    "parquet": {"batch_size": 1000},  # rows; without it as many as the first row group has, and an empty one fails
    "json": {"encoding": "utf8", "encoding_errors": "replace"},  # under its usual name "utf-8" nothing is replaced
    "text": {"encoding_errors": "replace", "sample_by": "document"},
}
_BYTES_A_TOKEN = 4  # about; decides only how many documents are tokenized together


@dataclass(frozen=True)
class TokenCorpus:
    """Tokens of a dataset's documents: held-out ones in memory, int32 [tokens], those to learn from streamed."""

    documents: Documents
    tokenizer: TextTokenizer
    heldout: Tensor

    def batches(self, batch: int, seq_len: int, seed: int) -> TokenBatches:
        """Endless (tokens, targets), int64 [batch, seq_len] each, of documents in a row; a token is a target once."""
        return TokenBatches(self.documents.training(seed), self.tokenizer, batch, seq_len)

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
    """Endless batches of a corpus (TokenCorpus.batches)."""

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
        return {"documents": self._documents.state_dict(), "rest": self._rest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
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
        size = f"{found} tokens, too few for seq_len {seq_len}"
        raise DataError(f"{spec.source}: its held-out part has {size}; give more text or shorten seq_len")
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


class Documents:
    """Texts of a dataset, of which a part is held out by content.

    Raises:
        DataError: the dataset cannot be read, or its documents have no such field.
    """

    def __init__(self, spec: DataSpec) -> None:
        self.spec = spec
        try:
            self._dataset = _opened(spec)
        except (DataError, MemoryError):
            raise
        except StopIteration:
            raise DataError(f"{spec.source}: its files are empty; give some with documents") from None
        except Exception as err:
            raise self._unreadable(err) from None
        if (names := self._dataset.column_names) is not None and spec.text_field not in names:
            raise self._no_field(names)

    def heldout(self, beat: Beat) -> Iterator[str]:
        """Texts that training never sees, once, in the dataset's own order; `beat` is told of all that are read."""
        for number, (text, held) in enumerate(self.read(self._dataset)):
            beat("corpus", number)
            if text and held:
                yield text

    def training(self, seed: int) -> TrainingDocuments:
        """Texts to learn from, without end, in an order that `seed` decides.

        Shuffled are row groups of Parquet files, and whole files of other formats. A buffer, which would mix documents
        too, is no part of the state of `datasets`: with one, a resumed training would read other documents.
        """
        shuffled = self._dataset.reshard().shuffle(seed=seed, buffer_size=1, max_buffer_input_shards=1)
        return TrainingDocuments(self, shuffled)

    def read(self, dataset: Any) -> Iterator[tuple[str, bool]]:
        """Each document's text, and whether it is held out; "" for one without text."""
        field = self.spec.text_field
        try:
            for document in dataset:
                if field not in document:
                    raise self._no_field(document)
                text = document[field]
                if not isinstance(text, str | None):
                    kind = type(text).__name__
                    raise DataError(f"data.text_field: {field!r}: is {kind} in a document; name a field of text")
                text = text or ""
                yield text, is_heldout(hashlib.sha256(text.encode()).digest(), self.spec.heldout)
        except (DataError, MemoryError):
            raise
        except Exception as err:
            raise self._unreadable(err) from None

    def _no_field(self, names: Any) -> DataError:
        fields = ", ".join(map(repr, names))
        return DataError(f"data.text_field: {self.spec.text_field!r}: no field of the documents; use one of {fields}")

    def _unreadable(self, err: Exception) -> DataError:
        reason, fix = first_line(err), "mend or remove the file"
        if type(err).__name__ == "CastError":  # of `datasets`; its first line is "Couldn't cast"
            reason, fix = "fields of one file are not those of the first", "give files whose documents have the same"
        if self.spec.dataset is not None:
            fix = "correct it, its subset or split; without a network give a folder with its files as data.path"
        return DataError(f"{self.spec.source}: cannot be read ({reason}); {fix}")


class TrainingDocuments(Iterator[str]):
    """Texts of a dataset without its held-out part, epoch after epoch, each in another order.

    Attributes:
        epoch: number of times that the dataset was read to its end.
        count: texts so far.
    """

    def __init__(self, documents: Documents, dataset: Any) -> None:
        self._documents = documents
        self._dataset = dataset
        self.epoch = self.count = 0
        self._position: Mapping[str, Any] = dataset.state_dict()
        self._texts = documents.read(dataset)

    def __next__(self) -> str:
        while True:
            for text, held in self._texts:
                if text and not held:
                    self.count += 1
                    self._position = self._dataset.state_dict()
                    return text
            if not self.count:
                source = self._documents.spec.source
                raise DataError(f"{source}: its training part has no text; give more text or shorten seq_len")
            self.epoch += 1
            self._begin_epoch()

    def state_dict(self) -> dict[str, Any]:
        return {"dataset": self._position, "epoch": self.epoch, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position that `state_dict` gave, of the same dataset and seed."""
        self.epoch, self.count, self._position = state["epoch"], state["count"], state["dataset"]
        self._dataset.load_state_dict(self._position)
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._dataset.set_epoch(self.epoch)
        self._texts = self._documents.read(self._dataset)


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
    reader, files = _files(spec, spec.path)
    return datasets.load_dataset(reader, data_files=files, split="train", streaming=True, **_OPTIONS[reader])


def _files(spec: DataSpec, root: Path) -> tuple[str, list[str]]:
    """The documents' files at or below a path as `datasets` takes them, and the name of its reader for them."""
    found: dict[str, list[str]] = {}
    for file in files_below(root, "*"):
        suffix = Path(file.name.removesuffix(".gz")).suffix
        if (reader := _READERS.get(suffix)) is not None and not (reader == "parquet" and file.suffix == ".gz"):
            found.setdefault(reader, []).append(glob.escape(str(file.absolute())))
    if len(found) != 1:
        has = f"documents as {' and as '.join(found)}" if found else "no documents"
        raise DataError(f"{spec.source}: has {has}; give a file or folder of {', '.join(_READERS)}, of one kind")
    return found.popitem()


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
