"""Training of a small language model on bytes: throughput, held-out loss, memory, and the duration of a planned run.

Training uses one process. A point is one kind of attention; all points get the same batches in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator

from jobs._corpus import load_corpus
from jobs._fields import NSA, Count, Preset, Unique
from jobs._fit import backend_reasons, does_not_fit, threads
from jobs._training import OptimizerSpec, Run, Trainer
from jobs.measure import check
from jobs.measure.environment import environment
from jobs.measure.flops import training_flops_per_token
from jobs.measure.memory import Peak, measure_peak
from jobs.measure.stats import summarize
from jobs.peaks import BF16_PEAKS
from jobs.point import Axes, Beat, Machine, Measurement, Metric, Point
from jobs.quantities import (
    AGREEMENT,
    ESTIMATE_ERROR,
    MEMORY,
    TELEMETRY,
    THROUGHPUT,
    TIME,
    Better,
    Plot,
    Quantity,
    Role,
)
from jobs.spec import JobSpec, SpecError, Strict
from jobs.training_plan import TrainingPlan
from nsa_core.backends import default
from nsa_core.memory import MemoryEstimate, estimate_model, predicts
from nsa_core.model import PRESETS, ModelConfig

LOSS = Quantity("loss", "nat/byte", "Training loss", "loss", Better.LOWER, Role.HEADLINE, Plot.CURVE)
HELDOUT_LOSS = Quantity("heldout_loss", "nat/byte", "Held-out loss", better=Better.LOWER, role=Role.HEADLINE)
HELDOUT_LOSS_BEFORE = Quantity("heldout_loss_before", "nat/byte", "Held-out loss before training")
MFU = Quantity("mfu", "%", "Model FLOPs utilisation", "MFU", Better.HIGHER, Role.HEADLINE)
PLANNED_TIME = Quantity("planned_time", "h", "Time that the plan takes", "planned time", Better.LOWER, Role.HEADLINE)
THROUGHPUT_NEEDED = Quantity("throughput_needed", "tok/s", "Throughput that the plan needs")
QUANTITIES = (
    *(TIME, THROUGHPUT, LOSS, HELDOUT_LOSS, MFU, PLANNED_TIME, *MEMORY),
    *(HELDOUT_LOSS_BEFORE, THROUGHPUT_NEEDED, ESTIMATE_ERROR, *AGREEMENT, *TELEMETRY),
)


class DataSpec(Strict):
    """Files that the corpus is read from."""

    path: Path | None = Field(default=None, strict=False, description="folder or file; None: Python's standard library")
    heldout: float = Field(default=0.1, gt=0, lt=1, description="share of the files that training never sees")
    heldout_batches: Count = Field(default=8, description="batches that the held-out loss is taken over")


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
    plan: TrainingPlan | None = Field(default=None, description="the long run that this short one is to judge")

    @model_validator(mode="after")
    def _warm_up_ends(self) -> Spec:
        if self.optimizer.warmup_steps >= self.steps:
            raise ValueError(
                f"optimizer.warmup_steps: {self.optimizer.warmup_steps}: must end before the last of the "
                f"{self.steps} steps; use at most {self.steps - 1}"
            )
        return self

    def paths(self) -> Mapping[str, Path]:
        """Files and folders that the points read, by field name."""
        return {} if self.data.path is None else {"data.path": self.data.path}

    def points(self, machine: Machine) -> Sequence[Point]:
        """One point for each kind of attention.

        Raises:
            SpecError: the backend is unknown or cannot run on this machine.
        """
        reasons = self._reasons(machine) | {"auto": None}
        if "nsa" in self.attention and reasons.get(self.backend, "there is no such backend") is not None:
            reason = reasons.get(self.backend, "there is no such backend")
            usable = [name for name, why in reasons.items() if why is None]
            raise SpecError(f"backend: {self.backend!r}: {reason}; use {', '.join(usable)}")
        return [self._point(machine, attention) for attention in self.attention]

    def _backend(self, machine: Machine) -> str:
        """Name of the backend that runs; resolved here, so that a point names it even if it runs on another host."""
        if self.backend != "auto":
            return self.backend
        return default(torch.device(machine.device), _compute_dtype(self.precision), self._reasons(machine))

    def _reasons(self, machine: Machine) -> dict[str, str | None]:
        return backend_reasons(machine, _compute_dtype(self.precision), PRESETS[self.preset].head_dim)

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
    """Predicted memory of a point's training; None without a prediction, as for compiled training."""
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


