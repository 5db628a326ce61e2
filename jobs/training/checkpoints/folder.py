"""The folder of a point's checkpoints at a URL: which are complete, whether one is damaged, removal.

A checkpoint is a folder `<number>-step-<step>`. Its manifest `complete.json` is written last; without one it is absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import posixpath
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import fsspec
from pydantic import ConfigDict, TypeAdapter, ValidationError

from jobs.schema.plain_text import error_in_a_line

MANIFEST = "complete.json"

_FOLDER = re.compile(r"(\d{6,})-step-(\d+)")
_STARTS = "starts"  # a file for each start: one that was killed before it could save anything counts, too
_PIECE = 8 << 20  # bytes read at a time


class CheckpointError(Exception):
    """The folder of the checkpoints, or one of them, cannot be used. One line."""


@dataclass(frozen=True)
class WrittenFile:
    """A file of a checkpoint: its size [bytes] and the SHA-256 of its content."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Description of a complete checkpoint, stored in it as JSON.

    Attributes:
        number: place in the order of saving, from 1; also of attempts that failed.
        first: number of the first checkpoint of the same training.
        step: steps done.
        steps: steps of the whole training; of a soak a number that is never reached.
        ranks: number of ranks that saved it.
        key: key of the point when it was saved (jobs.schema.point.Surroundings).
        heldout: held-out loss at `step` [nat/byte]; None if it was not measured.
        begun: steps at which its training began and was resumed, in the order of time.
        foreign: first steps that were done under another key.
        route: kernels that ran, by branch.
        files: its files by name.
        text: digest of the text that is learned.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    number: int
    first: int
    step: int
    steps: int
    ranks: int
    key: str
    heldout: float | None
    begun: tuple[int, ...]
    foreign: int
    text: str
    route: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, WrittenFile] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.number:06d}-step-{self.step}"

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())

    def is_gone_on_from(self, key: str) -> bool:
        """Whether the training of a point goes on from it: one that other code has finished begins anew."""
        return self.step < self.steps or self.key == key

    @classmethod
    def from_json(cls, content: bytes) -> Manifest | None:
        """The manifest in a file's content; None if it is torn or not ours."""
        try:
            found = _MANIFEST.validate_json(content)
        except ValidationError:
            return None
        return found if found.files and 1 <= found.first <= found.number else None


_MANIFEST = TypeAdapter(Manifest)


class CheckpointFolder:
    """The folder at a URL. Contacted when a method needs it; not made before a checkpoint is written."""

    def __init__(self, url: str) -> None:
        """Raises CheckpointError for a URL that fsspec cannot open."""
        self.url = url.rstrip("/")
        try:
            self._fs: Any = fsspec.url_to_fs(self.url, **filesystem_options())[0]
        except Exception as err:  # the packages of the schemes raise errors of their own
            raise self._failed(err) from None
        self._root = str(self._fs._strip_protocol(self.url))

    def names(self) -> list[str]:
        """Folders of complete and incomplete checkpoints, newest first. Raises CheckpointError."""
        try:
            entries = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        except Exception as err:
            raise self._failed(err) from None
        names = [posixpath.basename(str(entry).rstrip("/")) for entry in entries]
        return sorted((name for name in names if _FOLDER.fullmatch(name)), key=number_of, reverse=True)

    def complete(self) -> list[Manifest]:
        """Manifests of the complete checkpoints, newest first. Raises CheckpointError."""
        return [manifest for _, manifest in self.manifests() if manifest is not None]

    def manifests(self) -> list[tuple[str, Manifest | None]]:
        """Folders with a manifest, newest first; None where that is torn or not ours. Raises CheckpointError."""
        found = []
        for name in self.names():
            try:
                manifest = Manifest.from_json(self._fs.cat_file(f"{self._root}/{name}/{MANIFEST}"))
            except FileNotFoundError:
                continue
            except Exception as err:
                raise self._failed(err) from None
            found.append((name, manifest if manifest is not None and manifest.name == name else None))
        return found

    def step_to_go_on_from(self, key: str) -> int | None:
        """Step of the newest complete checkpoint; None if the training of a point begins anew. Raises CheckpointError.

        Args:
            key: the point's (jobs.schema.point.Surroundings).
        """
        newest = next(iter(self.complete()), None)
        return newest.step if newest is not None and newest.is_gone_on_from(key) else None

    def note_start(self, key: str) -> None:
        """Note that the ranks of a point are started. Raises CheckpointError."""
        try:
            self._fs.makedirs(f"{self._root}/{_STARTS}", exist_ok=True)
            self._fs.pipe_file(f"{self._root}/{_STARTS}/{key}-{uuid.uuid4().hex}", b"started")
        except Exception as err:
            raise self._failed(err) from None

    def starts(self, key: str) -> int:
        """Number of starts noted under a key. Raises CheckpointError."""
        try:
            return len(self._fs.glob(f"{self._root}/{_STARTS}/{key}-*"))
        except Exception as err:
            raise self._failed(err) from None

    def damage(self, manifest: Manifest, name: str, sign: Callable[[], None]) -> str | None:
        """The difference of a file from the one that was written, in words; None if it is the same.

        Args:
            name: of the file.
            sign: called after each piece that was read.
        """
        digest, size = hashlib.sha256(), 0
        try:
            with self._fs.open(f"{self._root}/{manifest.name}/{name}", "rb") as file:
                while piece := file.read(_PIECE):
                    digest.update(piece)
                    size += len(piece)
                    sign()
        except Exception as err:
            return f"{name} cannot be read ({error_in_a_line(err)})"
        if size != manifest.files[name].size:
            return f"{name} has {size:,} bytes instead of {manifest.files[name].size:,}"
        return None if digest.hexdigest() == manifest.files[name].sha256 else f"{name} has another content (sha256)"

    def complete_with(self, manifest: Manifest) -> None:
        """Write the manifest, which makes its checkpoint complete. Raises what the filesystem raises."""
        folder = f"{self._root}/{manifest.name}"
        content = json.dumps(asdict(manifest), indent=1).encode()
        if self.url.startswith("file:"):
            with self._fs.open(f"{folder}/.{MANIFEST}.part", "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # a name without content would count as a torn checkpoint
            self._fs.mv(f"{folder}/.{MANIFEST}.part", f"{folder}/{MANIFEST}")
        else:  # an object appears whole or not at all; elsewhere a torn one is no JSON
            self._fs.pipe_file(f"{folder}/{MANIFEST}", content)

    def remove(self, name: str) -> None:
        """Remove a checkpoint, the manifest first. Raises what the filesystem raises."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._root}/{name}/{MANIFEST}")
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(f"{self._root}/{name}", recursive=True)

    def _failed(self, err: Exception) -> CheckpointError:
        return CheckpointError(
            f"checkpoints: {self.url}: cannot be read: {error_in_a_line(err)}; mend the artifact store"
        )


def filesystem_options() -> dict[str, bool]:
    """fsspec's options: a connection of its own, and listings that are not remembered."""
    return {"skip_instance_cache": True, "use_listings_cache": False}


def number_of(name: str) -> int:
    """The number in the name of a checkpoint's folder."""
    match = _FOLDER.fullmatch(name)
    assert match is not None
    return int(match[1])
