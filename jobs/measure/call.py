"""The one way to measure a call: check it against the oracle, run it for its route, its time and its peak memory."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

import torch
from torch import Tensor

from jobs.hardware.environment import environment
from jobs.hardware.stats import summarize
from jobs.measure.check import Agreement, Operator, WrongResult, check_attention
from jobs.measure.clock import TimingSpec, measure_time
from jobs.measure.memory import measure_peak, tensor_bytes
from jobs.measure.rows import RowCheck, check_rows
from jobs.schema.axes import MODEL, Axes
from jobs.schema.point import Beat, Case, Device, Machine, Measurement, Metric, Point
from jobs.schema.quantities import THROUGHPUT, TIME, Quantity
from jobs.specs.fields import MODELS, HeadsSpec
from jobs.specs.fit import does_not_fit
from jobs.specs.spec import JobSpec
from nsa_core import NSAConfig
from nsa_core.functional import BRANCHES
from nsa_core.memory import MemoryEstimate, estimate_attention, estimate_model, predicts
from nsa_core.model import ModelConfig
from nsa_core.routes import Branch, route_of

if TYPE_CHECKING:
    from jobs.measure.passes import ModelPass


class ModelCase(Case):
    """One pass over a batch of sequences, of a model or of attention alone."""

    AUTOCAST: ClassVar[bool] = False  # whether weights are float32, and `dtype` is that of autocast
    SIZES: ClassVar[tuple[str, ...]] = ("dim", "ffn_dim", "tie_embeddings", "vocab_size")  # that are no axes themselves

    workload: Literal["attention", "model"] = "model"
    implementation: str  # a backend of the sparse operator, or a kind of dense attention
    pass_: str  # "forward", "forward+backward", "train" (with the optimizer's step) or "decode"
    seq_len: int  # tokens in a sequence
    batch: int  # sequences
    dtype: str
    device: Device
    seed: int
    threads: int | None  # of PyTorch on the CPU; None: its default
    timing: TimingSpec | None = None  # limits of the time measurement; None: it is not timed
    model: ModelConfig  # for workload attention a bare one, so that the key has only what is measured

    @classmethod
    def of(
        cls, spec: JobSpec, machine: Machine, place: tuple[str, str, int, int], *, ranks: int = 1, **own: Any
    ) -> Self:
        """The case of a spec at a place: implementation, pass, length and batch.

        Its CPU threads, of each rank, are the cores that the point is scheduled with; None (PyTorch's) on a GPU.
        """
        threads = max(1, int(spec.resources.num_cpus) // ranks) if machine.device == "cpu" else None
        implementation, pass_, seq_len, batch = place
        own |= {"implementation": implementation, "pass_": pass_, "seq_len": seq_len, "batch": batch}
        return cls(**own | {"device": machine.device, "seed": spec.seed, "threads": threads})

    @property
    def backward(self) -> bool:
        """Whether gradients are computed."""
        return self.pass_ not in ("forward", "decode")

    @property
    def branches(self) -> tuple[Branch, ...]:
        return BRANCHES

    @property
    def shape(self) -> HeadsSpec:
        return HeadsSpec.of(self.model)

    @property
    def tokens(self) -> int:
        """Tokens of a call."""
        return self.batch * self.seq_len

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    @property
    def pass_batch(self) -> int:
        """Sequences of one pass of one process."""
        return self.batch

    def estimate(self) -> MemoryEstimate | None:
        """Memory of a process that nsa_core.memory predicts; None if it has no prediction for the implementation."""
        if not predicts(self.implementation):
            return None
        common: dict[str, Any] = {"implementation": self.implementation, "batch": self.pass_batch}
        common |= {"seq_len": self.seq_len, "backward": self.backward, "device": self.torch_device}
        if self.workload == "attention":
            return estimate_attention(self.model.nsa, dtype=self.torch_dtype, **self.shape.model_dump(), **common)
        weights = torch.float32 if self.AUTOCAST else self.torch_dtype
        common["autocast"] = None if self.torch_dtype == weights else self.torch_dtype
        optimizer = "adamw" if self.pass_ == "train" else None
        return estimate_model(self.model, dtype=weights, optimizer=optimizer, **common)

    def predicted_bytes(self) -> int | None:
        """Predicted peak memory of a process; None without a prediction."""
        return None if (estimate := self.estimate()) is None else estimate.total

    def least_bytes(self) -> int | None:
        """Memory of the device without which the case cannot run; None if it is unknown."""
        return self.predicted_bytes()

    def point(self, spec: JobSpec, machine: Machine, label: str, advice: str, **axes: Any) -> Point:
        """The point that measures this case; skipped, with the advice, where it is predicted not to fit."""
        skip = does_not_fit(self.least_bytes(), spec, machine, advice)
        return Point(spec.kind, label, self, self.axes(**axes), self.predicted_bytes(), skip)

    def check(self) -> Agreement:
        """Compare the attention with the oracle, of a model also at the size of a pass. Raises WrongResult."""
        settings: tuple[Any, ...] = self.model.nsa, self.shape, self.torch_dtype, self.torch_device
        how: dict[str, Any] = {"backward": self.backward, "seed": self.seed, "branches": self.branches}
        agreement = check_attention(self.implementation, *settings, **how)
        return agreement if self.workload == "attention" else replace(agreement, rows=self.check_rows())

    def check_rows(self) -> tuple[Metric, ...]:
        """Compare rows of attention alone, at the size that the model's layers have it. Raises WrongResult."""
        operator = Operator.of(self.implementation, replace(self.model.nsa, compress="mean"), self.branches)
        size = self.shape, self.pass_batch, self.seq_len, self.torch_dtype, self.torch_device
        return check_rows(operator, *size, backward=self.backward, seed=self.seed)

    def axes(self, **own: Any) -> Axes:
        """Axes of the point; `own` adds some or replaces them."""
        fields = {"implementation", "workload", "pass_", "seq_len", "batch", "dtype", "device"}
        common: dict[str, Any] = self.model_dump(include=fields) | self.shape.model_dump()
        common["layers"] = self.model.layers if self.workload == "model" else None
        sizes = attrgetter(*self.SIZES, "heads", "kv_heads", "head_dim")
        if self.workload == "model":
            alike = [preset.nsa for preset in MODELS.values() if sizes(preset) == sizes(self.model)]
            parts = [] if alike else [f"{name} {getattr(self.model, name)}" for name in self.SIZES]
            usual = asdict((*alike, NSAConfig())[0])
            parts += [f"{name} {value}" for name, value in asdict(self.model.nsa).items() if value != usual[name]]
            if parts:
                own["more"] = {**own.get("more", {}), MODEL.name: ", ".join(parts)}
        return Axes(**common | own)


def bare_model(shape: HeadsSpec, nsa: NSAConfig | None, layers: int = 1) -> ModelConfig:
    """A model for measuring its attention alone: everything else has size 1."""
    heads, dim = (shape.query_heads, shape.kv_heads, shape.head_dim), shape.query_heads * shape.head_dim
    return ModelConfig(1, dim, layers, *heads, ffn_dim=1, nsa=nsa or NSAConfig())


@dataclass(frozen=True)
class FunctionCall:
    """A function that leaves nothing but its result."""

    run: Callable[[], object]  # does the same work each time
    resident: list[Tensor]  # tensors that stay allocated between runs
    rows: RowCheck | None = None  # renews the inputs and checks the results
    clear: Callable[[], None] = lambda: None  # frees what a run has left


C = TypeVar("C", bound="FunctionCall | ModelPass")


def measure_call(
    case: ModelCase,
    inputs: Callable[[], C],
    beat: Beat,
    *,
    first_run: Callable[[C], object] = lambda call: call.run(),
    throughput: Quantity | None = THROUGHPUT,
    graphed: Callable[[Mapping[str, str]], bool] | None = None,
    memory: bool = True,
    fastest_ms: float = 0.0,
) -> tuple[C, Measurement]:
    """Check a case, then measure its call: the route, the time, the peak of memory.

    What may slow down later calls, such as a profile, comes afterwards, on the call that is returned.

    Args:
        inputs: makes the call, once the check has passed.
        first_run: runs the call for the first time, which tells the route.
        throughput: quantity of the tokens per second of a timed call; None: none.
        graphed: whether a route is timed by replays of a CUDA graph; None: all are called eagerly.
        memory: whether to measure the peak of memory.
        fastest_ms: time below which no result can be right.

    Raises WrongResult: the implementation disagrees with the oracle, before anything is timed or in a timed call, or
    took less time than is possible; torch.OutOfMemoryError, RuntimeError: memory ran out (device; host).
    """
    if case.threads is not None:
        torch.set_num_threads(case.threads)
    device = case.torch_device
    beat("check")
    agreement = case.check()
    beat("inputs")
    call = inputs()
    beat("first run")
    route = route_of(lambda: first_run(call))
    metrics: list[Metric] = []
    files: dict[str, Any] = {}
    if case.timing is not None:
        run, how = call.run, "" if graphed is None else "; eager"
        if graphed is not None and graphed(route):
            graph, how = torch.cuda.CUDAGraph(), "; replays of a CUDA graph"
            with torch.cuda.graph(graph):
                result = call.run()

            def run() -> object:
                graph.replay()
                return result

        hooks = {} if call.rows is None else {"before": call.rows.renew, "after": call.rows.take}
        timed = measure_time(run, device, case.timing, beat, **hooks)
        if time.perf_counter is not perf_counter:
            raise WrongResult(f"{case.implementation}: replaced the process's clock, time.perf_counter")
        if call.rows is not None:
            beat("rows")
            metrics += call.rows.judge()
        if (took := median(timed.samples_ms)) < fastest_ms:
            raise WrongResult(
                f"{case.implementation}: took {took:.3g} ms, less than the {fastest_ms:.3g} ms that this card's "
                "arithmetic and bandwidth allow: it does not do the work, or not in the time that is measured"
            )
        metrics.append(summarize(TIME, timed.samples_ms, timed.method + how))
        if throughput is not None:
            per_second = [1000 * case.tokens / ms for ms in timed.samples_ms]
            metrics.append(summarize(throughput, per_second, f"{case.tokens} tokens over each sample of time"))
    if memory:
        beat("memory")
        call.clear()
        peak = measure_peak(call.run, device, tensor_bytes(call.resident))
        metrics += peak.metrics()
        files |= peak.files
    return call, Measurement((*metrics, *agreement.metrics()), route, environment(device), files)
