"""A corpus of tokens: documents one after the other, each followed by the end token.

The package `datasets` streams the documents, and its own state is the position in them.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jobs.schema.plain_text import error_in_a_line
from jobs.schema.point import Beat
from jobs.training.data.corpus import Batches, Corpus, DataError, few_texts, files_below, heldout_at, spread_windows
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


def load_tokens(spec: DataSpec, vocabulary: int, batch: int, seq_len: int, seed: int, beat: Beat) -> Corpus:
    """Open a dataset, and read as many of its held-out documents as the held-out loss needs.

    The batches are of documents in a row, in an order that `seed` decides; a token is a target once.

    Raises:
        DataError: tokenizer or dataset cannot be used, the tokenizer has more tokens than the model, or the held-out
            text is not longer than `seq_len` tokens.
    """
    tokenizer = Tokenizer(spec)
    if tokenizer.size > vocabulary:
        raise DataError(
            f"{spec.tokenizer_source}: has {tokenizer.size} tokens, but the model was planned for {vocabulary}: it is "
            "another one on the host that planned; give the same on all hosts"
        )
    dataset = open_dataset(spec)
    wanted = spec.heldout_batches * batch * (seq_len + 1)
    parts, found, texts = [], 0, heldout_texts(dataset, spec, beat)
    while found < wanted and len(part := tokenizer.tokens(texts, wanted - found)):
        parts.append(part)
        found += len(part)
    if found <= seq_len + 1:
        size = f"{found} tokens, too few for seq_len {seq_len}"
        raise DataError(
            f"{spec.source}: its held-out part has {size}; give more text, in documents that differ, or shorten seq_len"
        )
    heldout = torch.cat(parts)[:wanted]
    size = int(tokenizer.token_bytes[heldout].sum())
    about = {
        "vocabulary": tokenizer.size,
        "tokenizer_sha256": tokenizer.sha256,
        "heldout_tokens": len(heldout),
        "heldout_bytes": size,
        "heldout_sha256": hashlib.sha256(heldout.numpy().tobytes()).hexdigest(),
        "bytes_a_token": size / len(heldout),
    }
    batches = TokenBatches(spec, shuffled(dataset, seed), tokenizer, batch, seq_len)
    windows = spread_windows(heldout, batch, seq_len, spec.heldout_batches)
    return Corpus(batches, windows, about, tokenizer.token_bytes, tokenizer.end if spec.pack else None)


class TokenBatches(Batches):
    """Batches of a dataset's documents: epoch after epoch, each in another order."""

    def __init__(self, spec: DataSpec, dataset: Any, tokenizer: Tokenizer, batch: int, seq_len: int) -> None:
        self._spec, self._dataset, self._tokenizer = spec, dataset, tokenizer
        self._shape = (batch, seq_len)
        self._rest = torch.empty(0, dtype=torch.int32)  # tokens of documents that were read, not yet in a batch
        self.about = {"documents": 0, "epochs": 1}  # read, one that was read again included; begun
        self._position: Mapping[str, Any] = dataset.state_dict()
        self._texts = self._documents()

    def __next__(self) -> tuple[Tensor, Tensor]:
        count = self._shape[0] * self._shape[1]
        while (missing := count + 1 - len(self._rest)) > 0:
            self._rest = torch.cat((self._rest, self._tokenizer.tokens(self._texts, missing)))
        taken, self._rest = self._rest[: count + 1].long(), self._rest[count:].clone()
        return taken[:-1].view(self._shape), taken[1:].view(self._shape)

    def _documents(self) -> Iterator[str]:
        """Texts without the held-out part, from the dataset's position on, without end."""
        while True:
            for text, _ in read(self._dataset, self._spec):
                if text:
                    self.about["documents"] += 1
                    self._position = self._dataset.state_dict()
                    yield text
            if not self.about["documents"]:
                raise DataError(
                    f"{self._spec.source}: its training part has no text; give more, in documents that differ"
                )
            self._dataset.set_epoch(self.about["epochs"])
            self.about["epochs"] += 1

    def state_dict(self) -> dict[str, Any]:
        read, epoch = self.about["documents"], self.about["epochs"] - 1
        return {"documents": {"dataset": self._position, "epoch": epoch, "count": read}, "rest": self._rest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        documents, self._rest, self._position = state["documents"], state["rest"], state["documents"]["dataset"]
        self.about = {"documents": documents["count"], "epochs": documents["epoch"] + 1}
        self._dataset.load_state_dict(self._position)
        self._dataset.set_epoch(documents["epoch"])
        self._texts = self._documents()


def open_dataset(spec: DataSpec) -> Any:
    """The documents, an IterableDataset. Raises DataError if they cannot be read."""
    try:
        import datasets
    except ImportError:
        raise DataError(f"{spec.source}: {missing_extra(['datasets'])}") from None

    datasets.logging.set_verbosity_error()  # it warns of the contents of a buffer that holds nothing
    with _reading(spec):
        if spec.dataset is not None:
            options = {"name": spec.subset, "split": spec.split, "revision": spec.revision}
            dataset = datasets.load_dataset(spec.dataset, streaming=True, **options)
        else:
            assert spec.path is not None
            files: dict[str, list[str]] = {}  # by their reader
            for file in files_below(spec.path, "*"):
                reader = _READERS.get(Path(file.name.removesuffix(".gz")).suffix)
                if reader is not None and not (reader == "parquet" and file.suffix == ".gz"):
                    files.setdefault(reader, []).append(glob.escape(str(file.absolute())))
            if len(files) != 1:
                has = f"documents as {' and as '.join(files)}" if files else "no documents"
                kinds = ", ".join(_READERS)
                raise DataError(f"{spec.source}: has {has}; give a file or folder of {kinds}, of one kind")
            reader, names = files.popitem()
            options = {"split": "train", "streaming": True, **_OPTIONS[reader]}
            dataset = datasets.load_dataset(reader, data_files=names, **options)
    return dataset


def shuffled(dataset: Any, seed: int) -> Any:
    """The dataset in an order that `seed` decides: of row groups of Parquet files, whole files of others.

    A buffer, which would mix documents too, is no part of the state of `datasets`: with one, a resumed training would
    read other documents.
    """
    return dataset.reshard().shuffle(seed=seed, buffer_size=1, max_buffer_input_shards=1)


def heldout_texts(dataset: Any, spec: DataSpec, beat: Beat) -> Iterator[str]:
    """Texts that training never sees, once, in the dataset's own order; `beat` is told of all that are read."""
    for number, (_, text) in enumerate(read(dataset, spec)):
        beat("corpus", number)
        if text:
            yield text


def read(dataset: Any, spec: DataSpec) -> Iterator[tuple[str, str]]:
    """The part of each document to learn from, and the held-out one; only few files, each a document, have both."""
    field, few = spec.text_field, spec.path is not None and few_texts(spec.path)
    with _reading(spec):
        for document in dataset:
            if field not in document:
                fields = ", ".join(map(repr, document))
                raise DataError(f"data.text_field: {field!r}: no field of the documents; use one of {fields}")
            text = document[field] or ""
            if not isinstance(text, str):
                kind = type(text).__name__
                raise DataError(f"data.text_field: {field!r}: is {kind} in a document; name a field of text")
            start = heldout_at(text, hashlib.sha256(text.encode()).digest(), spec.heldout, few)
            yield text[:start], text[start:]


@contextmanager
def _reading(spec: DataSpec) -> Iterator[None]:
    """Raise what `datasets` raises as a DataError."""
    try:
        yield
    except (DataError, MemoryError):
        raise
    except StopIteration:
        raise DataError(f"{spec.source}: its files are empty; give some with documents") from None
    except Exception as err:
        reason, fix = error_in_a_line(err), "mend or remove the file"
        if type(err).__name__ == "CastError":  # its first line is "Couldn't cast"
            reason = "fields of one file are not those of the first"
            fix = "give files whose documents have the same"
        if spec.dataset is not None:
            fix = "correct it, its subset or split; without a network give a folder with its files as data.path"
        raise DataError(f"{spec.source}: cannot be read ({reason}); {fix}") from None


class Tokenizer:
    """A byte-level BPE tokenizer: its size, digest and the bytes that each token stands for, int64 [size].

    Raises:
        DataError: it cannot be loaded, lacks the end token, or is not byte-level.
    """

    def __init__(self, spec: DataSpec) -> None:
        os.environ.setdefault("RAYON_NUM_THREADS", str(torch.get_num_threads()))  # else each rank takes all cores
        try:
            self._open(spec)
        except ImportError:
            raise DataError(f"{spec.tokenizer_source}: {missing_extra(['tokenizers'])}") from None
        except (DataError, MemoryError):
            raise
        except Exception as err:  # the package raises bare ones, and those of the network
            fix = TOKENIZER_FIX
            if spec.tokenizer_path is None:
                fix = (
                    f"without a network give a folder with tokenizer.json of {_GPT2_REPOSITORY} as data.tokenizer_path"
                )
            raise DataError(f"{spec.tokenizer_source}: cannot be loaded ({error_in_a_line(err)}); {fix}") from None

    def _open(self, spec: DataSpec) -> None:
        import tokenizers

        tokenizer: Any
        if spec.tokenizer_path is None:
            tokenizer = tokenizers.Tokenizer.from_pretrained(_GPT2_REPOSITORY)
        elif (file := tokenizer_file(spec.tokenizer_path)).name != "vocab.json":
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        else:
            model = tokenizers.models.BPE.from_file(str(file), str(file.with_name("merges.txt")))
            tokenizer = tokenizers.Tokenizer(model)
            tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer = tokenizer
        tokenizer.encode_special_tokens = True  # text that looks like a special token is text
        tokenizer.no_truncation()  # its file may ask for either
        tokenizer.no_padding()
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
        # A character of a byte-level token is a byte, added tokens are plain text; the end of a document counts as one.
        self.token_bytes = torch.zeros(self.size, dtype=torch.int64)
        for token, number in vocabulary.items():
            self.token_bytes[number] = len(added[number].content.encode()) if number in added else len(token)
        self.token_bytes[self.end] = 1
        ids = self.tokens(iter([_SAMPLE]), 0)[:-1]
        if int(self.token_bytes[ids].sum()) != len(_SAMPLE.encode()):
            raise DataError(
                f"{spec.tokenizer_source}: loses or changes bytes of text, so that its loss would be no loss of the "
                "text; use a byte-level BPE tokenizer such as GPT-2's"
            )

    def tokens(self, documents: Iterator[str], about: int) -> Tensor:
        """About as many tokens, of the next whole documents, int32; none if there are no more documents."""
        texts, size = [], 0
        for text in documents:
            texts.append(text)
            size += len(text)
            if size >= about * _BYTES_A_TOKEN:
                break
        found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)  # on as many threads as PyTorch has
        return torch.tensor([number for each in found for number in (*each.ids, self.end)], dtype=torch.int32)
