"""Checkpoints of a training: when they are saved and how, which are kept, where an interrupted training goes on."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import astuple
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.storage import WriteResult

from jobs.measure.clock import synchronize
from jobs.process.reporter import CHECKPOINT
from jobs.schema.plain_text import error_in_a_line
from jobs.schema.point import Beat, reporter
from jobs.training.case import CheckpointSpec, TextCase
from jobs.training.checkpoints import folder as storage
from jobs.training.checkpoints.folder import CheckpointError, CheckpointFolder, CheckpointReport, Manifest
from jobs.training.live import CHECKPOINT_FAILURES
from jobs.training.soak import Interval
from jobs.training.state import Run, TrainingState

T = TypeVar("T")


class Checkpoints:
    """The checkpoints of one training, on each of its ranks; the ranks call each method together.

    A checkpoint that cannot be saved costs only itself; ranks agree on whether it was. `text` describes what is
    learned. Raises CheckpointError if there is no place for them.
    """

    def __init__(
        self, case: TextCase, spec: CheckpointSpec, text: Mapping[str, Any], rank: int, device: torch.device, beat: Beat
    ) -> None:
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is, on one rank
        self.spec, self._case, self._device, self._beat = spec, case, device, reporter(beat)
        there = self._beat.surroundings
        if there.checkpoints is None:
            raise CheckpointError("checkpoints: there is no artifact store to keep them in; set NSA_ARTIFACT_STORE")
        self.report = CheckpointReport(there.checkpoints)  # complete on the first rank
        self.latest: int | None = None  # step of the newest complete checkpoint
        self._folder, self._key = CheckpointFolder(there.checkpoints), there.key
        self._text = hashlib.sha256(json.dumps(text, sort_keys=True).encode()).hexdigest()
        self._rank, self._ranks = rank, case.layout.ranks
        self._group: Any = None  # of exchanges on the host, beside the collectives of training
        if dist.is_initialized():  # the supervisor tells a stalled rank from a slow one
            self._group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
        self._number = 0  # of the last checkpoint that was begun
        self._first = 1  # number of the first one of this training
        self._damaged: set[str] = set()
        self._pending: tuple[Writer, Future[Any], DefaultStager] | None = None
        self._written = 0

    def _from_first(self, make: Callable[[], T]) -> T:
        """Value that the first rank makes. Its CheckpointError is raised on all ranks."""
        made: list[Any] = [None, None]
        if self._rank == 0:
            try:
                made = [make(), None]
            except CheckpointError as err:
                made = [None, str(err)]
        if self._group is not None:
            dist.broadcast_object_list(made, src=0, group=self._group)
        if made[1] is not None:
            raise CheckpointError(made[1])
        return made[0]

    def load(self, state: TrainingState, run: Run) -> Mapping[str, str] | None:
        """Go to the newest complete checkpoint that is not damaged; the ones that are get reported.

        Returns the route of its training; None without one, and then `state` and `run` are as they were. Raises
        CheckpointError if the folder cannot be read, or the checkpoint is of another text.
        """
        folder = self._folder
        manifests, self._number = self._from_first(
            lambda: (folder.manifests(), max(folder.names().values(), default=0))
        )
        self._first = self._number + 1
        for name, manifest in manifests.items():
            if manifest is None:
                text = f"checkpoint {name} is damaged and not used: {storage.MANIFEST} is no manifest"
                self._note(self.report.damaged, text)
                continue
            if not manifest.goes_on(self._key):
                return None
            if (damage := self._from_first(partial(folder.damage, manifest))) is not None:
                self._damaged.add(name)
                self._note(self.report.damaged, f"checkpoint of step {manifest.step} is damaged and not used: {damage}")
                continue
            if manifest.text != self._text:  # what is held out now could be what it has learned
                raise CheckpointError(
                    f"data: its text is not the one that the checkpoint of step {manifest.step} has learned; give that "
                    "text again, or start a new run"
                )
            self._read(manifest, state, run)
            self._first, self.latest = manifest.first, manifest.step
            return manifest.route
        return None

    def save(self, state: TrainingState, run: Run, route: Mapping[str, str], heldout: float | None) -> None:
        """Save a checkpoint; asynchronous: return once the state is copied, and wait for the one before, if any."""
        synchronize(self._device)
        begun = time.perf_counter()
        self.settle()
        self._number += 1
        place = {"number": self._number, "first": self._first, "step": state.step, "steps": self._case.last_step}
        past = {"begun": tuple(run.begun), "foreign": run.foreign, "route": dict(route), "heldout": heldout}
        manifest = Manifest(**place, **past, ranks=self._ranks, key=self._key, text=self._text)
        writer = Writer(self._folder, manifest, self._wrote)
        options: dict[str, Any] = {"storage_writer": writer, "process_group": self._group}
        if self.spec.asynchronous:
            cuda = self._device.type == "cuda"
            stager = DefaultStager(StagingOptions(cuda, False, False, cuda))  # PyTorch 2.11's can be used once
            future = state_dict_saver.async_save(self._content(state, run), async_stager=stager, **options)
            assert isinstance(future, Future)
            self._pending = writer, future, stager
        else:
            try:
                state_dict_saver.save(self._content(state, run), **options)
            except (Exception, CheckpointException) as err:  # the latter is no Exception
                self._failed(manifest, err)
            else:
                self._saved(writer)
        self.report.waits_ms.append(1000 * (time.perf_counter() - begun))

    def settle(self) -> bool:
        """Wait for the checkpoint that is being written, if any, and take note of its end; returns whether one was."""
        if self._pending is None:
            return False
        (writer, future, stager), seen = self._pending, self._written
        while not wait([future], 0.2).done:
            if self._written != seen:  # a stalled store is no progress
                seen = self._written
                self._beat(CHECKPOINT, seen)
        self._pending = None
        stager.close()
        if (err := future.exception()) is None:
            self._saved(writer)
        else:
            self._failed(writer.manifest, err)
        return True

    def close(self) -> None:
        """Wait for the last checkpoint, which the training does at its end."""
        begun = time.perf_counter()
        if self.settle():
            self.report.waits_ms[-1] += 1000 * (time.perf_counter() - begun)

    def _content(self, state: TrainingState, run: Run) -> dict[str, Any]:
        """Contents of a checkpoint; sharded weights are DTensors."""
        progress = {
            "batches": dict(state.batches.state_dict()),
            "before": run.before,
            "losses": torch.tensor(run.losses, dtype=torch.float64),
            "seconds": torch.tensor(run.seconds, dtype=torch.float64),
        }
        generators = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            generators["cuda"] = torch.cuda.get_rng_state(self._device)
        own = {"generators": generators, "compute_ms": torch.tensor(run.compute_ms, dtype=torch.float64)}
        if (soak := run.soak) is not None:
            progress["soak"] = {"elapsed_s": soak.elapsed_s, "pieces": soak.pieces, "done": soak.done}
            own["soak"] = {"alert_s": soak.alert_s, "intervals": [astuple(interval) for interval in soak.intervals]}
        model, optimizer = get_state_dict(state.model, state.optimizer)
        ranks = {str(self._rank): packed(own)}
        return {"model": model, "optimizer": optimizer, "progress": packed(progress), "ranks": ranks}

    def _read(self, manifest: Manifest, state: TrainingState, run: Run) -> None:
        """Take over a checkpoint; one of another number of ranks without the ranks' own generators and times."""
        same, rank = manifest.ranks == self._ranks, str(self._rank)
        model, optimizer = get_state_dict(state.model, state.optimizer)
        content: dict[str, Any] = {"model": model, "optimizer": optimizer, "progress": b""}
        content |= {"ranks": {rank: b""}} if same else {}
        url = f"{self._folder.url}/{manifest.name}"
        try:
            reader = FsspecReader(url, **storage.OPTIONS)
            state_dict_loader.load(content, storage_reader=reader, process_group=self._group)
        except CheckpointException as err:
            raise CheckpointError(
                f"checkpoints: {url}: is whole but cannot be loaded: {_cause(err)}; remove it to go on from the one "
                "before"
            ) from None
        set_state_dict(
            state.model, state.optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"]
        )
        progress = torch.load(io.BytesIO(content["progress"]), weights_only=True)
        state.batches.load_state_dict(progress["batches"])
        state.step = manifest.step
        run.before, run.losses = progress["before"], progress["losses"].tolist()
        run.seconds = progress["seconds"].tolist()
        run.begun = [*manifest.begun, manifest.step]
        run.foreign = manifest.foreign if manifest.key == self._key else manifest.step
        if not same:
            run.compute_ms = [math.nan] * manifest.step
            return
        own = torch.load(io.BytesIO(content["ranks"][rank]), weights_only=True)
        run.compute_ms = own["compute_ms"].tolist()
        torch.set_rng_state(own["generators"]["cpu"])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(own["generators"]["cuda"], self._device)
        if (soak := run.soak) is not None and manifest.key == self._key:  # other code's time does not count
            shared, mine = progress["soak"], own["soak"]
            soak.elapsed_s, soak.pieces, soak.done = shared["elapsed_s"], shared["pieces"], shared["done"]
            soak.alert_s, soak.intervals = mine["alert_s"], [Interval(*row) for row in mine["intervals"]]

    def _wrote(self, count: int) -> None:
        self._written = count
        if not self.spec.asynchronous:  # else a thread writes, and `settle` reports
            self._beat(CHECKPOINT, count)

    def _saved(self, writer: Writer) -> None:
        """Note a checkpoint, and remove what is older than it and not to be kept."""
        self.latest = writer.manifest.step
        if self._rank > 0:
            return
        self.report.times_ms.append(1000 * (writer.ended - writer.begun))
        self.report.sizes.append(sum(writer.manifest.files.values()))
        try:
            complete = self._folder.complete()
            ours = [each for each in complete if each.number >= self._first and each.name not in self._damaged]
            measured = sorted((each.heldout, each.name) for each in ours if each.heldout is not None)
            best = [name for _, name in measured[: int(self.spec.keep_best)]]
            newest = [each.name for each in ours[: self.spec.keep_last]]
            self.report.kept = [each.name for each in ours if each.name in newest or each.name in best]
            for name, number in self._folder.names().items():
                if name not in self.report.kept and number < ours[0].number:
                    self._folder.remove(name)
        except Exception as err:
            self._beat.warn(f"checkpoints: old ones could not be removed: {error_in_a_line(err)}")

    def _failed(self, manifest: Manifest, err: BaseException) -> None:
        """Report a checkpoint that was not saved, and remove what there is of it."""
        self._note(self.report.failures, f"checkpoint of step {manifest.step} was not saved: {_cause(err)}")
        if self._rank > 0:
            return
        self._beat.sample(manifest.step, {CHECKPOINT_FAILURES.name: float(len(self.report.failures))})
        try:
            self._folder.remove(manifest.name)
        except Exception as second:
            self._beat.warn(f"checkpoints: {manifest.name} could not be removed: {error_in_a_line(second)}")

    def _note(self, lines: list[str], text: str) -> None:
        lines.append(text)
        if self._rank == 0:
            self._beat.warn(text)


