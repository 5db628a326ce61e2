"""Files of points: their names, their store, copying a file into it and out of it.

The store is an fsspec URL. A file lies at `<run_id>/<index>/<attempt>/<name>`: the supervisor of its attempt writes it,
and readers open it below their own configured store, never at an address that comes from the database.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import fsspec
from fsspec.implementations.local import LocalFileSystem

from jobs.schema.plain_text import error_in_a_line
from jobs.specs.user_files import open_regular
from orchestrator.artifact_url import is_local
from orchestrator.errors import UserError
from orchestrator.execute.artifact_content import Content
from orchestrator.store.records import ArtifactData

_PIECE = 1 << 20
_BLOCK = 8 << 20  # bytes of an upload's part; S3 demands 5 MiB
_WITHOUT_FOLDERS = ("s3:", "s3a:", "gs:", "gcs:", "abfs:", "az:", "adl:", "oci:", "oss:")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


class ArtifactError(UserError):
    """A file that cannot be kept or read. One line: the name or path, the reason, the fix."""


@dataclass(frozen=True)
class Source:
    """A file to keep.

    Attributes:
        content: a text, or the path of a file.
        start: the first byte of the file to keep.
        stop: the byte after the last one; None: up to the end that the file has when it is opened.
        problem: why there is nothing to keep; "" otherwise.
    """

    name: str
    content: str | Path = ""
    start: int = 0
    stop: int | None = None
    problem: str = ""


def place(run_id: str, index: int, attempt: int, name: str) -> str:
    """The path of a file, relative to the store. Raises ArtifactError for a name that is not a plain file name."""
    return f"{run_id}/{index:04d}/{attempt}/{check_name(name)}"


def checkpoints_place(run_id: str, point_id: str) -> str:
    """The path of the folder with a point's checkpoints, relative to the store; the same for all attempts."""
    return f"{run_id}/{point_index(point_id):04d}/checkpoints"


def point_index(point_id: str) -> int:
    """The point's place in its run, from 0, as point ids end with it: `<run_id>/<index>`."""
    return int(point_id.rpartition("/")[2])


def check_name(name: str) -> str:
    """The name. Raises ArtifactError for one that is not a plain file name."""
    if not _NAME.fullmatch(name):
        raise ArtifactError(
            f"{_shown(name)}: is no plain file name; use at most 100 letters, digits, '.', '_', '-', no '.' first"
        )
    return name


def kept_in(run: Mapping[str, Any]) -> str:
    """The store or folder in which a run (a row of queries.run) kept its files, in words."""
    return run.get("artifact_store") or run.get("artifacts") or "an unknown folder"


class Place(NamedTuple):
    """A file's path, relative to the store, and what it consists of."""

    path: str
    point: int
    attempt: int
    name: str


