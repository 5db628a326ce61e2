"""Train a small language model on bytes: throughput, loss on text never seen, memory, and how long a plan would take.

One process. A point is one kind of attention; all see the same batches in the same order.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from jobs._corpus import Corpus, load_corpus
from jobs._fields import NSA, Count, Large, Preset, Unique, backend_reasons, does_not_fit, threads
from jobs.measure import check
from jobs.measure.clock import synchronize
from jobs.measure.environment import environment
from jobs.measure.flops import BF16_PEAKS, training_flops_per_token
from jobs.measure.memory import Peak, measure_peak, tensor_bytes
from jobs.measure.route import route_of
from jobs.measure.stats import summarize
from jobs.point import Axes, Beat, Machine, Measurement, Metric, Point
from jobs.spec import JobSpec, SpecError, Strict
from nsa_core import NSAConfig
from nsa_core.backends import default
from nsa_core.memory import MemoryEstimate, estimate_model, predicts
from nsa_core.model import PRESETS, ModelConfig, NSATransformer


class OptimizerSpec(Strict):
    """AdamW with a linear warm-up and a cosine decay."""

    learning_rate: float = Field(default=3e-3, gt=0, description="at the end of the warm-up")
    final_fraction: float = Field(default=0.1, ge=0, le=1, description="of the learning rate, at the last step")
    warmup_steps: int = Field(default=10, ge=0)
    weight_decay: float = Field(default=0.1, ge=0, description="of matrices; vectors are not decayed")
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    grad_clip: float = Field(default=1.0, gt=0, description="highest norm of all gradients together")


class DataSpec(Strict):
    """The corpus: bytes of files."""

    path: Path | None = Field(default=None, strict=False, description="folder or file; None: Python's standard library")
    heldout: float = Field(default=0.1, gt=0, lt=1, description="share of the files that training never sees")
    heldout_batches: Count = Field(default=8, description="batches that the held-out loss is taken over")

    @field_validator("path")
    @classmethod
    def _exists(cls, path: Path | None) -> Path | None:
        if path is not None and not path.exists():
            raise ValueError("there is no such file; give an existing file or folder")
        return path


class PlanSpec(Strict):
    """The long run that this short one is to judge. Targets that contradict each other are refused."""

    steps: Large
    tokens_per_step: Large
    hours: float = Field(gt=0)
    tokens_per_second: float | None = Field(default=None, gt=0, description="a stated target, checked against the rest")

    @property
    def needed(self) -> float:
        """Tokens a second that finish the plan in time."""
        return self.steps * self.tokens_per_step / (self.hours * 3600)

    @model_validator(mode="after")
    def _consistent(self) -> PlanSpec:
        stated = self.tokens_per_second
        if stated is not None and stated < 0.99 * self.needed:
            takes = self.steps * self.tokens_per_step / stated / 3600
            raise ValueError(
                f"tokens_per_second: {stated:g}: {self.steps:,} steps x {self.tokens_per_step:,} tokens in "
                f"{self.hours:g} h need {self.needed:,.0f} tok/s, and at {stated:g} tok/s they take {takes:,.0f} h; "
                f"set tokens_per_second to at least {math.ceil(self.needed)}, or hours to {math.ceil(takes)}"
            )
        return self


class Spec(JobSpec):
    """A short training for each kind of attention."""

    kind: Literal["train"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe
    preset: Preset = "tiny"
    attention: Annotated[list[Literal["nsa", "dense"]], Field(min_length=1), Unique] = Field(default=["nsa"])
    nsa: NSA | None = Field(default=None, description="None: the preset's")
    backend: str = Field(default="auto", description="of NSA; dense attention has its own")
    checkpointing: bool = Field(default=False, description="compute blocks anew in the backward pass, to save memory")
    compile: bool = Field(
        default=False,
        description="torch.compile the training step's passes, or fail; the first step then takes a minute or more: "
        "see deadlines.heartbeat_s",
    )
    seq_len: int = Field(ge=2, le=2**27)
    batch: Count = 1
    steps: int = Field(ge=5, le=2**31)
    precision: Literal["float32", "bfloat16"] = Field(default="float32", description="bfloat16: autocast; weights stay")
    optimizer: OptimizerSpec = OptimizerSpec()
    data: DataSpec = DataSpec()
    plan: PlanSpec | None = None

    @model_validator(mode="after")
    def _warm_up_ends(self) -> Spec:
        if self.optimizer.warmup_steps >= self.steps:
            raise ValueError(
                f"optimizer.warmup_steps: {self.optimizer.warmup_steps}: must end before the last of the "
                f"{self.steps} steps; use at most {self.steps - 1}"
            )
        return self

    def points(self, machine: Machine) -> Sequence[Point]:
        """One point for each kind of attention.

        Raises:
            SpecError: the backend is unknown or cannot run on this machine.
        """
        reasons = backend_reasons(machine, _compute_dtype(self.precision)) | {"auto": None}
        if "nsa" in self.attention and reasons.get(self.backend, "there is no such backend") is not None:
            reason = reasons.get(self.backend, "there is no such backend")
            usable = [name for name, why in reasons.items() if why is None]
            raise SpecError(f"backend: {self.backend!r}: {reason}; use {', '.join(usable)}")
        return [self._point(machine, attention) for attention in self.attention]

    def _backend(self, machine: Machine) -> str:
        """By name, so that what runs is what the point says even where the machine is another one."""
        if self.backend != "auto":
            return self.backend
        dtype = _compute_dtype(self.precision)
        return default(torch.device(machine.device), dtype, backend_reasons(machine, dtype))

    def _point(self, machine: Machine, attention: Literal["nsa", "dense"]) -> Point:
        base = PRESETS[self.preset]
        model = replace(
            base,
            attention=attention,
            nsa=self.nsa or base.nsa,
            backend=self._backend(machine) if attention == "nsa" else "auto",
            checkpointing=self.checkpointing,
        )
        common = self.model_dump(mode="json", include={"seq_len", "batch", "steps", "precision", "compile", "seed"})
        sections = self.model_dump(mode="json", include={"optimizer", "data", "plan"})
        config = {
            **common,
            **sections,
            "model": asdict(model),
            "device": machine.device,
            "threads": threads(self, machine),
        }
        estimate = _estimate(model, config)
        needed = None if estimate is None else estimate.total
        advice = "shorten seq_len, lower batch or turn checkpointing on"
        return Point(
            kind="train",
            label=f"{attention} {self.preset} S={self.seq_len}{' compiled' if self.compile else ''}",
            config=config,
            axes=Axes(
                implementation=_implementation(model),
                workload="model",
                pass_="train",
                seq_len=self.seq_len,
                batch=self.batch,
                query_heads=model.heads,
                kv_heads=model.kv_heads,
                head_dim=model.head_dim,
                layers=model.layers,
                dtype=self.precision,
                device=machine.device,
            ),
            estimate_bytes=needed,
            skip_reason=does_not_fit(needed, self, machine, advice),
        )


def _compute_dtype(precision: str) -> torch.dtype:
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def _implementation(model: ModelConfig) -> str:
    return "dense" if model.attention == "dense" else str(model.backend)


def _estimate(model: ModelConfig, config: Mapping[str, Any]) -> MemoryEstimate | None:
    """Of a point's training; None where nothing predicts it: what a compiler keeps is its own choice."""
    implementation = _implementation(model)
    if config["compile"] or not predicts(implementation):
        return None
    return estimate_model(
        model,
        implementation=implementation,
        batch=config["batch"],
        seq_len=config["seq_len"],
        dtype=torch.float32,
        backward=True,
        optimizer="adamw",
        device=torch.device(config["device"]),
        autocast=None if config["precision"] == "float32" else _compute_dtype(config["precision"]),
    )


