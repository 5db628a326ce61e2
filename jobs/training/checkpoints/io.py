"""torch.distributed.checkpoint's writer at a URL of fsspec, which hashes what it writes and completes a checkpoint."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from jobs.training.checkpoints.folder import OPTIONS, CheckpointFolder, Manifest, WrittenFile


class Writer(FsspecWriter):
    """Writes one checkpoint; its last act, on the first rank, is the manifest, which is given without files.

    `progress` is called after each piece that was written, with the bytes of this rank so far.
    """

    def __init__(self, folder: CheckpointFolder, manifest: Manifest, progress: Callable[[int], None]) -> None:
        url, local = f"{folder.url}/{manifest.name}", folder.url.startswith("file:")
        super().__init__(url, sync_files=local)  # elsewhere PyTorch would sync all disks of the host
        self.manifest = manifest
        self.begun = self.ended = time.perf_counter()  # the latter on the first rank, once it is complete
        self._folder = folder
        self._files = self.fs = _HashingFileSystem(progress)
        self.path = self.fs.init_path(url, **OPTIONS)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As StorageWriter; also returns this rank's files, which `finish` gets on the first rank."""
        results: list[Any] = [*super().write_data(plan, planner).value(), self._files.written]
        found: Future[list[WriteResult]] = Future()
        found.set_result(results)
        return found

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """As StorageWriter; then writes the manifest."""
        files = {name: file for of_rank in results for name, file in of_rank[-1].items()}
        super().finish(metadata, [of_rank[:-1] for of_rank in results])
        files[".metadata"] = self._files.written[".metadata.tmp"]
        self.manifest = self.manifest.model_copy(update={"files": files})
        self._folder.complete_with(self.manifest)
        self.ended = time.perf_counter()


class _HashingFileSystem(FileSystem):
    """Notes the size and hash of each file that is written, and tells the progress of all together."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        super().__init__()
        self.written: dict[str, WrittenFile] = {}
        self.bytes, self.lock, self.progress = 0, threading.Lock(), progress

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            hashing = _HashingStream(stream, self)
            try:
                yield hashing
            except RuntimeError:
                if hashing.failure is not None:
                    raise hashing.failure from None
                raise
        self.written[path.rpartition("/")[2]] = WrittenFile(size=hashing.size, sha256=hashing.digest.hexdigest())


class _HashingStream:
    """A stream that is only appended to; hashes its content."""

    def __init__(self, stream: Any, files: _HashingFileSystem) -> None:
        self._stream, self._files = stream, files
        self.digest, self.size = hashlib.sha256(), 0
        self.failure: Exception | None = None  # the first one; torch.save may end with an error of its own instead
        self.tell, self.flush, self.fileno, self.close = stream.tell, stream.flush, stream.fileno, stream.close

    def write(self, data: Any) -> int:
        try:
            self._stream.write(data)
        except Exception as err:
            self.failure = self.failure or err
            raise
        view, files = memoryview(data), self._files
        self.digest.update(view)
        self.size += view.nbytes
        with files.lock:
            files.bytes += view.nbytes
            files.progress(files.bytes)
        return view.nbytes