def measure(config: Mapping[str, Any], beat: Beat) -> Measurement:
    """Train with the point's configuration.

    Raises:
        WrongResult: the attention disagrees with the oracle.
        Diverged: a loss became infinite or NaN.
        Ineffective: checkpointing is set but did not happen.
        torch.OutOfMemoryError, RuntimeError: memory ran out (device; host).
    """
    if config["threads"] is not None:
        torch.set_num_threads(config["threads"])
    device = torch.device(config["device"])
    beat("corpus")
    data = DataSpec.model_validate(config["data"])
    corpus = load_corpus(data.path, data.heldout, config["seq_len"])
    trainer = Trainer(config, corpus, device)
    model = trainer.model.config
    beat("check")
    agreement = check.check_attention(
        _implementation(model),
        model.nsa,
        check.HeadShape(model.heads, model.kv_heads, model.head_dim),
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
        "compile": config["compile"],  # in one graph, else the first step would have raised
    }
    metrics = [*_speed(config, model, run, device), *_quality(run), *_memory(config, model, peak)]
    metrics += agreement.metrics()
    return Measurement(tuple(metrics), trainer.route, environment(device) | {"training": about}, peak.files)


def _speed(config: Mapping[str, Any], model: ModelConfig, run: Run, device: torch.device) -> list[Metric]:
    """Step time and throughput of the steady steps, MFU if the GPU's peak is known, and figures of the plan if any."""
    first = max(2, len(run.seconds) // 10)  # the first ones compile and allocate, the optimizer's state too
    steady = run.seconds[first:]
    tokens = config["batch"] * config["seq_len"]
    method = f"from the end of one step to that of the next, data and optimizer included, the first {first} left out"
    throughput = summarize(THROUGHPUT, [tokens / s for s in steady], method)
    metrics = [summarize(TIME, [1000 * s for s in steady], method), throughput]
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if gpu in BF16_PEAKS and config["precision"] == "bfloat16":
        per_token = training_flops_per_token(model, config["seq_len"])
        share = 100 * throughput.value * per_token / BF16_PEAKS[gpu]
        metrics.append(Metric.of(MFU, share, method=f"{per_token:.4g} FLOPs a token, {BF16_PEAKS[gpu]:.4g} a second"))
    if config["plan"] is not None:
        plan = TrainingPlan.model_validate(config["plan"])
        work = f"{plan.steps} steps x {plan.tokens_per_step} tokens"
        hours = plan.hours_at(throughput.value)
        metrics.append(Metric.of(PLANNED_TIME, hours, method=f"{work} at the measured throughput"))
        metrics.append(Metric.of(THROUGHPUT_NEEDED, plan.needed, method=f"{work} in {plan.hours:g} h"))
    return metrics


def _quality(run: Run) -> list[Metric]:
    last = max(1, len(run.losses) // 10)
    ending = sum(run.losses[-last:]) / last
    heldout = "mean cross entropy over fixed batches of held-out files"
    return [
        Metric.of(LOSS, ending, tuple(run.losses), method=f"mean of the last {last} steps; samples: all steps"),
        Metric.of(HELDOUT_LOSS_BEFORE, run.before, method=heldout),
        Metric.of(HELDOUT_LOSS, run.after, method=heldout),
    ]


def _memory(config: Mapping[str, Any], model: ModelConfig, peak: Peak) -> list[Metric]:
    """Peak memory of one whole step, and the error of the estimate."""
    estimate = _estimate(model, config)
    if estimate is None:
        return peak.metrics()
    error = 100 * (estimate.total - peak.allocated) / peak.allocated
    method = "(predicted - measured) / measured, of peak_memory"
    return [*peak.metrics(), Metric.of(ESTIMATE_ERROR, error, method=method)]
