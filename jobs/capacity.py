"""The longest sequence that a model trains on within a card's memory: as predicted, and as measured.

A point is one implementation, batch and checkpointing. Lengths are tried from the predicted one, upwards until one runs
out of memory or downwards until one fits, so that the next longer one is shown to fail. With a plan the longest one is
looked for, too, that trains as fast as the plan needs.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from statistics import median
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from jobs.hardware.environment import environment
from jobs.measure.clock import synchronize
from jobs.measure.memory import Peak, measure_peak, tensor_bytes
from jobs.measure.model_pass import Implementations, ModelPass, agree, model_axes, model_of_preset, predicted
from jobs.measure.route import route_of
from jobs.measure.stats import summarize
from jobs.process.exhaustion import ran_out_of_memory
from jobs.schema.axes import Axis
from jobs.schema.point import Beat, Machine, Measurement, Metric, Point, reporter
from jobs.schema.quantities import AGREEMENT, MEMORY, TELEMETRY, THROUGHPUT, THROUGHPUT_NEEDED, Better, Quantity, Role
from jobs.schema.training_plan import TrainingPlan
from jobs.specs.fields import NSA, Count, Lengths, Preset, Unique, torch_dtype
from jobs.specs.fit import backend_reasons, does_not_fit, heads_of, refuse_unusable, threads
from jobs.specs.nsa_effect import refuse_idle
from jobs.specs.spec import JobSpec
from nsa_core.memory import predicts

LONGEST = Quantity("longest", "token", "Longest sequence that fits", "longest", Better.HIGHER, Role.HEADLINE)
LONGEST_PREDICTED = Quantity("longest_predicted", "token", "Longest sequence predicted to fit", role=Role.HEADLINE)
LONGEST_IN_PLAN = Quantity(
    "longest_in_plan", "token", "Longest sequence that fits and meets the plan", "longest in plan", Better.HIGHER,
    Role.HEADLINE,
)  # fmt: skip
SHORTEST_FAILED = Quantity("shortest_failed", "token", "Shortest sequence that ran out of memory", role=Role.HEADLINE)
QUANTITIES = (
    *(LONGEST, LONGEST_IN_PLAN, LONGEST_PREDICTED, SHORTEST_FAILED, THROUGHPUT, THROUGHPUT_NEEDED),
    *(*MEMORY, *AGREEMENT, *TELEMETRY),
)
AXES = (Axis("checkpointing", "text", "checkpointing"),)

_STEPS = 3  # timed at the longest length


class Spec(JobSpec):
    """Implementations x batches x checkpointing, each with the lengths to try."""

    kind: Literal["capacity"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe
    preset: Preset
    implementations: Implementations
    lengths: Lengths = Field(description="lengths to try; the answer is one of them")
    batches: Annotated[list[Count], Field(min_length=1), Unique] = Field(default=[1])
    checkpointing: Annotated[list[bool], Field(min_length=1), Unique] = Field(
        default=[False, True], description="compute blocks anew in the backward pass, to save memory"
    )
    precision: Literal["float32", "bfloat16"] = Field(default="float32", description="bfloat16: autocast; weights stay")
    nsa: NSA | None = Field(default=None, description="None: the preset's")
    plan: TrainingPlan | None = Field(default=None, description="a long run, for which slower lengths do not count")

    @model_validator(mode="after")
    def _each_field_acts(self) -> Self:
        refuse_idle(self, self.nsa, self.implementations, self.precision)
        return self

    @model_serializer(mode="wrap")
    def _without_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out a plan that there is not: specs from before it existed stay equal."""
        data = super()._without_defaults(handler)
        if self.plan is None:
            data.pop("plan", None)
        return data

    def points(self, machine: Machine) -> Sequence[Point]:
        """A point for each implementation, batch and checkpointing.

        Raises:
            SpecError: an implementation cannot run on this machine.
        """
        model = model_of_preset(self.preset, self.nsa, "dense")
        reasons = backend_reasons(machine, torch_dtype(self.precision), heads_of(model))
        refuse_unusable(self.implementations, reasons | {"dense": None})
        grid = product(self.batches, self.checkpointing, self.implementations)
        return [self._point(machine, *coordinates) for coordinates in grid]

    def _point(self, machine: Machine, batch: int, checkpointing: bool, implementation: str) -> Point:
        model = replace(model_of_preset(self.preset, self.nsa, implementation), checkpointing=checkpointing)
        limit = machine.memory_bytes
        if self.memory_gib is not None:
            limit = min(limit, int(self.memory_gib * 2**30))
        kept = "on" if checkpointing else "off"
        config = {
            "model": asdict(model),
            "implementation": implementation,
            "pass": "train",
            "lengths": sorted(self.lengths),
            "batch": batch,
            "precision": self.precision,
            "limit_bytes": limit,
            "device": machine.device,
            "seed": self.seed,
            "threads": threads(self, machine),
            **({} if self.plan is None else {"plan": self.plan.model_dump(mode="json")}),
        }
        return Point(
            kind="capacity",
            label=f"{implementation} batch {batch}, checkpointing {kept}",
            config=config,
            axes=model_axes(config, model, more={"checkpointing": kept}),
            skip_reason=does_not_fit(
                _without_tokens(config), self, machine, "raise the limit, or use a smaller preset"
            ),
        )


@dataclass(frozen=True)
class _Trial:
    """One length that fits: its peak, the route, and the throughput of steps [tok/s]."""

    peak: Peak
    route: Mapping[str, str]
    per_second: tuple[float, ...]


