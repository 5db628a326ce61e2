"""torch.distributed.checkpoint's writer and reader at a URL of fsspec; the writer hashes and completes a checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import fsspec
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from jobs.training.checkpoints.folder import CheckpointFolder, Manifest, WrittenFile, filesystem_options


class Writer(FileSystemWriter):
    """Writes one checkpoint; its last act, on the first rank, is the manifest.

    Args:
        manifest: of the checkpoint, without files.
        sign: called after each piece that was written, with the bytes of this rank so far.
    """

    def __init__(self, folder: CheckpointFolder, manifest: Manifest, sign: Callable[[int], None]) -> None:
        local = folder.url.startswith("file:")  # elsewhere PyTorch would sync all disks of the host
        super().__init__(manifest.name, sync_files=local)
        self.manifest = manifest
        self._folder = folder
        self._files = self.fs = _FileSystem(sign)
        self.path = self.fs.init_path(f"{folder.url}/{manifest.name}")

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As StorageWriter; also returns this rank's files, which `finish` gets on the first rank."""
        results: list[Any] = [*super().write_data(plan, planner).value(), self._files.written]
        found: Future[list[WriteResult]] = Future()
        found.set_result(results)
        return found

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """As StorageWriter; then writes the manifest."""
        files: dict[str, WrittenFile] = {}
        for *_, of_rank in results:
            assert isinstance(of_rank, dict)
            files |= of_rank
        super().finish(metadata, [of_rank[:-1] for of_rank in results])
        files[".metadata"] = self._files.written[".metadata.tmp"]
        self.manifest = replace(self.manifest, files=files)
        self._folder.complete_with(self.manifest)


class Reader(FileSystemReader):
    """Reads the checkpoint at a URL."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.fs = _FileSystem(lambda _: None)
        self.path = self.fs.init_path(url)


class _FileSystem(FileSystem):
    """fsspec for DCP; notes the size and hash of each file that is written."""

    fs: Any  # connected by init_path

    def __init__(self, sign: Callable[[int], None]) -> None:
        super().__init__()
        self.written: dict[str, WrittenFile] = {}
        self._sign = sign
        self._bytes = 0
        self._lock = threading.Lock()

    def init_path(self, path: Any, **_: Any) -> Any:
        """Connect to the URL's filesystem. Returns the path in it."""
        self.fs, path = fsspec.url_to_fs(path, **filesystem_options())
        return path

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """A file's stream. A file that could not be written is removed, so that a full disk gets room again."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        hashing: _HashingStream | None = None
        try:
            with self.fs.open(path, mode) as stream:
                hashing = _HashingStream(stream, self._wrote)
                yield hashing
        except BaseException as err:  # also of closing, which PyTorch's own leaves to others
            with contextlib.suppress(Exception):
                self.rm_file(path)
            if isinstance(err, RuntimeError) and hashing is not None and hashing.failure is not None:
                raise hashing.failure from None
            raise
        self.written[path.rpartition("/")[2]] = WrittenFile(hashing.size, hashing.digest.hexdigest())

    def _wrote(self, count: int) -> None:
        with self._lock:
            self._bytes += count
            self._sign(self._bytes)


class _HashingStream(io.RawIOBase):
    """A stream that is only appended to; hashes its content.

    Attributes:
        failure: the first error of writing; torch.save may end with an error of its own in its place.
    """

    def __init__(self, stream: Any, wrote: Callable[[int], None]) -> None:
        self._stream = stream
        self._wrote = wrote
        self.digest = hashlib.sha256()
        self.size = 0
        self.failure: Exception | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            self._stream.write(data)
        except Exception as err:
            self.failure = self.failure or err
            raise
        view = memoryview(data)
        self.digest.update(view)
        self.size += view.nbytes
        self._wrote(view.nbytes)
        return view.nbytes

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()
