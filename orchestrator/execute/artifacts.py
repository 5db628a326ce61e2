"""Files of points: their names, their store, copying a file out of it and, in the background as it may hang, into it.

The store is an fsspec URL. A file lies at `<run_id>/<index>/<attempt>/<name>`: the supervisor of its attempt writes it,
and readers open it below their own configured store, never at an address that comes from the database.
"""

import contextlib
import hashlib
import io
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from jobs.schema.files import File
from jobs.schema.plain_text import error_in_a_line
from jobs.specs.user_files import open_regular
from orchestrator.artifact_url import is_local
from orchestrator.background import in_background
from orchestrator.errors import UserError
from orchestrator.store.records import STORED_BYTES, ArtifactData, ArtifactRecord, EventRecord

_PIECE = 1 << 20
_BLOCK = 8 << 20  # bytes of an upload's part; S3 demands 5 MiB
_WITHOUT_FOLDERS = ("s3:", "s3a:", "gs:", "gcs:", "abfs:", "az:", "adl:", "oci:", "oss:")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
STALL_S = 60.0  # seconds without a copied piece after which the files that wait for the store are given up
_POLL_S = 0.1
_TEXTS = frozenset({".txt", ".log", ".json", ".csv", ".md", ".yaml"})


class ArtifactError(UserError):
    """A file that cannot be kept or read. One line: the name or path, the reason, the fix."""


def point_index(point_id: str) -> int:
    """The point's place in its run, from 0, as point ids end with it: `<run_id>/<index>`."""
    return int(point_id.rpartition("/")[2])


def check_name(name: str) -> str:
    """The name. Raises ArtifactError for one that is not a plain file name."""
    if not _NAME.fullmatch(name):
        raise ArtifactError(
            f"{_quoted(name)}: is no plain file name; use at most 100 letters, digits, '.', '_', '-', no '.' first"
        )
    return name


def kept_in(run: Mapping[str, Any]) -> str:
    """The store or folder in which a run (a row of queries.run) kept its files, in words."""
    return run.get("artifact_store") or run.get("artifacts") or "an unknown folder"


def fetch(url: str, files: Sequence[Mapping[str, Any]], out: Path) -> list[str]:
    """Copy files from the store at `url` to `out`/<point>/<attempt>/<name>, each only if its size and hash are right.

    They are rows of queries.files, which may say anything. Returns one line for each file that was not copied. Raises
    ArtifactError if `out` cannot be written.
    """
    store, problems = ArtifactStore(url), []
    for file in files:
        try:
            target = out / f"{file['point']:04d}" / str(file["attempt"]) / check_name(file["name"])
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_name(f".{target.name}.part")
            try:
                with part.open("wb") as copy:
                    copy.writelines(store.pieces(file["path"], file["size"], file["sha256"]))
                part.replace(target)
            finally:
                part.unlink(missing_ok=True)
        except ArtifactError as err:
            problems.append(str(err))
        except OSError as err:
            raise ArtifactError(
                f"--out: {str(out)!r}: cannot be written ({err.strerror}); name another folder"
            ) from None
    return problems


