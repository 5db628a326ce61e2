"""The folder of a point's checkpoints at a URL: which are complete, whether one is damaged, removal.

A checkpoint is a folder `<number>-step-<step>`. Its manifest `complete.json` is written last; without one it is absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import posixpath
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import fsspec
from pydantic import BaseModel, ConfigDict, ValidationError

from jobs.schema.plain_text import error_in_a_line

MANIFEST = "complete.json"
OPTIONS = {"skip_instance_cache": True, "use_listings_cache": False}  # of fsspec: other processes write, too

_FOLDER = re.compile(r"(\d{6,})-step-\d+")
_PIECE = 8 << 20  # bytes read at a time
_PATIENCE_S = 10.0  # a network's file system may show a new file late


class CheckpointError(Exception):
    """The folder of the checkpoints, or one of them, cannot be used. One line."""


class WrittenFile(BaseModel):
    """A file of a checkpoint: its size [bytes] and the SHA-256 of its content."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    size: int
    sha256: str


class Manifest(BaseModel):
    """Description of a complete checkpoint, stored in it as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    number: int  # place in the order of saving, from 1; also of attempts that failed
    first: int  # number of the first checkpoint of the same training
    step: int  # steps done
    steps: int  # of the whole training; of a soak a number that is never reached
    ranks: int  # that saved it
    key: str  # of the point when it was saved (jobs.schema.point.Surroundings)
    heldout: float | None = None  # held-out loss at `step` [nat/byte], if it was measured
    begun: tuple[int, ...]  # steps at which its training began and was resumed, in the order of time
    foreign: int  # first steps that were done under another key
    text: str  # digest of the text that is learned
    route: Mapping[str, str] = {}  # kernels that ran, by branch
    files: Mapping[str, WrittenFile] = {}

    @property
    def name(self) -> str:
        return f"{self.number:06d}-step-{self.step}"

    def goes_on(self, key: str) -> bool:
        """Whether a point's training resumes from it; a training that other code finished begins anew."""
        return self.step < self.steps or self.key == key


@dataclass
class CheckpointReport:
    """History of the checkpoints of one attempt, on its first rank."""

    folder: str  # their URL
    waits_ms: list[float] = field(default_factory=list)  # that the training waited for each one
    times_ms: list[float] = field(default_factory=list)  # until each was complete
    sizes: list[int] = field(default_factory=list)  # [bytes]
    kept: list[str] = field(default_factory=list)  # names of the complete ones
    failures: list[str] = field(default_factory=list)  # one line for each that could not be saved
    damaged: list[str] = field(default_factory=list)  # or loaded


class CheckpointFolder:
    """The folder at a URL. Not made before a checkpoint is written; whatever reads it raises CheckpointError."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs: Any
        with self._reading():
            self._fs, self._root = fsspec.url_to_fs(self.url, **OPTIONS)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as err:  # the packages of the schemes raise errors of their own
            text = f"checkpoints: {self.url}: cannot be read: {error_in_a_line(err)}; mend the artifact store"
            raise CheckpointError(text) from None

    def names(self) -> dict[str, int]:
        """Numbers of complete and incomplete checkpoints by folder, newest first."""
        try:
            with self._reading():
                entries = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return {}
        names = (_FOLDER.fullmatch(posixpath.basename(str(entry).rstrip("/"))) for entry in entries)
        numbers = {name[0]: int(name[1]) for name in names if name is not None}
        return dict(sorted(numbers.items(), key=lambda item: item[1], reverse=True))

    def manifests(self) -> dict[str, Manifest | None]:
        """Folders with a manifest, newest first; None where that is torn or not ours."""
        found: dict[str, Manifest | None] = {}
        for name in self.names():
            try:
                with self._reading():
                    content = self._fs.cat_file(f"{self._root}/{name}/{MANIFEST}")
                manifest = Manifest.model_validate_json(content)
                found[name] = manifest if manifest.name == name else None
            except FileNotFoundError:
                continue
            except ValidationError:
                found[name] = None
        return found

    def complete(self) -> list[Manifest]:
        """Manifests of the complete checkpoints, newest first."""
        return [manifest for manifest in self.manifests().values() if manifest is not None]

    def mark(self, name: str) -> str:
        """Path of a new small file whose name begins so."""
        path = f"{self._root}/{name}-{uuid.uuid4().hex}"
        with self._reading():
            self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
            self._fs.pipe_file(path, b"mark")
        return path

    def starts(self, key: str) -> int:
        """Number of starts of ranks noted under a key: of those that were killed before they could save, too."""
        with self._reading():
            return len(self._fs.glob(f"{self._root}/starts/{key}-*"))

    def sees(self, mark: str) -> bool:
        """Whether a file that another host wrote is here, or comes within seconds."""
        deadline = time.monotonic() + _PATIENCE_S
        while not self._fs.exists(mark):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.5)
        return True

    def damage(self, manifest: Manifest, name: str, progress: Callable[[], None]) -> str | None:
        """The difference of a file from the one that was written, in words; None if it is the same."""
        digest, size = hashlib.sha256(), 0
        try:
            with self._fs.open(f"{self._root}/{manifest.name}/{name}", "rb") as file:
                while piece := file.read(_PIECE):
                    digest.update(piece)
                    size += len(piece)
                    progress()
        except Exception as err:
            return f"{name} cannot be read ({error_in_a_line(err)})"
        written = manifest.files[name]
        if size != written.size:
            return f"{name} has {size:,} bytes instead of {written.size:,}"
        return None if digest.hexdigest() == written.sha256 else f"{name} has another content (sha256)"

    def complete_with(self, manifest: Manifest) -> None:
        """Write the manifest, which makes its checkpoint complete. Raises what the filesystem raises."""
        path, content = (f"{self._root}/{manifest.name}/{MANIFEST}", manifest.model_dump_json(indent=1).encode())
        if self.url.startswith("file:"):
            with self._fs.open(f"{path}.part", "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # a name without content would count as a torn checkpoint
            self._fs.mv(f"{path}.part", path)
        else:  # an object appears whole or not at all; elsewhere a torn one is no JSON
            self._fs.pipe_file(path, content)

    def remove(self, name: str) -> None:
        """Remove a checkpoint, the manifest first, or a mark. Raises what the filesystem raises."""
        for path in (f"{self._root}/{name}/{MANIFEST}", f"{self._root}/{name}"):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._fs.rm(path, recursive=True)
