"""Is a card fit for a long run: its counters and limits, its clock under load, and how fast it multiplies and copies.

A point is one card. `nsa fleet` and the page Fleet judge each card beside all others of its type.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from pydantic import Field

from jobs.hardware import health, nvml
from jobs.hardware.environment import environment
from jobs.hardware.stats import summarize
from jobs.measure.clock import TimingSpec, measure_time
from jobs.schema import point
from jobs.schema.axes import Axes, Axis
from jobs.schema.card_health import CARD_HEALTH, COPY_RATE, GEMM_RATE, HOST_COPY_RATE
from jobs.schema.point import Beat, Device, Machine, Measurement, Metric, Point
from jobs.schema.quantities import TELEMETRY, Quantity
from jobs.specs.fields import Count
from jobs.specs.spec import JobSpec

QUANTITIES = (*CARD_HEALTH, *TELEMETRY)
AXES = (Axis("card", "whole", "card"),)
_ON_CPU = 512  # largest matrix there, and MiB to copy: nobody judges its figures


class Case(point.Case):
    """One of the cards that are looked at together; which one it is, says the point's environment."""

    card: int
    size: int
    copy_mib: int
    load_s: float
    device: Device


class Spec(JobSpec):
    """A look at each card."""

    kind: Literal["preflight"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe
    cards: Count = Field(
        default=1, description="how many to look at, at the same time: all of the cluster, with `--local` of this host"
    )
    size: Count = Field(default=8192, description="rows and columns of the matrices, in bfloat16")
    copy_mib: Count = Field(default=1024, description="MiB that are copied")
    load_s: float = Field(default=10, gt=0, le=600, description="seconds of matrix products")

    def points(self, machine: Machine) -> Sequence[Point]:
        size, mib = self.size, self.copy_mib
        if machine.device == "cpu":
            size, mib = min(size, _ON_CPU), min(mib, _ON_CPU)
        return [
            Point(
                kind="preflight",
                label=f"card {card}",
                case=Case(card=card, size=size, copy_mib=mib, load_s=self.load_s, device=machine.device),
                axes=Axes(workload="preflight", device=machine.device, dtype="bfloat16", more={"card": card}),
            )
            for card in range(self.cards)
        ]


def measure(case: Case, beat: Beat) -> Measurement:
    """Read the card's counters, then its clock and its PCIe link while it multiplies, and time copies."""
    device = torch.device(case.device)
    found = environment(device)
    metrics: list[Metric] = []
    with ExitStack() as stack:
        card = None
        try:
            if uuid := found.get("gpu", {}).get("uuid"):
                stack.enter_context(nvml.session())
                card = nvml.handle(uuid)
                read, more = health.at_rest(card)
                found["gpu"] |= more
                metrics += [Metric.of(quantity, value, method="NVML or the log") for quantity, value in read.items()]
        except nvml.NvmlError as err:
            found["gpu"]["nvml"] = str(err)
        metrics += _rates(case, device, card, beat)
    return Measurement(tuple(metrics), environment=found)


def _rates(case: Case, device: torch.device, card: Any, beat: Beat) -> list[Metric]:
    """Rates of products and copies, and what NVML tells of the card meanwhile."""
    one, other = torch.randn(2, case.size, case.size, device=device, dtype=torch.bfloat16)
    source = torch.ones(case.copy_mib << 20, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    loaded: dict[Quantity, list[float]] = defaultdict(list)

    def look(_: Any) -> None:
        for quantity, value in (health.read(card, health.UNDER_LOAD) if card is not None else {}).items():
            loaded[quantity].append(value)

    def rate(quantity: Quantity, amount: float, call: Callable[[], Any], seconds: float, after: Any) -> Metric:
        """Metric of an amount a second: of 10^12 operations or 10^9 bytes."""
        plan = TimingSpec(repeats=50, min_s=seconds, max_s=seconds, warmup=10)
        timing = measure_time(call, device, plan, beat, after=after)
        return summarize(quantity, [1000 * amount / ms for ms in timing.samples_ms], timing.method)

    ignore, copied = (lambda _: None), source.numel() / 1e9
    products = rate(GEMM_RATE, 2 * case.size**3 / 1e12, lambda: one @ other, case.load_s, look)
    rates = [products, rate(COPY_RATE, 2 * copied, lambda: target.copy_(source), 1, ignore)]
    if device.type == "cuda":
        pinned = torch.ones(source.numel(), dtype=torch.int8, pin_memory=True)
        rates.append(rate(HOST_COPY_RATE, copied, lambda: target.copy_(pinned, non_blocking=True), 1, ignore))
    return rates + [summarize(quantity, values, "NVML, during matrix products") for quantity, values in loaded.items()]
