"""Documents of a dataset, streamed by the package `datasets`, whose own state is the position in them."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jobs.schema.point import Beat
from jobs.training.data.base import DataError, files_below, is_heldout
from jobs.training.data.spec import DataSpec, missing_extra
from jobs.training.data.tokenizer import first_line

_READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text"}
_OPTIONS = {
    "parquet": {"batch_size": 1000},  # rows; without it as many as the first row group has, and an empty one fails
    "json": {"encoding": "utf8", "encoding_errors": "replace"},  # under its usual name "utf-8" nothing is replaced
    "text": {"encoding_errors": "replace", "sample_by": "document"},
}


class Documents:
    """Texts of a dataset, of which a part is held out by content.

    Raises:
        DataError: the dataset cannot be read, or its documents have no such field.
    """

    def __init__(self, spec: DataSpec) -> None:
        self._spec = spec
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
        try:
            for document in dataset:
                text = self._text(document)
                yield text, is_heldout(hashlib.sha256(text.encode()).digest(), self._spec.heldout)
        except (DataError, MemoryError):
            raise
        except Exception as err:
            raise self._unreadable(err) from None

    def too_few(self, part: str, found: str) -> DataError:
        """The error of a part with too little text."""
        return DataError(f"{self._spec.source}: its {part} part has {found}; give more text or shorten seq_len")

    def _text(self, document: Mapping[str, Any]) -> str:
        field = self._spec.text_field
        if field not in document:
            raise self._no_field(document)
        if (text := document[field]) is None:
            return ""
        if not isinstance(text, str):
            kind = type(text).__name__
            raise DataError(f"data.text_field: {field!r}: is {kind} in a document; name a field of text")
        return text

    def _no_field(self, names: Any) -> DataError:
        spec = self._spec
        known = ", ".join(map(repr, names))
        return DataError(f"data.text_field: {spec.text_field!r}: no field of the documents; use one of {known}")

    def _unreadable(self, err: Exception) -> DataError:
        reason, fix = first_line(err), "mend or remove the file"
        if type(err).__name__ == "CastError":  # of `datasets`; its first line is "Couldn't cast"
            reason, fix = "fields of one file are not those of the first", "give files whose documents have the same"
        if self._spec.dataset is not None:
            fix = "correct it, its subset or split; without a network give a folder with its files as data.path"
        return DataError(f"{self._spec.source}: cannot be read ({reason}); {fix}")


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
                raise self._documents.too_few("training", "no text")
            self.epoch += 1
            self._begin()

    def state_dict(self) -> dict[str, Any]:
        """The position after the last text: that of the dataset, and the counts."""
        return {"dataset": self._position, "epoch": self.epoch, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position that `state_dict` gave, of the same dataset and seed."""
        self.epoch, self.count, self._position = state["epoch"], state["count"], state["dataset"]
        self._dataset.load_state_dict(self._position)
        self._begin()

    def _begin(self) -> None:
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
