"""The folder of a point's checkpoints at a URL: which are complete, whether one is damaged, removal.

A checkpoint is a folder `<number>-step-<step>`. Its manifest `complete.json` is written last; without one it is absent.
"""

import contextlib
import posixpath
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import fsspec
from pydantic import BaseModel, ConfigDict, ValidationError

from jobs.schema.plain_text import error_in_a_line

MANIFEST = "complete.json"
OPTIONS = {"skip_instance_cache": True, "use_listings_cache": False}  # of fsspec: other processes write, too

_FOLDER = re.compile(r"(\d{6,})-step-\d+")
_PATIENCE_S = 10.0  # a network's file system may show a new file late


class CheckpointError(Exception):
    """The folder of the checkpoints, or one of them, cannot be used. One line."""


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
    files: Mapping[str, int] = {}  # sizes [bytes] of its files

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
        """Folders with a manifest, newest first; None where that is torn."""
        found: dict[str, Manifest | None] = {}
        for name in self.names():
            try:
                with self._reading():
                    content = self._fs.cat_file(f"{self._root}/{name}/{MANIFEST}")
                found[name] = Manifest.model_validate_json(content)
            except FileNotFoundError:
                continue
            except ValidationError:
                found[name] = None
        return found

    def complete(self) -> list[Manifest]:
        """Manifests of the complete checkpoints, newest first."""
        return [manifest for manifest in self.manifests().values() if manifest is not None]

    def note_start(self, key: str) -> None:
        """Note a start of ranks under a key: of those that are killed before they can save, too."""
        with self._reading():
            self._fs.makedirs(f"{self._root}/starts", exist_ok=True)
            self._fs.pipe_file(f"{self._root}/starts/{key}-{uuid.uuid4().hex}", b"start")

    def starts(self, key: str) -> int:
        """Number of starts of ranks noted under a key."""
        with self._reading():
            return len(self._fs.glob(f"{self._root}/starts/{key}-*"))

    def sizes(self, name: str, files: Iterable[str]) -> dict[str, int]:
        """Sizes [bytes] of a checkpoint's files, which ranks have just written, perhaps on other hosts."""
        deadline, found = time.monotonic() + _PATIENCE_S, dict[str, int]()
        for file in files:
            while not self._fs.exists(f"{self._root}/{name}/{file}"):
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"NSA_ARTIFACT_STORE: the first rank's node does not see {file}, which a rank wrote there; "
                        "name a store that all nodes reach"
                    )
                time.sleep(0.5)
            found[file] = self._fs.size(f"{self._root}/{name}/{file}")
        return found

    def damage(self, manifest: Manifest) -> str | None:
        """The first file that is gone or has another size than when it was written, in words; None without one."""
        for name, written in manifest.files.items():
            try:
                size = self._fs.size(f"{self._root}/{manifest.name}/{name}")
            except Exception as err:
                return f"{name} cannot be read ({error_in_a_line(err)})"
            if size != written:
                return f"{name} has {size:,} bytes instead of {written:,}"
        return None

    def complete_with(self, manifest: Manifest) -> None:
        """Write the manifest, which makes its checkpoint complete; a torn one is no JSON. Raises the filesystem's."""
        self._fs.pipe_file(f"{self._root}/{manifest.name}/{MANIFEST}", manifest.model_dump_json(indent=1).encode())

    def remove(self, name: str) -> None:
        """Remove a checkpoint, the manifest first. Raises what the filesystem raises."""
        for path in (f"{self._root}/{name}/{MANIFEST}", f"{self._root}/{name}"):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._fs.rm(path, recursive=True)