@dataclass
class ArtifactStore:
    """The store at a URL (orchestrator.artifact_url.check). Contacts it when a file is written or read.

    For one thread: fsspec's connections are not shared.
    """

    url: str

    def put(self, source: File, path: str, after_piece: Callable[[], None] = lambda: None) -> ArtifactData:
        """Copy a file into the store, in pieces, to a path there; nothing stays of a copy that fails.

        What `after_piece` raises ends the copy. Raises ArtifactError: the source cannot be read, or the store written.
        """
        check_name(source.name)
        if source.problem:
            raise ArtifactError(f"{_quoted(source.name)}: {source.problem}")
        unreadable = f"{_quoted(source.name)}: its file cannot be read"
        with contextlib.ExitStack() as block:
            with _naming(unreadable):
                if not source.path:
                    data = source.text.encode(errors="replace")
                    file, size = io.BytesIO(data), len(data)
                else:
                    file = block.enter_context(open_regular(Path(source.path), buffering=0))
                    end = os.fstat(file.fileno()).st_size
                    file.seek(source.start)
                    size = min(end, end if source.stop is None else source.stop) - source.start
            out = block.enter_context(self._writing(path))
            digest, tail, done = hashlib.sha256(), b"", 0
            while done < size:
                with _naming(unreadable):
                    piece = file.read(min(_PIECE, size - done))
                if not piece:
                    problem = f"its file shrank from {size:,} bytes while it was copied"
                    raise ArtifactError(f"{_quoted(source.name)}: {problem}")
                with self._naming_store(path):
                    out.write(piece)
                digest.update(piece)
                tail, done = (tail + piece)[-STORED_BYTES:], done + len(piece)
                after_piece()
        text = Path(source.name).suffix in _TEXTS  # its end is stored in the database, too
        return ArtifactData(
            name=source.name,
            path=path,
            size=size,
            sha256=digest.hexdigest(),
            content=tail.decode(errors="replace").replace("\0", "\\0") if text else None,
            truncated=text and size > STORED_BYTES,
        )

    def pieces(self, path: str, size: int, sha256: str) -> Iterator[bytes]:
        """The content of a file, in pieces; the last one comes only if size and hash are right.

        The path is as the database has it: it may be hostile. Raises ArtifactError: it leads out of the store, there is
        no such file, or it has another content than was kept.
        """
        digest, held, done = hashlib.sha256(), b"", 0
        with self._opened(path) as file:
            while done <= size:
                with self._naming_store(path):
                    piece = file.read(_PIECE)
                if not piece:
                    break
                if held:
                    yield held
                digest.update(piece)
                held, done = piece, done + len(piece)
        if done != size or digest.hexdigest() != sha256:
            raise ArtifactError(f"{path}: differs from the file that was kept (size or sha256); it was changed since")
        if held:
            yield held

    def check_writable(self) -> None:
        """Write a file and remove it. Raises ArtifactError."""
        path = f".nsa-doctor-{os.getpid()}.txt"
        self.put(File("probe.txt", text="probe"), path)
        with self._naming_store(path):
            self._connection[0].rm_file(self._at(path))

    @contextlib.contextmanager
    def _writing(self, path: str) -> Iterator[Any]:
        """A new file, which is there once the block has ended without an exception."""
        target = self._at(path)
        with self._naming_store(path):
            filesystem = self._connection[0]
            for _ in range(0 if self.url.startswith(_WITHOUT_FOLDERS) else 2):  # others may be making the same ones
                with contextlib.suppress(Exception):  # the write says why
                    filesystem.makedirs(target.rpartition("/")[0], exist_ok=True)
            out = filesystem.open(target, "wb", block_size=_BLOCK)
        try:
            yield out
            with self._naming_store(path):
                out.close()
        except BaseException:
            with contextlib.suppress(Exception):
                out.discard()
            with contextlib.suppress(Exception):
                try:
                    out.closed = True  # else the garbage collector would complete the upload
                except AttributeError:  # no upload in parts
                    out.close()
                if is_local(self.url):
                    os.unlink(target)
            raise

    def _opened(self, path: str) -> Any:
        """A stored file, to be read. Raises ArtifactError."""
        target = self._at(path)
        with self._naming_store(path):
            try:
                if is_local(self.url):
                    resolved = Path(target).resolve()
                    if not resolved.is_relative_to(Path(self._connection[1]).resolve()):
                        raise ArtifactError(f"{path}: lies outside the artifact store")
                    return open_regular(resolved, buffering=0)
                return self._connection[0].open(target, "rb", _BLOCK)
            except FileNotFoundError:
                raise ArtifactError(f"{path}: is not in the artifact store {self.url}") from None

    def _at(self, path: str) -> str:
        """The path in the filesystem of a path relative to the store."""
        parts = path.split("/")
        if any(part in ("", ".", "..") for part in parts) or re.search(r"[\x00-\x1f\x7f\\]|::", path):
            raise ArtifactError(f"{_quoted(path)}: is no path below the artifact store; it was not opened")
        return f"{self._connection[1].rstrip('/')}/{path}"

    @cached_property
    def _connection(self) -> tuple[Any, str]:
        """The filesystem, and the store's folder there."""
        if is_local(self.url):
            return LocalFileSystem(), self.url.removeprefix("file://")
        try:
            return fsspec.url_to_fs(self.url, skip_instance_cache=True, use_listings_cache=False)
        except Exception as err:
            reason = f"cannot be reached: {error_in_a_line(err)}; check NSA_ARTIFACT_STORE"
            raise ArtifactError(f"the artifact store {self.url} {reason}") from None

    def _naming_store(self, path: str) -> contextlib.AbstractContextManager[None]:
        return _naming(f"{path}: the artifact store {self.url} failed")