class Ineffective(Exception):  # noqa: N818 - the state it leads to is "error"; the name says which
    """A setting was asked for and had no effect."""


class Diverged(Exception):  # noqa: N818
    """The loss is no longer a finite number."""


@dataclass(frozen=True)
class _Run:
    """What a training leaves behind."""

    losses: list[float]  # [nat/byte], one a step
    seconds: list[float]  # from the end of one step to that of the next
    before: float  # held-out loss of the untrained model
    after: float


def measure(config: Mapping[str, Any], beat: Beat) -> Measurement:
    """Train as the point's configuration says.

    Raises:
        WrongResult: the attention disagrees with the oracle.
        Diverged: a loss became infinite or NaN.
        Ineffective: checkpointing was asked for and did not happen.
        torch.OutOfMemoryError, RuntimeError: memory ran out (device; host).
    """
    if config["threads"] is not None:
        torch.set_num_threads(config["threads"])
    device = torch.device(config["device"])
    beat("corpus")
    data = DataSpec.model_validate(config["data"])
    corpus = load_corpus(data.path, data.heldout, config["seq_len"])
    trainer = _Trainer(config, corpus, device)
    model = trainer.model.config
    beat("check")
    agreement = check.check_attention(
        _implementation(model),
        model.nsa,
        check.Shape(model.heads, model.kv_heads, model.head_dim),
        _compute_dtype(config["precision"]),
        device,
        backward=True,
        seed=config["seed"],
    )
    beat("heldout loss before")
    run = trainer.run(data.heldout_batches, beat)
    beat("memory")
    peak = measure_peak(trainer.step, device, trainer.resident)
    about = {
        "corpus": {"files": corpus.files, "train_bytes": len(corpus.train), "heldout_bytes": len(corpus.heldout)}
        | {"sha256": corpus.sha256},
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "checkpointing": trainer.model.checkpointing_effective,
        "compile": config["compile"],  # as one graph, or the first step would have raised
    }
    metrics = [*_speed(config, model, run, device), *_quality(run), *_memory(config, model, peak)]
    metrics += agreement.metrics()
    return Measurement(tuple(metrics), trainer.route, environment(device) | {"training": about}, peak.files)


