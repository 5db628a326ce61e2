"""One training: model, optimizer and batches, step by step."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from jobs._corpus import Corpus
from jobs._live import LiveTraining
from jobs.measure.clock import synchronize
from jobs.measure.memory import tensor_bytes
from jobs.measure.route import route_of
from jobs.point import Beat
from jobs.spec import Strict
from nsa_core import NSAConfig
from nsa_core.model import ModelConfig, NSATransformer

T = TypeVar("T")


class OptimizerSpec(Strict):
    """AdamW with a linear warm-up and a cosine decay."""

    learning_rate: float = Field(default=3e-3, gt=0, description="at the end of the warm-up")
    final_fraction: float = Field(default=0.1, ge=0, le=1, description="of the learning rate, at the last step")
    warmup_steps: int = Field(default=10, ge=0)
    weight_decay: float = Field(default=0.1, ge=0, description="of matrices; vectors are not decayed")
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    grad_clip: float = Field(default=1.0, gt=0, description="highest norm of all gradients together")


class Ineffective(Exception):  # noqa: N818 - the state it leads to is "error"; the name says which
    """A requested setting had no effect."""


class Diverged(Exception):  # noqa: N818
    """The loss became infinite or NaN."""


@dataclass(frozen=True)
class Run:
    """Results of a training."""

    losses: list[float]  # [nat/byte], one a step
    seconds: list[float]  # from the end of one step to that of the next
    before: float  # held-out loss of the untrained model
    after: float


class Trainer:
    """Model, optimizer and batches, trained step by step."""

    def __init__(self, config: Mapping[str, Any], corpus: Corpus, device: torch.device) -> None:
        shape = dict(config["model"])
        shape["nsa"] = NSAConfig(**shape["nsa"])
        self.steps: int = config["steps"]
        self.spec = OptimizerSpec.model_validate(config["optimizer"])
        self.device = device
        self.corpus = corpus
        self.route: dict[str, str] = {}
        self._size = (config["batch"], config["seq_len"])
        self._autocast = config["precision"] == "bfloat16"
        self._batches: Iterator[tuple[Tensor, Tensor]] = corpus.batches(*self._size, config["seed"])
        torch.manual_seed(config["seed"])
        self.model = NSATransformer(ModelConfig(**shape)).to(device).train()
        self._loss_of = self.model
        if config["compile"]:
            torch.compiler.reset()  # graphs of an earlier point of this process
            self._loss_of = torch.compile(self.model, fullgraph=True, dynamic=False)
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": self.spec.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=self.spec.learning_rate,
            betas=(self.spec.beta1, self.spec.beta2),
            fused=device.type == "cuda",
        )

    @property
    def resident(self) -> int:
        """Bytes of weights and optimizer state."""
        state = [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        return tensor_bytes([*self.model.parameters(), *self.model.buffers(), *state])

    def run(self, heldout_batches: int, beat: Beat) -> Run:
        """Train all steps; measure the held-out loss before and after them.

        Raises:
            Diverged: a loss became infinite or NaN.
            Ineffective: checkpointing is set but did not happen.
        """
        heldout = self.corpus.heldout_batches(*self._size, heldout_batches)
        before = self._heldout_loss(heldout, beat)
        losses: list[float] = []
        seconds: list[float] = []
        ended = time.perf_counter()
        # Start the next step before waiting for a loss, so that a GPU is never idle.
        live = LiveTraining(beat, self._size[0] * self._size[1], self.device)
        for loss, norm in in_order(self._steps(beat), ahead=1 if self.device.type == "cuda" else 0):
            before_it, ended = ended, time.perf_counter()
            losses.append(loss)
            seconds.append(ended - before_it)
            _check_finite(loss, f"at step {len(losses)}")
            live.step(len(losses), loss, norm, learning_rate(self.spec, len(losses) - 1, self.steps))
        if self.model.config.checkpointing and not self.model.checkpointing_effective:
            raise Ineffective("checkpointing: it was asked for, and the model did not do it")
        return Run(losses, seconds, before, self._heldout_loss(heldout, beat))

    def _steps(self, beat: Beat) -> Iterator[Callable[[], list[float]]]:
        """Start one step after another; yields functions that wait for its loss and gradient norm."""
        for done in range(self.steps):
            beat("train", done, self.steps)
            self._set_rate(learning_rate(self.spec, done, self.steps))
            yield self._start() if done else self._start_first()

    def _start_first(self) -> Callable[[], list[float]]:
        """Like `_start`, but records the route; a compiled model notes it while it is traced."""
        started: list[Callable[[], list[float]]] = []
        self.route = route_of(lambda: started.append(self._start()))
        return started[0]

    def step(self) -> float:
        """Run one optimizer step and wait for the device; returns the loss [nat/byte]."""
        loss, _ = self._start()()
        synchronize(self.device)
        return loss

    def _start(self) -> Callable[[], list[float]]:
        """Start one optimizer step without waiting for a GPU.

        Returns:
            A function that waits for the loss [nat/byte] and the gradients' norm before clipping.
        """
        tokens, targets = (x.to(self.device, non_blocking=True) for x in next(self._batches))
        with self._precision():
            loss = self._loss_of(tokens, targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return _on_its_way(torch.stack([loss.detach().float(), norm.detach().float()]))

    @torch.no_grad()
    def _heldout_loss(self, batches: list[tuple[Tensor, Tensor]], beat: Beat) -> float:
        self.model.eval()
        total = 0.0
        for done, (tokens, targets) in enumerate(batches):
            beat("heldout loss", done, len(batches))
            with self._precision():
                total += self.model(tokens.to(self.device), targets.to(self.device)).item()
        self.model.train()
        _check_finite(total, "on held-out text")
        return total / len(batches)

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16) if self._autocast else nullcontext()

    def _set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate


def in_order(started: Iterable[Callable[[], T]], ahead: int) -> Iterator[T]:
    """Results in order; `ahead` more calls are started before one is waited for."""
    under_way: deque[Callable[[], T]] = deque()
    for wait in started:
        under_way.append(wait)
        if len(under_way) > ahead:
            yield under_way.popleft()()
    yield from (wait() for wait in under_way)


def _on_its_way(x: Tensor) -> Callable[[], list[float]]:
    """Queue a copy of numbers to the host; returns a function that waits for this copy alone."""
    if not x.is_cuda:
        return x.tolist
    numbers = torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> list[float]:
        copied.synchronize()
        return numbers.tolist()

    return wait


def _check_finite(loss: float, where: str) -> None:
    if not math.isfinite(loss):
        raise Diverged(f"loss {loss} {where}; lower optimizer.learning_rate")


def learning_rate(spec: OptimizerSpec, step: int, steps: int) -> float:
    """Learning rate of step 0 .. steps-1: linear warm-up from near 0, then a cosine decay to final_fraction."""
    if step < spec.warmup_steps:
        return spec.learning_rate * (step + 1) / spec.warmup_steps
    progress = (step - spec.warmup_steps) / max(1, steps - 1 - spec.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return spec.learning_rate * (spec.final_fraction + (1 - spec.final_fraction) * cosine)
