"""The section `data` of a training's spec. A tokenizer's size is read from its files, without its package."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from jobs.specs.fields import Count
from jobs.specs.spec import SpecError, Strict
from jobs.specs.user_files import open_regular

GPT2 = 50_257  # tokens of GPT-2's vocabulary, with the end of text
TOKENIZER_FIX = "give the tokenizer.json of a byte-level BPE tokenizer, or a folder with vocab.json and merges.txt"
_MULTIPLE = 64  # of a model's vocabulary: GEMMs of other widths are slower
_PACKAGES = ("datasets", "tokenizers")


class DataSpec(Strict):
    """Text to learn from: the bytes of files, or with a tokenizer the tokens of documents."""

    path: Path | None = Field(
        default=None,
        strict=False,
        description="folder or file; None: Python's standard library. With a tokenizer: documents as .parquet, .jsonl, "
        ".json or .txt (a file is a document), the last three also as .gz",
    )
    dataset: str | None = Field(default=None, min_length=1, description="of the Hugging Face Hub, streamed; no path")
    subset: str | None = Field(default=None, min_length=1, description="of the dataset, e.g. sample-10BT")
    split: str = Field(default="train", min_length=1, description="of the dataset")
    revision: str | None = Field(default=None, min_length=1, description="commit or tag of the dataset; None: newest")
    text_field: str = Field(default="text", min_length=1, description="field of a document that has its text")
    tokenizer: Literal["gpt2"] | None = Field(default=None, description="tokenizer of the Hugging Face Hub")
    tokenizer_path: Path | None = Field(
        default=None,
        strict=False,
        description="instead of tokenizer: tokenizer.json, or a folder with it or with vocab.json and merges.txt",
    )
    end_token: str = Field(default="<|endoftext|>", min_length=1, description="token after each document")
    pack: bool = Field(default=False, description="no document sees another, and positions begin with each")
    heldout: float = Field(default=0.1, gt=0, lt=1, description="share of the text that is never trained on")
    heldout_batches: Count = Field(default=8, description="batches that the held-out loss is taken over")

    @model_validator(mode="after")
    def _check_sources(self) -> DataSpec:
        """Refuse two sources, documents without a tokenizer, a tokenizer without documents, and idle settings."""
        if self.dataset is not None and self.path is not None:
            raise ValueError(f"path: {str(self.path)!r}: has no effect beside dataset; leave one of them out")
        if self.tokenizer is not None and self.tokenizer_path is not None:
            raise ValueError(f"tokenizer: {self.tokenizer!r}: has no effect beside tokenizer_path; leave one out")
        if self.dataset is not None and not self.tokenized:
            raise ValueError(f"dataset: {self.dataset!r}: needs a tokenizer; add 'tokenizer: gpt2' or a tokenizer_path")
        if self.tokenized and self.dataset is None and self.path is None:
            source = self.tokenizer_source.removeprefix("data.")
            raise ValueError(f"{source}: there are no documents; add a dataset, or the path of some")
        idle = {} if self.dataset else dict.fromkeys(("subset", "split", "revision"), "dataset")
        idle |= {} if self.tokenized else dict.fromkeys(("text_field", "end_token", "pack"), "a tokenizer")
        for name, owner in idle.items():
            if (value := getattr(self, name)) != DataSpec.model_fields[name].default:
                raise ValueError(f"{name}: {value!r}: has no effect without {owner}; leave it out")
        return self

    @property
    def tokenized(self) -> bool:
        """Whether text is read as documents and their tokens, not as bytes."""
        return self.tokenizer is not None or self.tokenizer_path is not None

    @property
    def source(self) -> str:
        """Field and value that name the documents, for messages."""
        return f"data.path: {str(self.path)!r}" if self.dataset is None else f"data.dataset: {self.dataset!r}"

    @property
    def tokenizer_source(self) -> str:
        """Field and value that name the tokenizer, for messages."""
        if self.tokenizer_path is None:
            return f"data.tokenizer: {self.tokenizer!r}"
        return f"data.tokenizer_path: {str(self.tokenizer_path)!r}"

    def vocabulary(self) -> int | None:
        """Vocabulary that a model of this text needs: that of the tokenizer, up to a multiple of 64; None for bytes.
        Raises SpecError: the extra `data` is not installed here, or the tokenizer's files cannot be read."""
        if not self.tokenized:
            return None
        if lacking := [name for name in _PACKAGES if find_spec(name) is None]:
            raise SpecError(f"{self.tokenizer_source}: {missing_extra(lacking)}")
        size = GPT2
        if self.tokenizer_path is not None:
            file = tokenizer_file(self.tokenizer_path)
            try:
                with open_regular(file) as source:  # a pipe would be waited for
                    content = json.load(source)
                if file.name != "vocab.json":
                    added = {token["content"]: token["id"] for token in content["added_tokens"]}
                    content = content["model"]["vocab"] | added
                size = max(content.values()) + 1
            except (OSError, ValueError, TypeError, LookupError, AttributeError) as err:
                reason = err.strerror if isinstance(err, OSError) else "is no tokenizer's"
                raise SpecError(
                    f"{self.tokenizer_source}: {file.name} cannot be read here ({reason}), and the vocabulary depends "
                    f"on it; {TOKENIZER_FIX}"
                ) from None
        return -(-size // _MULTIPLE) * _MULTIPLE


def tokenizer_file(path: Path) -> Path:
    """The file of a tokenizer that lists its tokens: tokenizer.json, else vocab.json, of a folder."""
    if not path.is_dir():
        return path
    whole = path / "tokenizer.json"
    return whole if whole.exists() else path / "vocab.json"


def missing_extra(packages: list[str]) -> str:
    """Message about packages of the extra `data` that are not installed."""
    return f"needs the extra 'data', which lacks {' and '.join(packages)} here; pip install 'nsa-bench[data]'"
