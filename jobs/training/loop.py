"""The training loop, one for a single process and for several ranks."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from jobs.diagnosis.rank_state import Notes
from jobs.hardware.energy import EnergyMeter
from jobs.hardware.telemetry import Telemetry
from jobs.measure.clock import synchronize
from jobs.measure.memory import tensor_bytes
from jobs.process.reporter import CHECKPOINT
from jobs.schema.point import Beat, reporter
from jobs.training.case import TrainingCase, learning_rate
from jobs.training.checkpoints.folder import CheckpointError
from jobs.training.data.corpus import Corpus
from jobs.training.errors import Diverged, Stopped, Suspended
from jobs.training.live import HELDOUT_LOSS, LiveTraining, model_flops
from jobs.training.parallel import ParallelModel, local, mark
from jobs.training.probe import probe
from jobs.training.soak import SoakWatch
from jobs.training.state import Run, TrainingState, is_steady
from nsa_core.context_parallel import share
from nsa_core.model import NSATransformer
from nsa_core.packed_sequences import Packing, document_bounds
from nsa_core.routes import route_of

if TYPE_CHECKING:
    from jobs.training.checkpoints.saving import Checkpoints


@dataclass(frozen=True)
class Step:
    """Results of a step, equal on all ranks but for `compute_ms`."""

    loss: float  # mean over the batch [nat/byte]
    norm: float  # of the gradients of all ranks together, before clipping
    stop: bool  # whether a rank was asked to stop
    compute_ms: float | None  # this rank's own compute time; None on a single rank and under FSDP2
    elapsed_s: float = 0.0  # of a soak, before the step was started


class Trainer:
    """A training: its state, and the passes that take it from step to step. A soak has a `watch`, and ends by its time;
    `notes` of this rank's memory are completed at the first step."""

    def __init__(
        self,
        case: TrainingCase,
        corpus: Corpus,
        device: torch.device,
        rank: int = 0,
        watch: SoakWatch | None = None,
        notes: Notes | None = None,
    ) -> None:
        self.case, self.corpus, self.device, self.rank = case, corpus, device, rank
        self.route: dict[str, str] = {}
        self.energy = EnergyMeter.of(device)  # of the steady steps, in tokens of all ranks
        self.gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self._watch, self._notes = watch, notes
        self._stop = threading.Event()
        self._asked = False  # whether a rank was asked to stop
        self._ending = False  # that, or the time of a soak's piece is over: this process ends with the present step
        self._measuring = False  # whether the telemetry has been started
        torch.manual_seed(case.seed)
        self.model = model = NSATransformer(case.model).to(device).train()
        self._group: Any = None  # the ranks that have each sequence together
        if case.layout.context_parallel > 1:
            self._group, _ = dist.new_subgroups(case.layout.context_parallel)
            model.share_sequences(self._group)
        if case.compile:
            torch.compiler.reset()  # graphs of an earlier point of this process
        self._parallel = ParallelModel(model, case.layout, device, compiled=case.compile, cuda_graphs=case.cuda_graphs)
        weights, spec = list(model.parameters()), case.optimizer  # which may be sharded by now
        groups: list[dict[str, Any]] = [
            {"params": [w for w in weights if w.ndim >= 2], "weight_decay": spec.weight_decay},
            {"params": [w for w in weights if w.ndim < 2], "weight_decay": 0.0},
        ]
        fused, betas = device.type == "cuda", (spec.beta1, spec.beta2)
        optimizer = torch.optim.AdamW(groups, lr=spec.learning_rate, betas=betas, fused=fused)
        self.state = TrainingState(model, optimizer, corpus.batches)

    @property
    def resident(self) -> int:
        """Bytes of this rank's weights and optimizer state, and of DDP's gradient buckets, which stay between steps."""
        weights: list[Tensor] = list(self.model.parameters())
        state = [t for s in self.state.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        buckets = 0 if self._parallel.ddp is None else tensor_bytes(weights)
        return tensor_bytes([local(t) for t in (*weights, *self.model.buffers(), *state)]) + buckets

    @property
    def complete(self) -> bool:
        """Whether the whole training is done: its steps, or a soak's time."""
        return self.state.step >= self.case.last_step if self._watch is None else self._watch.history.done

    def run(
        self, beat: Beat, stop: threading.Event, telemetry: Telemetry, checkpoints: Checkpoints | None = None
    ) -> Run:
        """Train all steps, or those that a checkpoint lacks; measure the held-out loss before and after them.

        A soak trains to the end of its piece, and measures the second loss after the last one. Once `stop` is set on
        one of the ranks, all of them end after the same step. The telemetry is started with the first steady step.

        Raises:
            Diverged: a loss became infinite or NaN; all ranks raise it at the same step.
            Stopped: `stop` was set before the last step; Suspended if there is a checkpoint to go on from.
            Ineffective: as ParallelModel.check_effective.
            MemoryLimit: this rank of a soak holds more memory than its plan allows.
            CheckpointError: the checkpoints of earlier attempts cannot be read, or a soak's piece could save none.
        """
        self._stop, case, corpus, watch, state = stop, self.case, self.corpus, self._watch, self.state
        run, saved_route = Run(soak=None if watch is None else watch.history), None
        if checkpoints is not None:
            beat(CHECKPOINT)
            saved_route = checkpoints.load(state, run)
        if saved_route is None:
            run.before = self._heldout_loss(corpus.heldout, beat)
        if watch is not None:
            watch.begin(len(run.begun) - 1)
        live = LiveTraining(beat, case.tokens, self.device, self.rank, model_flops(case, self.gpu))
        begun = state.step
        while not (self.complete or self._ending):
            until = case.last_step
            if checkpoints is not None:
                until = min(until, (state.step // checkpoints.spec.every + 1) * checkpoints.spec.every)
            self._train(until, run, live, beat, telemetry)
            if checkpoints is not None and not self.complete:
                if watch is not None:
                    watch.note_checkpoint()
                with telemetry.paused():
                    measured = checkpoints.spec.keep_best and not self._asked
                    heldout = self._heldout_loss(corpus.heldout, beat) if measured else None
                    self._save(checkpoints, run, beat, heldout)
        if self._asked and not self.complete:
            raise self._stopped(checkpoints)
        telemetry.stop()
        if begun < state.step:
            self._parallel.check_effective()
        if self.complete:
            run.after = self._heldout_loss(corpus.heldout, beat)
            if case.probe:
                vocabulary = case.model.vocab_size
                run.probe = probe(lambda parts: self._heldout_loss(parts, beat), corpus.heldout, vocabulary)
            if checkpoints is not None and begun < state.step:
                self._save(checkpoints, run, beat, run.after)
        if checkpoints is not None:
            checkpoints.close()
            if not self.complete and (checkpoints.latest or 0) <= begun:
                raise CheckpointError(
                    f"checkpoints: none could be saved after step {begun}, and the soak's next process would get no "
                    "further; mend the artifact store"
                )
        self.route = self.route or dict(saved_route or {})
        return run

    def _train(self, until: int, run: Run, live: LiveTraining, beat: Beat, telemetry: Telemetry) -> None:
        """Train up to step `until`, or to the step at which this process ends."""
        case, watch, state = self.case, self._watch, self.state
        ahead = 1 if self.device.type == "cuda" else 0  # steps started before a loss is waited for: no GPU is idle
        under_way: deque[Callable[[], Step]] = deque()
        number, ended, metered = state.step, time.perf_counter(), 0
        while True:
            starting = state.step < until and not self._ending
            if starting:
                if watch is None:
                    beat("train", state.step, case.last_step)
                else:
                    beat("train [s]", int(watch.history.elapsed_s), int(60 * watch.plan.minutes))
                for group in state.optimizer.param_groups:
                    group["lr"] = learning_rate(case.optimizer, state.step, case.steps)
                if self.route:
                    under_way.append(self._start())
                else:  # a compiled model notes its route while it is traced
                    self.route = route_of(lambda: under_way.append(self._start()))
                state.step += 1
            if starting and len(under_way) <= ahead:
                continue
            if not under_way:
                break
            step = under_way.popleft()()
            number += 1
            before, ended = ended, time.perf_counter()
            steady = is_steady(number - 1, case.steps, run.begun)
            if steady and not self._measuring:
                self._measuring = True
                telemetry.start()
            metered += self.energy.begun is not None
            if steady and self.energy.begun is None:
                self.energy.start()
            if not math.isfinite(step.loss):
                raise Diverged(f"loss {step.loss} at step {number}; lower optimizer.learning_rate")
            rate = learning_rate(case.optimizer, number - 1, case.steps)
            live.step(number, step.loss, step.norm, rate, step.compute_ms)
            if self._notes is not None and number == run.begun[-1] + 1:
                self._notes.first_step(number, self.route)
            self._asked = self._asked or step.stop
            if watch is None:
                run.losses.append(step.loss)
                run.seconds.append(ended - before)
                run.compute_ms += [] if step.compute_ms is None else [step.compute_ms]
            else:
                watch.add(number, step.loss, ended - before, step.elapsed_s, step.compute_ms)
            self._ending = self._asked or (watch is not None and watch.over)
        self.energy.stop(metered * case.tokens)

    def _stopped(self, checkpoints: Checkpoints | None) -> Stopped:
        """The exception of a training that was asked to end."""
        text = f"SIGTERM ended the training after step {self.state.step}"
        if self._watch is None:
            text += f" of {self.case.last_step}"
        if checkpoints is None:
            return Stopped(text)
        checkpoints.close()
        if checkpoints.latest is None:
            return Stopped(f"{text}; it has no checkpoint to go on from")
        return Suspended.at(checkpoints.latest, text)

    def _save(self, checkpoints: Checkpoints, run: Run, beat: Beat, heldout: float | None) -> None:
        """Save a checkpoint. Raises Diverged instead if the weights are no numbers."""
        weights = [local(weight) for weight in self.model.parameters()]
        bad = torch.stack([~weight.isfinite().all() for weight in weights]).any().float()
        if self._parallel.averaged(bad).item() > 0:
            raise Diverged(f"weights are not finite after step {self.state.step}; lower optimizer.learning_rate")
        if heldout is not None and self.rank == 0:
            reporter(beat).sample(self.state.step, {HELDOUT_LOSS.name: heldout})
        checkpoints.save(self.state, run, self.route, heldout)

    def step(self) -> float:
        """Run one optimizer step on all ranks and wait for the device; returns the loss [nat/byte]."""
        loss = self._start()().loss
        synchronize(self.device)
        return loss

    def _start(self) -> Callable[[], Step]:
        """Start one optimizer step without waiting for a GPU; returns a function that waits for its results."""
        parallel, optimizer, cuda = self._parallel, self.state.optimizer, self.device.type == "cuda"
        parallel.marks[:] = [mark(self.device)]
        batch = next(self.state.batches)
        parts = self._parts(*batch)
        losses = []
        for number, part in enumerate(parts, 1):
            with parallel.gathering(last=number == len(parts)):
                with self.precision():
                    loss = parallel.loss_of(*part)
                (loss / len(parts) if len(parts) > 1 else loss).backward()
            losses.append(loss.detach())
        begun, *ready = parallel.marks
        # Means over the ranks, which agree so on the loss, whether to stop, and a soak's time.
        means = [(torch.stack(losses).mean() if len(losses) > 1 else losses[0]).float()]
        host = [float(self._stop.is_set())] + ([] if self._watch is None else [self._watch.history.elapsed_s])
        means = torch.stack([*means, *(torch.full_like(means[0], number) for number in host)])
        ranks = self.case.layout.ranks
        summed = dist.all_reduce(means, async_op=True) if ranks > 1 else None  # on its way while the weights change
        norm: Any = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.case.optimizer.grad_clip)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of sharded gradients
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if summed is not None:
            summed.wait()
        results, copied = torch.cat((means.div_(ranks), norm.detach().float().view(1))), None
        if cuda:
            results = torch.empty_like(results, device="cpu", pin_memory=True).copy_(results, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        tokens_a_byte = self.corpus.tokens_a_byte(batch[1])

        def wait() -> Step:
            if copied is not None:
                copied.synchronize()
            loss, asked, *elapsed, norm = results.tolist()
            compute_ms = None
            if ready:
                compute_ms = begun.elapsed_time(ready[0]) if cuda else 1000 * (ready[0] - begun)
            return Step(loss * tokens_a_byte, norm, asked > 0, compute_ms, *elapsed)

        return wait

    def _parts(self, tokens: Tensor, targets: Tensor) -> list[tuple[Any, ...]]:
        """This rank's micro-batches of a batch [batch,S], on its device, with the packing of their documents if any."""
        layout = self.case.layout
        together = layout.context_parallel  # ranks of one part
        shape = (layout.accumulation, layout.ranks // together, layout.micro_batch)
        mine = [x.unflatten(0, shape)[:, self.rank // together] for x in (tokens, targets)]
        if self._group is not None:
            mine = [share(x, self._group, dim=2) for x in mine]
        return [
            (*(x.to(self.device, non_blocking=True) for x in part), *self._packing(part[0]))
            for part in zip(*mine, strict=True)
        ]

    def _packing(self, tokens: Tensor) -> tuple[Packing, ...]:
        """Packing of the documents in tokens [B,S], on the device; nothing where they are not packed."""
        if (end := self.corpus.end_token) is None:
            return ()
        packing = Packing.of(document_bounds(tokens, end), tokens.numel(), self.device, self.case.model.nsa)
        return (packing.for_compiled(tokens.shape[1]) if self.case.compile else packing,)

    @torch.no_grad()
    def _heldout_loss(self, batches: Sequence[tuple[Tensor, Tensor]], beat: Beat) -> float:
        self.model.eval()
        total = 0.0
        for done, batch in enumerate(batches):
            beat("heldout loss", done, len(batches))
            parts = self._parts(*batch)
            for part in parts:
                with self.precision():
                    total += self.model(*part).item() / len(parts)
        self.model.train()
        total = self._parallel.averaged(torch.tensor(total, dtype=torch.float64, device=self.device)).item()
        if not math.isfinite(total):
            raise Diverged(f"loss {total} on held-out text; lower optimizer.learning_rate")
        return total / len(batches) * self.corpus.tokens_a_byte(torch.stack([targets for _, targets in batches]))

    def precision(self) -> AbstractContextManager[object]:
        """Context of the model's passes: autocast, if the configuration asks for it."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.case.dtype == "bfloat16" else nullcontext()