def packed(value: Any) -> bytes:
    """A nested value with tensors as bytes: one item of a checkpoint, whatever its shape is when it is read."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _cause(err: BaseException) -> str:
    """The first rank's error in one of DCP's, on one line."""
    failures = err.failures.values() if isinstance(err, CheckpointException) else ()
    return next((error_in_a_line(wrapped[0]) for wrapped in failures), error_in_a_line(err))


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
        self.fs = _ReportingFileSystem(progress)
        self.path = self.fs.init_path(url, **storage.OPTIONS)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """As StorageWriter; then writes the manifest."""
        super().finish(metadata, results)
        names = dict.fromkeys(each.storage_data.relative_path for of_rank in results for each in of_rank)
        files = self._folder.sizes(self.manifest.name, [*names, ".metadata"])
        self.manifest = self.manifest.model_copy(update={"files": files})
        self._folder.complete_with(self.manifest)
        self.ended = time.perf_counter()


class _ReportingFileSystem(FileSystem):
    """Tells the progress of all files that are written together."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        super().__init__()
        self._bytes, self._progress = 0, progress

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        failures: list[Exception] = []

        def write(data: Any) -> int:
            try:
                stream_write(data)
            except Exception as err:
                failures.append(err)
                raise
            size = memoryview(data).nbytes
            self._bytes += size
            self._progress(self._bytes)
            return size

        with super().create_stream(path, mode) as stream:
            stream_write = stream.write
            stream.write = write
            try:
                yield stream
            except RuntimeError:  # perhaps torch.save's own, after a write that failed
                if failures:
                    raise failures[0] from None
                raise