class _Trials:
    """The lengths of a point by their place, each tried once; None: memory ran out."""

    def __init__(self, config: Mapping[str, Any], beat: Beat) -> None:
        self._config, self._beat = config, beat
        self._lengths: Sequence[int] = config["lengths"]
        self._found: dict[int, _Trial | None] = {}

    def __getitem__(self, place: int) -> _Trial | None:
        if place not in self._found:
            self._beat(f"S={self._lengths[place]}", len(self._found), len(self._lengths))
            self._found[place] = _try({**self._config, "seq_len": self._lengths[place]})
        return self._found[place]

    def rate(self, place: int) -> float:
        """Throughput [tok/s]; 0 if memory ran out."""
        trial = self[place]
        return median(trial.per_second) if trial is not None else 0.0


class NothingFits(Exception):  # noqa: N818 - the state it leads to is "error"; the name says which
    """Not even the shortest length fits."""


def measure(config: Mapping[str, Any], beat: Beat) -> Measurement:
    """Check the model, then look for the longest sequence that fits.

    Raises:
        WrongResult: the attention disagrees with the oracle.
        NothingFits: not even the shortest length fits.
    """
    beat("check")
    agreement = agree(config)
    lengths: list[int] = config["lengths"]
    predicted_to_fit = _predicted_to_fit(config)
    trials = _Trials(config, beat)
    longest = search(lambda place: trials[place] is not None, len(lengths), max(predicted_to_fit - 1, 0))
    if longest is None:
        raise NothingFits(f"lengths: {lengths[0]}: the shortest runs out of memory; give shorter ones")
    found = trials[longest]
    assert found is not None, "it fits"
    metrics = [
        Metric.of(LONGEST, lengths[longest], method="of the spec's lengths, two steps of training"),
        summarize(THROUGHPUT, found.per_second, "steps at the longest length"),
        *found.peak.metrics(),
        *agreement.metrics(),
    ]
    if predicted_to_fit:
        metrics.append(Metric.of(LONGEST_PREDICTED, lengths[predicted_to_fit - 1], method="nsa_core.memory"))
    if longest + 1 < len(lengths):
        metrics.append(Metric.of(SHORTEST_FAILED, lengths[longest + 1], method="the next of the spec's lengths"))
    if "plan" in config:
        metrics += _within_plan(TrainingPlan.model_validate(config["plan"]), trials, lengths[: longest + 1], beat)
    device = torch.device(config["device"])
    return Measurement(tuple(metrics), found.route, environment(device), found.peak.files)


def _within_plan(plan: TrainingPlan, trials: _Trials, lengths: Sequence[int], beat: Beat) -> list[Metric]:
    """Throughput that the plan needs, and the longest of these lengths that has it, of which the last fits.

    A warning says that none has it.
    """
    needed = Metric.of(THROUGHPUT_NEEDED, plan.needed, method="planned tokens over planned hours")
    places = range(len(lengths) - 1, -1, -1)
    for place in places:
        if (rate := trials.rate(place)) >= plan.needed:
            method = f"median of steps: {rate:,.0f} tok/s, of which the plan needs {plan.needed:,.0f}"
            return [needed, Metric.of(LONGEST_IN_PLAN, lengths[place], method=method)]
    fastest = max(places, key=trials.rate)
    reporter(beat).warn(
        f"plan: no length that fits trains at the {plan.needed:,.0f} tok/s that it needs; the fastest, "
        f"S={lengths[fastest]}, at {trials.rate(fastest):,.0f}"
    )
    return [needed]


def search(fits: Callable[[int], bool], count: int, guess: int) -> int | None:
    """Last of `count` places that fits, from a guess upwards or downwards; None if none does.

    What fits at a place is taken to fit at those before it. Each place is tried once.
    """
    if fits(guess):
        while guess + 1 < count and fits(guess + 1):
            guess += 1
        return guess
    return next((place for place in range(guess - 1, -1, -1) if fits(place)), None)


def _predicted_to_fit(config: Mapping[str, Any]) -> int:
    """Number of lengths, from the shortest on, that are predicted to fit; 0 also without a prediction."""
    if not predicts(config["implementation"]):
        return 0
    needs = [predicted({**config, "seq_len": length}).total for length in config["lengths"]]
    return sum(need <= config["limit_bytes"] for need in needs)


def _without_tokens(config: Mapping[str, Any]) -> int | None:
    """Bytes of weights and optimizer, which every length needs; None without a prediction."""
    if not predicts(config["implementation"]):
        return None
    least = predicted({**config, "seq_len": config["lengths"][0]})
    return least.parameters + least.optimizer


def _try(config: Mapping[str, Any]) -> _Trial | None:
    """Train a few steps; None if memory runs out."""
    try:
        return _train(config)
    except (RuntimeError, MemoryError) as err:
        if not ran_out_of_memory(err):
            raise
    gc.collect()
    if config["device"] == "cuda":
        torch.cuda.empty_cache()
    return None


def _train(config: Mapping[str, Any]) -> _Trial:
    trial = ModelPass(config)
    route = route_of(trial.run)
    trial.clear()
    peak = measure_peak(trial.run, trial.device, tensor_bytes(trial.resident))
    samples = []
    for _ in range(_STEPS):
        trial.clear()
        start = time.perf_counter()
        trial.run()
        synchronize(trial.device)
        samples.append(1000 * (time.perf_counter() - start))
    tokens = config["batch"] * config["seq_len"]
    return _Trial(peak, route, tuple(1000 * tokens / ms for ms in samples))