class ArtifactStore:
    """The store at a URL (orchestrator.artifact_url.check). Contacts it when a file is written or read.

    For one thread: fsspec's connections are not shared.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._fs: Any = None

    def put(self, source: Source, path: str, sign: Callable[[], None] = lambda: None) -> ArtifactData:
        """Copy a file into the store, in pieces; nothing stays there of a copy that fails.

        Args:
            path: from `place`.
            sign: called after each piece; what it raises ends the copy.

        Raises:
            ArtifactError: the source cannot be read, or the store cannot be written.
        """
        if source.problem:
            raise ArtifactError(f"{_shown(source.name)}: {source.problem}")
        with _opened(source) as (file, size), self._writing(path) as out:
            seen = Content()
            while seen.size < size and (piece := _read(file, min(_PIECE, size - seen.size), source.name)):
                out.write(piece)
                seen.add(piece)
                sign()
            if seen.size < size:
                raise ArtifactError(f"{_shown(source.name)}: its file shrank from {size:,} bytes while it was copied")
        return seen.described(source.name, path)

    def files(self, run_id: str) -> list[Place]:
        """The files of a run's points in the store, also those that no record names. Raises ArtifactError."""
        target = self._at(run_id)

        def find() -> list[str]:
            with contextlib.suppress(FileNotFoundError):
                return list(self._filesystem().find(target, maxdepth=3))
            return []

        ours = re.compile(rf"(?:.*/)?({re.escape(run_id)}/([0-9]{{4,9}})/([1-9][0-9]{{0,8}})/({_NAME.pattern}))")
        found = filter(None, map(ours.fullmatch, self._attempt(run_id, find)))
        return sorted(Place(match[1], int(match[2]), int(match[3]), match[4]) for match in found)

    def describe(self, place: Place) -> ArtifactData:
        """The description of a file in the store, which is read. Raises ArtifactError."""
        seen = Content()
        with self._reading(place.path) as file:
            while piece := self._attempt(place.path, lambda: file.read(_PIECE)):
                seen.add(piece)
        return seen.described(place.name, place.path)

    def pieces(self, path: str, size: int, sha256: str) -> Iterator[bytes]:
        """The content of a file, in pieces. The last one comes only if size and hash are right.

        Args:
            path: as the database has it; it may be hostile.

        Raises:
            ArtifactError: a path out of the store, no such file, another content than was kept.
        """
        digest, held, done = hashlib.sha256(), b"", 0
        with self._reading(path) as file:
            while piece := self._attempt(path, lambda: file.read(_PIECE)):
                if held:
                    yield held
                digest.update(piece)
                held, done = piece, done + len(piece)
                if done > size:
                    break
        if done != size or digest.hexdigest() != sha256:
            raise ArtifactError(f"{path}: differs from the file that was kept (size or sha256); it was changed since")
        if held:
            yield held

    def exists(self, path: str) -> bool:
        """Whether the file is there. Raises ArtifactError for a path out of the store or a store that is away."""
        target = self._at(path)
        return bool(self._attempt(path, lambda: self._filesystem().exists(target)))

    def check_writable(self) -> None:
        """Write a file and remove it. Raises ArtifactError."""
        path = f".nsa-doctor-{os.getpid()}.txt"
        self.put(Source("probe.txt", "probe"), path)
        target = self._at(path)
        self._attempt(path, lambda: self._filesystem().rm_file(target))

    @contextlib.contextmanager
    def _writing(self, path: str) -> Iterator[_Reporting]:
        target = self._at(path)
        if is_local(self.url):
            with self._writing_locally(Path(target), path) as out:
                yield out
            return
        fs = self._filesystem()
        for _ in range(0 if self.url.startswith(_WITHOUT_FOLDERS) else 2):  # another slot may be making the same ones
            with contextlib.suppress(Exception):  # the write tells
                fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        out = self._attempt(path, lambda: fs.open(target, "wb", block_size=_BLOCK))
        try:
            yield _Reporting(out, path, self.url)
            self._attempt(path, out.close)
        except BaseException:
            _abandon(out)
            raise

    @contextlib.contextmanager
    def _writing_locally(self, target: Path, path: str) -> Iterator[_Reporting]:
        part = target.with_name(f".{target.name}.part")
        try:
            self._attempt(path, lambda: target.parent.mkdir(parents=True, exist_ok=True))
            with self._attempt(path, lambda: part.open("wb", buffering=0)) as out:
                yield _Reporting(out, path, self.url)
            self._attempt(path, lambda: part.replace(target))
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _reading(self, path: str) -> Iterator[BinaryIO]:
        target = self._at(path)
        if not is_local(self.url):
            file = self._attempt(path, lambda: self._found(path, self._filesystem().open, target, "rb", _BLOCK))
        else:
            root, found = Path(self._root()).resolve(), Path(target).resolve()
            if not found.is_relative_to(root):
                raise ArtifactError(f"{path}: lies outside the artifact store")
            file = self._attempt(path, lambda: self._found(path, lambda: open_regular(found, buffering=0)))
        with file:
            yield file

    def _at(self, path: str) -> str:
        """The path in the filesystem of a path relative to the store."""
        parts = path.split("/")
        if any(part in ("", ".", "..") for part in parts) or re.search(r"[\x00-\x1f\x7f\\]|::", path):
            raise ArtifactError(f"{_shown(path)}: is no path below the artifact store; it was not opened")
        return f"{self._root().rstrip('/')}/{path}"

    def _root(self) -> str:
        if is_local(self.url):
            return self.url.removeprefix("file://")
        return str(self._filesystem()._strip_protocol(self.url))

    def _filesystem(self) -> Any:
        if self._fs is None and is_local(self.url):
            self._fs = LocalFileSystem()
        elif self._fs is None:
            try:
                self._fs, _ = fsspec.url_to_fs(self.url, skip_instance_cache=True, use_listings_cache=False)
            except Exception as err:
                raise _unreachable(self.url, err) from None
        return self._fs

    def _found(self, path: str, opening: Callable[..., Any], *args: Any) -> Any:
        try:
            return opening(*args)
        except FileNotFoundError:
            raise ArtifactError(f"{path}: is not in the artifact store {self.url}") from None

    def _attempt(self, path: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except ArtifactError:
            raise
        except Exception as err:  # the packages of the schemes raise errors of their own
            raise ArtifactError(f"{path}: the artifact store {self.url} failed: {error_in_a_line(err)}") from None


class _Reporting:
    """A file being written whose errors name the store."""

    def __init__(self, file: Any, path: str, url: str) -> None:
        self._file, self._path, self._url = file, path, url

    def write(self, data: bytes) -> None:
        try:
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
        except Exception as err:
            raise ArtifactError(
                f"{self._path}: the artifact store {self._url} failed: {error_in_a_line(err)}"
            ) from None


def _abandon(file: Any) -> None:
    """Give up a file that is being written to a filesystem of fsspec."""
    with contextlib.suppress(Exception):
        file.discard()
    try:
        file.closed = True  # else the garbage collector would complete the upload
    except AttributeError:  # no upload in parts
        with contextlib.suppress(Exception):
            file.close()


@contextlib.contextmanager
def _opened(source: Source) -> Iterator[tuple[BinaryIO, int]]:
    """The source's bytes and their number."""
    if isinstance(source.content, str):
        data = source.content.encode(errors="replace")
        yield io.BytesIO(data), len(data)
        return
    try:
        file = open_regular(source.content, buffering=0)
    except (OSError, ValueError) as err:
        raise ArtifactError(f"{_shown(source.name)}: its file cannot be read: {error_in_a_line(err)}") from None
    with file:
        end = os.fstat(file.fileno()).st_size
        file.seek(source.start)
        yield file, min(end, end if source.stop is None else source.stop) - source.start


def _read(file: BinaryIO, size: int, name: str) -> bytes:
    try:
        return file.read(size)
    except OSError as err:
        raise ArtifactError(f"{_shown(name)}: its file cannot be read: {error_in_a_line(err)}") from None


def _unreachable(url: str, err: Exception) -> ArtifactError:
    return ArtifactError(
        f"the artifact store {url} cannot be reached: {error_in_a_line(err)}; check NSA_ARTIFACT_STORE"
    )


def _shown(text: str) -> str:
    """A text that may hold anything, in ASCII and short."""
    return ascii(text if len(text) <= 100 else text[:100] + "...")
