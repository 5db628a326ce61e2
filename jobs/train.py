"""Training of a small language model: throughput, held-out loss, memory, and the duration of a planned run.

Training uses one process, or several ranks (jobs.training). A point is one kind of attention; all points
get the same batches in the same order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator

from jobs.schema.plain_text import shown
from jobs.schema.point import Beat, Machine, Measurement, Point
from jobs.schema.training_plan import MODE_AXES, TrainingPlan, mode_of
from jobs.specs.fields import BYTES, Count, ModelledSpec, Several
from jobs.specs.fit import backend_reasons, refuse_idle
from jobs.specs.spec import SpecError
from jobs.specs.user_files import is_missing
from jobs.training.case import CheckpointSpec, Layout, OptimizerSpec, Parallel, TextCase, check_warm_up, divided
from jobs.training.data.corpus import DataError, held_out
from jobs.training.data.spec import DataSpec
from jobs.training.errors import noting_sigterm
from jobs.training.launch import run_ranks
from jobs.training.metrics import QUANTITIES, measurement
from jobs.training.rank import RankReport, train_rank
from nsa_core.backends.triton import Heads

__all__ = ["AXES", "QUANTITIES", "Case", "Spec", "TrainingSpec", "measure", "trained"]

AXES = MODE_AXES
Case = TextCase


class TrainingSpec(ModelledSpec):
    """A training for each kind of attention, whatever ends it: the fields of every kind that trains."""

    DEFAULT = "tiny"
    RANDOM_TOKENS = False
    attention: Several[Literal["nsa", "dense"]] = Field(default=["nsa"], description="a training for each")
    backend: str = Field(default="auto", description="of NSA; dense attention has its own")
    checkpointing: bool = Field(default=False, description="compute blocks anew in the backward pass, to save memory")
    compile: bool = Field(default=False, description="torch.compile the passes, or fail; the first step takes minutes")
    cuda_graphs: bool = Field(default=False, description="replay compiled passes as CUDA graphs, whose memory stays")
    seq_len: int = Field(ge=2, le=2**27, description="tokens of a sequence")
    batch: Count = Field(
        default=1, description="sequences of a step: micro_batch × ranks / context_parallel × accumulation"
    )
    ranks: Count = Field(default=1, description="processes that train together, each on its own GPU")
    context_parallel: Count = Field(default=1, description="ranks that have each sequence together, a divisor of ranks")
    micro_batch: Count | None = Field(default=None, description="sequences of a rank in one pass; None: its whole part")
    parallel: Parallel = Field(
        default="ddp",
        description="ddp: every rank has all weights; replicate: the same without DDP's buckets; fsdp: weights and "
        "optimizer are sharded (FSDP2)",
    )
    gradient_compression: Literal["bf16"] | None = Field(default=None, description="dtype of sums over ranks")
    bucket_mb: float | None = Field(default=None, gt=0, le=2**16, description="MB of gradients that DDP sums at a time")
    steps: int = Field(ge=5, le=2**31, description="of the learning rate's schedule, which end the training")
    checkpoints: CheckpointSpec | None = Field(default=None, description="None: an interrupted training begins anew")
    restarts: int = Field(default=0, ge=0, le=100, description="after a process died, from the last checkpoint")
    precision: Literal["float32", "bfloat16"] = Field(default="float32", description="bfloat16: autocast; weights stay")
    optimizer: OptimizerSpec = OptimizerSpec()
    data: DataSpec = DataSpec()
    plan: TrainingPlan | None = Field(default=None, description="the long run that this short one is to judge")

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        """Refuse what cannot be done, and settings that would change nothing."""
        check_warm_up(self.optimizer, self.steps)
        together = self.context_parallel
        if self.ranks % together or self.seq_len % (2 * together if together > 1 else 1):
            raise ValueError(
                f"context_parallel: {together}: use a divisor of the {self.ranks} ranks, and a seq_len that is a "
                f"multiple of {2 * together}"
            )
        _, accumulation = divided(self.batch, self.ranks, self.micro_batch, together)
        several = {"parallel": "ddp", "gradient_compression": None, "bucket_mb": None}
        idle = [name for name, usual in several.items() if self.ranks == 1 and getattr(self, name) != usual]
        no_graphs = {  # PyTorch captures none, or a replay would overwrite gradients
            "only compiled passes are captured; set compile, or leave it out": not self.compile,
            "a CPU has none; use device: cuda, or leave it out": self.device != "cuda",
            "packed documents change the sizes of a step; leave it out": self.data.pack,
            "FSDP2 gathers weights in other places in each step; use parallel: ddp": self.parallel == "fsdp",
            f"a step's {accumulation} passes would overwrite each other's gradients; use micro_batch "
            f"{self.batch * together // self.ranks}, or leave it out": accumulation > 1,
        }
        if self.restarts and self.checkpoints is None:
            raise ValueError(
                f"restarts: {self.restarts}: there is no checkpoint to restart from; add 'checkpoints: {{every: N}}', "
                "or leave restarts out"
            )
        if idle:
            value = f"{idle[0]}: {getattr(self, idle[0])!r}"
            raise ValueError(f"{value}: has no effect on one rank; leave it out, or set ranks to 2 or more")
        if self.bucket_mb is not None and self.parallel != "ddp":
            fix = "leave it out, or use parallel: ddp"
            raise ValueError(f"bucket_mb: {self.bucket_mb:g}: {self.parallel} has no buckets; {fix}")
        if self.gradient_compression is not None and self.parallel == "replicate":
            raise ValueError(
                f"gradient_compression: {self.gradient_compression}: replicate averages gradients as they are; leave "
                "it out, or use parallel: ddp"
            )
        if self.data.pack and self.compile and self.ranks > 1:
            raise ValueError(f"ranks: {self.ranks}: packed documents are compiled on one rank alone; leave compile out")
        for name, value in {"data.pack": self.data.pack, "compile": self.compile}.items():
            if value and together > 1:
                raise ValueError(f"{name}: true: ranks that exchange keys within a pass cannot; leave it out")
        if self.cuda_graphs and any(no_graphs.values()):
            raise ValueError(f"cuda_graphs: true: {next(why for why, wrong in no_graphs.items() if wrong)}")
        names = [self.backend if attention == "nsa" else attention for attention in self.attention]
        refuse_idle(self, self.own_nsa, names, self.precision)
        return self

    @model_validator(mode="after")
    def _check_gpus(self) -> Self:
        """Ask for as many GPUs as ranks, and refuse another number."""
        asked = self.resources.num_gpus
        if self.ranks == 1 or self.device == "cpu":
            return self
        if asked is None and self.device == "auto":
            raise ValueError(f"device: 'auto': {self.ranks} ranks need GPUs or none; use cuda or cpu")
        if asked is None:
            return self.model_copy(update={"resources": self.resources.model_copy(update={"num_gpus": self.ranks})})
        if asked != self.ranks:
            raise ValueError(
                f"resources.num_gpus: {asked:g}: each of {self.ranks} ranks needs its own; use {self.ranks}, or leave "
                "it out"
            )
        return self

    def paths(self) -> Mapping[str, Path]:
        paths = {"data.path": self.data.path, "data.tokenizer_path": self.data.tokenizer_path}
        return {field: path for field, path in paths.items() if path is not None}

    def notes(self) -> Sequence[str]:
        if any(map(is_missing, self.paths().values())):
            return ()
        try:
            return (f"held out: {held_out(self.data, self.seq_len)}",)
        except OSError as err:
            why = f"{shown(str(err.filename))} cannot be read ({err.strerror})"
            raise SpecError(f"data.path: {why}; let this user read it, or leave it out") from None
        except DataError as err:
            raise SpecError(str(err)) from None

    def points(self, machine: Machine) -> Sequence[Point]:
        """One point for each kind of attention. Raises SpecError: the backend is unknown or cannot run on this machine,
        or the vocabulary cannot be told here."""
        model = self.base
        heads = Heads(model.head_dim, model.heads // model.kv_heads)
        reasons = backend_reasons(machine, getattr(torch, self.precision), heads)
        reason = (reasons | {"auto": None}).get(self.backend, "there is no such backend")
        if "nsa" in self.attention and reason is not None:
            usable = [name for name, why in reasons.items() if why is None]
            raise SpecError(f"backend: {self.backend!r}: {reason}; use {', '.join([*usable, 'auto'])}")
        return [self._point(machine, attention, reasons) for attention in self.attention]

    def _point(self, machine: Machine, attention: Literal["nsa", "dense"], reasons: Mapping[str, str | None]) -> Point:
        micro_batch, accumulation = divided(self.batch, self.ranks, self.micro_batch, self.context_parallel)
        exchange = (self.parallel, self.gradient_compression, self.bucket_mb, self.context_parallel)
        implementation = self.backend if attention == "nsa" else "dense"
        if implementation == "auto":  # resolved here: a point names it even if it runs on another host
            implementation = "triton" if machine.device == "cuda" and reasons["triton"] is None else "chunked"
        on_device = ("triton", "dense") if self.precision == "bfloat16" else ("triton",)
        if self.data.pack and self.compile and (machine.device != "cuda" or implementation not in on_device):
            why = f"{attention} attention by {implementation} in {self.precision} on {machine.device}"
            raise SpecError(
                f"compile: true: {why} reads the bounds of packed documents on the host; leave compile out, or use a "
                "GPU, backend: triton and precision: bfloat16"
            )
        model = self.base.under(implementation)
        model = replace(model, vocab_size=self._vocabulary(), checkpointing=self.checkpointing)
        layout = Layout(micro_batch, self.ranks, accumulation, *exchange)
        own = {name: getattr(self, name) for name in type(self).model_fields.keys() & Case.model_fields.keys()}
        own |= {"dtype": self.precision, "model": model, "layout": layout, **self.case_fields()}
        case = Case.of(self, machine, (implementation, "train", self.seq_len, self.batch), ranks=self.ranks, **own)
        ranks = f" {self.ranks} ranks {self.parallel}" if self.ranks > 1 else ""
        ranks += f" context {self.context_parallel}" if self.context_parallel > 1 else ""
        settings = f"{' compiled' if self.compile else ''}{' graphs' if self.cuda_graphs else ''}{ranks}"
        label = f"{attention} {self.model_name} S={self.seq_len}{settings}"
        advice = "shorten seq_len, lower batch or turn checkpointing on"
        return case.point(self, machine, label, advice, more=mode_of(case.model_dump()))

    def _vocabulary(self) -> int:
        """The model's, which has room for the text's. Raises SpecError."""
        needed, given = self.data.vocabulary(), None if self.model is None else self.model.vocab_size
        if given is not None and given < (needed or BYTES):
            raise SpecError(
                f"model.vocab_size: {given}: the text has {needed or BYTES} tokens; use so many, or leave it out"
            )
        return given or needed or self.base.vocab_size

    def case_fields(self) -> Mapping[str, Any]:
        """Fields of the points' case that the spec has under no field of the same name."""
        return {}

    @property
    def keeps_checkpoints(self) -> bool:
        return self.checkpoints is not None

    @property
    def world_size(self) -> int:
        return self.ranks


class Spec(TrainingSpec):
    """A short training for each kind of attention."""

    probe: bool = Field(
        default=False,
        description="at the end, measure the held-out loss by position and whether the model sees ahead",
    )
    kind: Literal["train"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe

    @model_validator(mode="after")
    def _check_checkpoints(self) -> Self:
        """Refuse checkpoints that would never be saved, and a probe of sequences that ranks share."""
        if self.checkpoints is not None and self.checkpoints.every > self.steps:
            raise ValueError(
                f"checkpoints.every: {self.checkpoints.every}: is more than the {self.steps} steps; use fewer"
            )
        if self.probe and self.context_parallel > 1:
            raise ValueError("probe: true: ranks that have a sequence together cannot; leave it out")
        return self


def measure(case: Case, beat: Beat) -> Measurement:
    """Train in this process, or on several ranks. Raises as `trained`."""
    return measurement(case, trained(case, beat))


def trained(case: Case, beat: Beat) -> list[RankReport]:
    """Train in this process, or on several ranks; returns their reports, by rank. Raises as train_rank or run_ranks."""
    with noting_sigterm() as stop:
        if case.layout.ranks > 1:
            return run_ranks(case, beat, stop)
        return [train_rank(case, case.torch_device, 0, beat, stop)]