class ArtifactCopies(contextlib.AbstractContextManager["ArtifactCopies"]):
    """Copies the files of one attempt, one after the other; a store that hangs holds up the end of the attempt alone.

    What is being copied when the block ends is abandoned. `ids` are the fields of the attempt's records; `url` is the
    store's, None: no file is kept.
    """

    def __init__(self, ids: Mapping[str, Any], url: str | None) -> None:
        self._ids, self._url = ids, url
        self._names: set[str] = set()
        self._pending: deque[File] = deque()  # the first is being copied
        self._copy: Future[ArtifactData] | None = None
        self._last_piece = 0.0  # when the last piece of it was copied
        self._abandoned = threading.Event()
        self._store = ArtifactStore(url or "")

    def __exit__(self, *_: object) -> None:
        self._abandoned.set()

    def add(self, sources: Sequence[File]) -> None:
        """Have files of the running attempt copied; waits for nothing."""
        for source in sources if self._url is not None else ():
            if source.name in self._names:
                source = replace(source, path="", problem="another file of this attempt has this name")
            self._names.add(source.name)
            self._pending.append(source)

    def records(self, timeout: float = 0.0) -> Iterator[ArtifactRecord | EventRecord]:
        """A record for each file that was copied since the last call, or given up: the artifact, or a warning that says
        why it is not kept. Waits up to `timeout` seconds for each."""
        while self._pending:
            source = self._pending[0]
            copy = self._copy = self._copy or self._begin(source)
            if wait([copy], timeout).done:
                self._copy = None
                self._pending.popleft()
                try:
                    yield ArtifactRecord(**self._ids, artifact=copy.result())
                except ArtifactError as err:
                    yield self._not_kept(str(err))
                except Exception as err:  # it must not cost the other files
                    yield self._not_kept(f"{source.name!a}: {type(err).__name__}: {err}")
            elif time.monotonic() - self._last_piece < STALL_S:
                return
            else:
                self._abandoned.set()
                self._copy, self._store = None, ArtifactStore(self._store.url)  # later files get another connection
                stalled = list(self._pending)
                self._pending.clear()
                reason = f"the artifact store {self._url} did not answer for {STALL_S:g} s"
                yield from (self._not_kept(f"{each.name!a}: {reason}") for each in stalled)

    def rest(
        self, sources: Sequence[File], stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[ArtifactRecord | EventRecord]:
        """Copy the files of the attempt's end, too, and yield the records of all that remain, until `stopped`."""
        self.add(sources)
        while self._pending and not stopped():
            for record in self.records(_POLL_S):
                yield record
                if stopped():
                    return

    def _begin(self, source: File) -> Future[ArtifactData]:
        """Copy a file in a thread of its own, which ends with the next piece once nobody waits for it."""
        abandoned = threading.Event()
        self._abandoned, self._last_piece = abandoned, time.monotonic()

        def after_piece() -> None:
            if abandoned.is_set():
                raise InterruptedError("nobody waits for the copy")
            self._last_piece = time.monotonic()

        run_id, point_id, attempt = (self._ids[name] for name in ("run_id", "point_id", "attempt"))
        path = f"{run_id}/{point_index(point_id):04d}/{attempt}/{source.name}"
        return in_background(partial(self._store.put, source, path, after_piece))

    def _not_kept(self, why: str) -> EventRecord:
        of_point = {name: self._ids[name] for name in ("run_id", "point_id")}
        return EventRecord(**of_point, level="warning", message=f"file not kept: {why}")


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    """Raise what fails in the block as an ArtifactError that says what failed."""
    try:
        yield
    except ArtifactError:
        raise
    except Exception as err:  # the packages of the schemes raise errors of their own
        raise ArtifactError(f"{what}: {error_in_a_line(err)}") from None


def _quoted(text: str) -> str:
    """A text that may hold anything, in ASCII and short."""
    return ascii(text if len(text) <= 100 else text[:100] + "...")