class _Trainer:
    """Model, optimizer and batches; one step at a time."""

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

    def run(self, heldout_batches: int, beat: Beat) -> _Run:
        """All steps, with the held-out loss before and after them."""
        heldout = self.corpus.heldout_batches(*self._size, heldout_batches)
        before = self._heldout_loss(heldout, beat)
        losses: list[float] = []
        seconds: list[float] = []
        ended = time.perf_counter()
        # A GPU has the next step to go on with while the host waits for the loss of the one before.
        for loss in in_order(self._steps(beat), ahead=1 if self.device.type == "cuda" else 0):
            before_it, ended = ended, time.perf_counter()
            losses.append(loss)
            seconds.append(ended - before_it)
            _check_finite(loss, f"at step {len(losses)}")
        if self.model.config.checkpointing and not self.model.checkpointing_effective:
            raise Ineffective("checkpointing: it was asked for, and the model did not do it")
        return _Run(losses, seconds, before, self._heldout_loss(heldout, beat))

    def _steps(self, beat: Beat) -> Iterator[Callable[[], float]]:
        """Starts one step after another."""
        for done in range(self.steps):
            beat("train", done, self.steps)
            self._set_rate(learning_rate(self.spec, done, self.steps))
            yield self._start() if done else self._start_first()

    def _start_first(self) -> Callable[[], float]:
        """As `_start`, with the route taken down; a compiled model notes it while it is traced."""
        started: list[Callable[[], float]] = []
        self.route = route_of(lambda: started.append(self._start()))
        return started[0]

    def step(self) -> float:
        """One optimizer step; its loss [nat/byte]. Returns when the device is done."""
        loss = self._start()()
        synchronize(self.device)
        return loss

    def _start(self) -> Callable[[], float]:
        """One optimizer step, which a GPU may still be at. The result waits for its loss [nat/byte]."""
        tokens, targets = (x.to(self.device, non_blocking=True) for x in next(self._batches))
        with self._precision():
            loss = self._loss_of(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return _on_its_way(loss.detach())

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


def in_order(started: Iterable[Callable[[], float]], ahead: int) -> Iterator[float]:
    """The results of what is started, with `ahead` more started before one is waited for."""
    under_way: deque[Callable[[], float]] = deque()
    for wait in started:
        under_way.append(wait)
        if len(under_way) > ahead:
            yield under_way.popleft()()
    yield from (wait() for wait in under_way)


def _on_its_way(x: Tensor) -> Callable[[], float]:
    """Copies a number to the host behind the work that is queued now; the result waits for this copy alone."""
    if not x.is_cuda:
        return x.item
    number = torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> float:
        copied.synchronize()
        return number.item()

    return wait


def _check_finite(loss: float, where: str) -> None:
    if not math.isfinite(loss):
        raise Diverged(f"loss {loss} {where}; lower optimizer.learning_rate")


def learning_rate(spec: OptimizerSpec, step: int, steps: int) -> float:
    """Of step 0 .. steps-1: linear from near 0 over the warm-up, then a cosine down to final_fraction."""
    if step < spec.warmup_steps:
        return spec.learning_rate * (step + 1) / spec.warmup_steps
    progress = (step - spec.warmup_steps) / max(1, steps - 1 - spec.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return spec.learning_rate * (spec.final_fraction + (1 - spec.final_fraction) * cosine)


def _speed(config: Mapping[str, Any], model: ModelConfig, run: _Run, device: torch.device) -> list[Metric]:
    """Step time and throughput of the steady steps, MFU where the peak is known, the plan's needs and its end."""
    first = max(2, len(run.seconds) // 10)  # compilation, allocation and the optimizer's state come with the first ones
    steady = run.seconds[first:]
    tokens = config["batch"] * config["seq_len"]
    method = f"from the end of one step to that of the next, data and optimizer included, the first {first} left out"
    throughput = summarize("throughput", "tok/s", [tokens / s for s in steady], method)
    metrics = [summarize("time", "ms", [1000 * s for s in steady], method), throughput]
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if gpu in BF16_PEAKS and config["precision"] == "bfloat16":
        per_token = training_flops_per_token(model, config["seq_len"])
        share = 100 * throughput.value * per_token / BF16_PEAKS[gpu]
        metrics.append(
            Metric("mfu", "%", share, method=f"{per_token:.4g} FLOPs a token, {BF16_PEAKS[gpu]:.4g} a second")
        )
    if config["plan"] is not None:
        plan = PlanSpec.model_validate(config["plan"])
        work = f"{plan.steps} steps x {plan.tokens_per_step} tokens"
        hours = plan.steps * plan.tokens_per_step / throughput.value / 3600
        metrics.append(Metric("planned_time", "h", hours, method=f"{work} at the measured throughput"))
        metrics.append(Metric("throughput_needed", "tok/s", plan.needed, method=f"{work} in {plan.hours:g} h"))
    return metrics


def _quality(run: _Run) -> list[Metric]:
    last = max(1, len(run.losses) // 10)
    ending = sum(run.losses[-last:]) / last
    heldout = "mean cross entropy over fixed batches of held-out files"
    return [
        Metric(
            "loss", "nat/byte", ending, tuple(run.losses), method=f"mean of the last {last} steps; samples: all steps"
        ),
        Metric("heldout_loss_before", "nat/byte", run.before, method=heldout),
        Metric("heldout_loss", "nat/byte", run.after, method=heldout),
    ]


def _memory(config: Mapping[str, Any], model: ModelConfig, peak: Peak) -> list[Metric]:
    """Peak of one whole step, and how far the estimate was off."""
    estimate = _estimate(model, config)
    if estimate is None:
        return peak.metrics()
    error = 100 * (estimate.total - peak.allocated) / peak.allocated
    method = "(predicted - measured) / measured, of peak_memory"
    return [*peak.metrics(), Metric("estimate_error", "%", error, method=method)]
