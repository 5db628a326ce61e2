"""Decoding throughput and bytes read against context length: NSA beside dense attention.

A step stores one token of every sequence in the caches of all layers and attends from it. It is checked against the
oracle, then timed at a constant context: each step first removes the token that the last one stored. If the project's
kernels compute the step, replays of a CUDA graph are timed, else eager calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator

from jobs._decode_steps import DENSE, DecodeCase, attention_step, check_steps, model_step
from jobs.hardware.environment import environment
from jobs.measure.case import bare_model
from jobs.measure.clock import measure_time
from jobs.measure.route import route_of
from jobs.measure.stats import summarize
from jobs.schema.point import Beat, Machine, Measurement, Metric, Point
from jobs.schema.quantities import AGREEMENT, TELEMETRY, THROUGHPUT, TIME, Better, Plot, Quantity, Role
from jobs.specs.fields import (
    NSA,
    Count,
    DType,
    HeadsSpec,
    Layers,
    Lengths,
    Preset,
    TimingSpec,
    Unique,
    implementation_names,
    torch_dtype,
)
from jobs.specs.fit import backend_reasons, does_not_fit, heads_of, refuse_unusable, threads
from jobs.specs.nsa_effect import refuse_idle
from jobs.specs.spec import JobSpec
from nsa_core.decode import TRITON
from nsa_core.model import PRESETS, ModelConfig

# A step makes equally many tokens at every context length, so the guides of its rate differ from those of a call.
STEP_THROUGHPUT = replace(THROUGHPUT, plot=Plot.STEP_RATE)
BYTES_READ = Quantity(
    "bytes_read", "MiB", "Bytes read by a step's attention", "bytes read", Better.LOWER, Role.HEADLINE
)
QUANTITIES = (TIME, STEP_THROUGHPUT, BYTES_READ, *AGREEMENT, *TELEMETRY)


class Spec(JobSpec):
    """A sweep of context lengths x implementations."""

    kind: Literal["decode"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe
    workload: Literal["attention", "model"] = Field(
        default="attention", description="attention: rotation, caches and attention of all layers; model: all of a step"
    )
    implementations: Annotated[list[str], Field(min_length=1), Unique, implementation_names(DENSE)]
    lengths: Lengths
    batch: Count = 1
    layers: Layers | None = Field(default=None, description="None: the preset's; 1 with a shape")
    dtype: DType = "float32"
    preset: Preset | None = None
    shape: HeadsSpec | None = Field(default=None, description="in place of a preset, for workload attention")
    nsa: NSA | None = Field(default=None, description="None: the preset's, or the defaults")
    timing: TimingSpec = TimingSpec()

    @model_validator(mode="after")
    def _one_shape(self) -> Spec:
        if self.preset is not None and self.shape is not None:
            raise ValueError(f"preset: {self.preset!r}: shape is given as well; keep one of the two")
        if self.preset is None and (self.shape is None or self.workload == "model"):
            raise ValueError(f"preset: missing; use one of {', '.join(PRESETS)}, or workload attention with a shape")
        if self.nsa is not None and self.nsa.compress != "mean" and self.workload == "attention":
            fix = "is learned by a layer; use mean, or workload: model"
            raise ValueError(f"nsa.compress: {self.nsa.compress!r}: {fix}")
        refuse_idle(self, self.nsa, self.implementations, None)
        return self

    @property
    def model(self) -> ModelConfig:
        """The model, or the model whose attention is measured."""
        if self.preset is not None:
            base = PRESETS[self.preset]
        else:
            assert self.shape is not None
            base = bare_model(self.shape.query_heads, self.shape.kv_heads, self.shape.head_dim)
        return replace(base, layers=self.layers or base.layers, nsa=self.nsa or base.nsa)

    def points(self, machine: Machine) -> Sequence[Point]:
        """Points, shortest contexts first.

        Raises:
            SpecError: an implementation cannot run on this machine.
        """
        reasons = backend_reasons(machine, torch_dtype(self.dtype), heads_of(self.model))
        refuse_unusable(self.implementations, reasons | {DENSE: None})
        return [self._point(machine, *axes) for axes in product(sorted(self.lengths), self.implementations)]

    def _point(self, machine: Machine, seq_len: int, implementation: str) -> Point:
        attention = {"attention": "dense"} if implementation == DENSE else {"backend": implementation}
        case = DecodeCase(
            workload=self.workload,
            implementation=implementation,
            seq_len=seq_len,
            batch=self.batch,
            dtype=self.dtype,
            device=machine.device,
            seed=self.seed,
            threads=threads(self, machine),
            model=replace(self.model, **attention),
            timing=self.timing.plan,
        )
        needed = held_bytes(case.model, self.batch, seq_len, case.torch_dtype.itemsize)
        return Point(
            kind="decode",
            label=f"{implementation} decode S={seq_len}",
            config=case.to_config(),
            axes=replace(case.axes("decode"), layers=case.model.layers),  # steps go through all of them
            skip_reason=does_not_fit(needed, self, machine, "shorten lengths, or lower batch or layers"),
        )


def held_bytes(model: ModelConfig, batch: int, seq_len: int, itemsize: int) -> int:
    """Bytes of the caches: one key and one value for each token, layer and kv head; for NSA, compressed ones as well.

    Windows and the temporary tensors of a step are left out.
    """
    held = seq_len if model.attention == DENSE else seq_len + model.nsa.cmp_tokens(seq_len)
    return 2 * batch * model.layers * model.kv_heads * model.head_dim * itemsize * held


def bytes_read(model: ModelConfig, batch: int, seq_len: int, itemsize: int) -> float:
    """Bytes that the attention of one step reads from the caches, over all layers and sequences.

    With e bytes a number and D numbers a key or value, each sequence, layer and kv head reads

        dense: 2·D·e·S
        nsa: 2·D·e·(N + n + w + l/d) + 4·G·N

    for S tokens of context, N visible compressed tokens, n tokens in the chosen blocks up to the query, w in the
    window, l tokens compressed in every d-th step, and G heads a group, whose scores are read back in float32.
    Weights, activations, and the partial results of split keys are left out.
    """
    row = 2 * model.head_dim * itemsize
    if model.attention == DENSE:
        return float(batch * model.layers * model.kv_heads * row * seq_len)
    nsa, group = model.nsa, model.heads // model.kv_heads
    compressed = nsa.cmp_tokens(seq_len)
    chosen = min(seq_len, nsa.slc_count * nsa.slc_block - -seq_len % nsa.slc_block)
    tokens = compressed + chosen + min(seq_len, nsa.window) + nsa.cmp_block / nsa.cmp_stride
    return batch * model.layers * model.kv_heads * (row * tokens + 4 * group * compressed)


@torch.no_grad()
def measure(config: Mapping[str, Any], beat: Beat) -> Measurement:
    """Check one point and measure its time.

    Raises:
        WrongResult: a step disagrees with the oracle.
        torch.OutOfMemoryError, RuntimeError: memory ran out (device; host).
    """
    case = DecodeCase.from_config(config)
    device = case.start()
    beat("check")
    agreement = check_steps(case, device)
    beat("caches")
    step = (model_step if case.workload == "model" else attention_step)(case, device, beat)
    beat("first run")
    route = route_of(step)
    on_device = device.type == "cuda" and set(route.values()) == {TRITON}
    timing = measure_time(_graphed(step) if on_device else step, device, case.timing, beat)
    how = f"{timing.method}; {'replays of a CUDA graph' if on_device else 'eager'}"
    per_second = [1000 * case.batch / ms for ms in timing.samples_ms]
    read = bytes_read(case.model, case.batch, case.seq_len, case.torch_dtype.itemsize)
    metrics = [
        summarize(TIME, timing.samples_ms, how),
        summarize(STEP_THROUGHPUT, per_second, f"{case.batch} tokens over each sample of time"),
        Metric.of(BYTES_READ, read / 2**20, method="counted: what the attention of a step reads of its caches"),
        *agreement.metrics(),
    ]
    return Measurement(tuple(metrics), route, environment(device))


def _graphed(step: Callable[[], object]) -> Callable[[], object]:
    """A replay of `step`, captured as a CUDA graph; `step` must have run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
