"""Checkpoints of a training: when they are saved, which are kept, and where an interrupted training goes on."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from jobs.measure.clock import synchronize
from jobs.process.reporter import CHECKPOINT
from jobs.schema.plain_text import error_in_a_line
from jobs.schema.point import Beat, reporter
from jobs.training.checkpoints.exchange import Exchange
from jobs.training.checkpoints.folder import MANIFEST, CheckpointError, CheckpointFolder, Manifest, number_of
from jobs.training.checkpoints.io import Reader, Writer
from jobs.training.checkpoints.report import CHECKPOINT_FAILURES, CheckpointReport, CheckpointSpec
from jobs.training.state import Run, TrainingState, generators, packed, set_generators, unpacked

_POLL_S = 0.2


@dataclass
class _Saving:
    """A checkpoint that is being written."""

    writer: Writer
    begun: float
    future: Future[Any] | None = None
    ended: float = math.nan


class Checkpoints:
    """The checkpoints of one training, on each of its ranks; the ranks call each method together.

    A checkpoint that cannot be saved costs only itself; ranks agree on whether it was.

    Args:
        url: folder of the checkpoints (jobs.schema.point.Surroundings).
        key: the point's key.
        text: digest of the text that is learned.
        steps: of the whole training; ENDLESS for a soak.
        beat: gets progress, failures and the series CHECKPOINT_FAILURES.

    Attributes:
        report: for the result; complete on the first rank.
        latest: step of the newest complete checkpoint; None without one.

    Raises:
        CheckpointError: the URL cannot be used.
    """

    def __init__(
        self,
        spec: CheckpointSpec,
        url: str,
        key: str,
        text: str,
        steps: int,
        exchange: Exchange,
        device: torch.device,
        beat: Beat,
    ) -> None:
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is, on one rank
        self.report = CheckpointReport(url)
        self.latest: int | None = None
        self.spec = spec
        self._folder = CheckpointFolder(url)
        self._key = key
        self._text = text
        self._steps = steps
        self._exchange = exchange
        self._device = device
        self._beat = reporter(beat)
        self._number = 0  # of the last checkpoint that was begun
        self._first = 1  # number of the first one of this training
        self._damaged: set[str] = set()
        self._pending: _Saving | None = None
        self._stager: DefaultStager | None = None
        self._written = 0

    def next_stop(self, step: int) -> int:
        """Step after which the next checkpoint is due, once `step` steps are done."""
        return min(self._steps, step - step % self.spec.every + self.spec.every)

    def load(self, state: TrainingState, run: Run) -> Mapping[str, str] | None:
        """Go to the newest complete checkpoint that is not damaged; the ones that are get reported.

        Returns:
            The route of its training; None if there is no checkpoint, and `state` and `run` are as they were.

        Raises:
            CheckpointError: the folder cannot be read, or the checkpoint is of another text.
        """
        manifests, self._number = self._exchange.from_first(
            lambda: (self._folder.manifests(), max(map(number_of, self._folder.names()), default=0))
        )
        self._first = self._number + 1
        for name, manifest in manifests:
            if manifest is None:
                self._note(self.report.damaged, f"checkpoint {name} is damaged and not used: {MANIFEST} is no manifest")
                continue
            if not manifest.is_gone_on_from(self._key):
                return None
            if (damage := self._damage(manifest)) is None:
                if manifest.text != self._text:  # what is held out now could be what it has learned
                    raise CheckpointError(
                        f"data: its text is not the one that the checkpoint of step {manifest.step} has learned; give "
                        "that text again, or start a new run"
                    )
                self._read(manifest, state, run)
                self._first, self.latest = manifest.first, manifest.step
                return manifest.route
            self._damaged.add(manifest.name)
            self._note(self.report.damaged, f"checkpoint of step {manifest.step} is damaged and not used: {damage}")
        return None

    def save(self, state: TrainingState, run: Run, route: Mapping[str, str], heldout: float | None) -> None:
        """Save a checkpoint; asynchronous: return once the state is copied, and wait for the one before, if any."""
        synchronize(self._device)
        begun = time.perf_counter()
        self.settle()
        self._number += 1
        manifest = Manifest(
            number=self._number,
            first=self._first,
            step=state.step,
            steps=self._steps,
            ranks=self._exchange.ranks,
            key=self._key,
            heldout=heldout,
            begun=tuple(run.begun),
            foreign=run.foreign,
            route=dict(route),
            text=self._text,
        )
        saving = _Saving(Writer(self._folder, manifest, self._wrote), time.perf_counter())
        options: dict[str, Any] = {"storage_writer": saving.writer, "process_group": self._exchange.group}
        if self.spec.asynchronous:
            cuda = self._device.type == "cuda"
            self._stager = DefaultStager(StagingOptions(cuda, False, False, cuda))  # PyTorch 2.11's can be used once
            future = state_dict_saver.async_save(self._content(state, run), async_stager=self._stager, **options)
            assert isinstance(future, Future)
            saving.future = future
            saving.future.add_done_callback(lambda _: setattr(saving, "ended", time.perf_counter()))
            self._pending = saving
        else:
            try:
                state_dict_saver.save(self._content(state, run), **options)
                self._saved(saving)
            except (Exception, CheckpointException) as err:  # the latter is no Exception
                self._failed(manifest, err)
        self.report.waits_ms.append(1000 * (time.perf_counter() - begun))

    def settle(self) -> None:
        """Wait for the checkpoint that is being written, if any, and take note of its end."""
        if (saving := self._pending) is None:
            return
        assert saving.future is not None
        seen = self._written
        while not wait([saving.future], _POLL_S).done:
            if self._written != seen:
                seen = self._written
                self._beat(CHECKPOINT, seen)
        self._pending = None
        self._release_stager()
        if (err := saving.future.exception()) is None:
            self._saved(saving)
        else:
            self._failed(saving.writer.manifest, err)

    def close(self) -> None:
        """Wait for the last checkpoint, and give its memory back."""
        begun, waited = time.perf_counter(), self._pending is not None
        self.settle()
        if waited and self.report.waits_ms:
            self.report.waits_ms[-1] += 1000 * (time.perf_counter() - begun)
        self._release_stager()

    def _release_stager(self) -> None:
        if self._stager is not None:
            self._stager.close()
            self._stager = None

    def _content(self, state: TrainingState, run: Run) -> dict[str, Any]:
        progress = {
            "batches": dict(state.batches.state_dict()),
            "before": run.before,
            "losses": torch.tensor(run.losses, dtype=torch.float64),
            "seconds": torch.tensor(run.seconds, dtype=torch.float64),
        }
        own = {"generators": generators(self._device), "compute_ms": torch.tensor(run.compute_ms, dtype=torch.float64)}
        if run.soak is not None:
            progress["soak"], own["soak"] = run.soak.state_dicts()
        return {**state.tensors(), "progress": packed(progress), "ranks": {str(self._exchange.rank): packed(own)}}

    def _read(self, manifest: Manifest, state: TrainingState, run: Run) -> None:
        """Take over a checkpoint; one of another number of ranks without the ranks' own generators and times."""
        same = manifest.ranks == self._exchange.ranks
        content: dict[str, Any] = {**state.tensors(), "progress": b""}
        if same:
            content["ranks"] = {str(self._exchange.rank): b""}
        url, group = f"{self._folder.url}/{manifest.name}", self._exchange.group
        try:
            state_dict_loader.load(content, storage_reader=Reader(url), process_group=group)
        except CheckpointException as err:
            raise CheckpointError(
                f"checkpoints: {url}: is whole but cannot be loaded: {_cause(err)}; remove it to go on from the one "
                "before"
            ) from None
        state.load_tensors(content)
        progress = unpacked(content["progress"])
        state.batches.load_state_dict(progress["batches"])
        state.step = manifest.step
        run.before, run.losses = progress["before"], progress["losses"].tolist()
        run.seconds = progress["seconds"].tolist()
        run.begun = [*manifest.begun, manifest.step]
        run.foreign = manifest.foreign if manifest.key == self._key else manifest.step
        if same:
            own = unpacked(content["ranks"][str(self._exchange.rank)])
            run.compute_ms = own["compute_ms"].tolist()
            set_generators(own["generators"], self._device)
            if run.soak is not None and manifest.key == self._key:  # other code's time does not count
                run.soak.load_state_dicts(progress["soak"], own["soak"])
        else:
            run.compute_ms = [math.nan] * manifest.step

    def _damage(self, manifest: Manifest) -> str | None:
        """The damage of a checkpoint, in words, or None. Each rank looks at a part of the files."""
        own = sorted(manifest.files)[self._exchange.rank :: self._exchange.ranks]
        found = (self._folder.damage(manifest, name, lambda: self._wrote(0)) for name in own)
        damages = self._exchange.gathered(next((damage for damage in found if damage is not None), None))
        return next((damage for damage in damages if damage is not None), None)

    def _wrote(self, count: int) -> None:
        """Note bytes that were written; show them unless a thread wrote them."""
        self._written = count
        if not self.spec.asynchronous or count == 0:
            self._beat(CHECKPOINT, count)

    def _saved(self, saving: _Saving) -> None:
        manifest = saving.writer.manifest
        self.latest = manifest.step
        if self._exchange.rank > 0:
            return
        ended = time.perf_counter() if math.isnan(saving.ended) else saving.ended
        self.report.times_ms.append(1000 * (ended - saving.begun))
        self.report.sizes.append(manifest.size)
        try:
            self._retain()
        except Exception as err:
            self._beat.warn(f"checkpoints: old ones could not be removed: {error_in_a_line(err)}")

    def _retain(self) -> None:
        """Remove what is older than the newest checkpoint and not to be kept."""
        ours = [m for m in self._folder.complete() if m.number >= self._first and m.name not in self._damaged]
        measured = [manifest for manifest in ours if manifest.heldout is not None]
        best = sorted(measured, key=lambda manifest: manifest.heldout or 0.0)[: int(self.spec.keep_best)]
        kept = [manifest for manifest in ours if manifest in ours[: self.spec.keep_last] or manifest in best]
        self.report.kept = [manifest.name for manifest in kept]
        for name in self._folder.names():
            if name not in self.report.kept and number_of(name) < ours[0].number:
                self._folder.remove(name)

    def _failed(self, manifest: Manifest, err: BaseException) -> None:
        """Report a checkpoint that was not saved, and remove what there is of it."""
        self._note(self.report.failures, f"checkpoint of step {manifest.step} was not saved: {_cause(err)}")
        if self._exchange.rank > 0:
            return
        self._beat.sample(manifest.step, {CHECKPOINT_FAILURES.name: float(len(self.report.failures))})
        try:
            self._folder.remove(manifest.name)
        except Exception as second:
            self._beat.warn(f"checkpoints: {manifest.name} could not be removed: {error_in_a_line(second)}")

    def _note(self, lines: list[str], text: str) -> None:
        lines.append(text)
        if self._exchange.rank == 0:
            self._beat.warn(text)


def _cause(err: BaseException) -> str:
    """The first rank's error in one of DCP's, on one line."""
    if not isinstance(err, CheckpointException):
        return error_in_a_line(err)
    return next((error_in_a_line(wrapped[0]) for wrapped in err.failures.values()), error_in_a_line(err))
