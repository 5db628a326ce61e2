"""Quantities: a metric's name, unit, better direction, and how it is shown. Each is declared once.

Quantities of several kinds are declared here, others in their kind's module. A kind lists all its quantities in
`QUANTITIES`. The list is stored with each run in journal and database, so that reports, pages, rules and exports show a
run's quantities without the code that measured them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

_NAME = re.compile(r"[a-z][a-z0-9_]{0,78}\*?")
_SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3_600.0}
_MOST = {"ms": 10_000, "s": 120, "min": 120}  # from here on, a time is said in a larger unit
_ACRONYMS = "CPU CUDA DDP ETA FLOPs FSDP GPU GPUs ID MFU NCCL NSA NVML OOM RSS SDPA SM TF32 URL"
_WRITTEN = {word.lower(): word for word in _ACRONYMS.split()}
# Times and amounts of memory whose batch the database does not divide out: it knows ms, s and MiB.
_NOT_DIVIDED = ("ns", "us", "µs", "min", "h", "B", "kB", "KB", "MB", "GB", "KiB", "GiB", "TiB")


class Better(StrEnum):
    """Direction in which a quantity improves."""

    LOWER = "lower"
    HIGHER = "higher"


class Role(StrEnum):
    """Place where a quantity is shown."""

    HEADLINE = "headline"  # beside the point, wherever it is listed
    DETAIL = "detail"  # with the point's other results
    TELEMETRY = "telemetry"  # state of the hardware meanwhile
    STAGE = "stage"  # a share of the time


class Plot(StrEnum):
    """Form in which a quantity is drawn."""

    GROWTH = "growth"  # log-log against S, with a fitted exponent and guides of slopes 1 and 2
    RATE = "rate"  # log-log against S, with guides of slopes 0 and -1; not fitted, being the inverse of a time
    STEP_RATE = "step rate"  # as RATE, of steps that make equally many tokens at every S: constant, or ~ 1/S
    CURVE = "curve"  # its samples in the order taken


AGAINST_LENGTH = (Plot.GROWTH, Plot.RATE, Plot.STEP_RATE)


@dataclass(frozen=True)
class Quantity:
    """One quantity."""

    name: str  # the metric's; "stage_*" declares every name that begins with "stage_"
    unit: str  # "ms", "MiB" (2^20 bytes), "tok/s", "%", "1" for none
    title: str  # in headings and on axes
    short: str = ""  # in legends; the title if empty
    better: Better | None = None  # None if neither direction is
    role: Role = Role.DETAIL
    plot: Plot | None = None  # None: only as a number

    @property
    def legend(self) -> str:
        return self.short or self.title.lower()

    def named(self, rest: str) -> Quantity:
        """Member of a family: `Quantity("stage_*", ...).named("merge")` is stage_merge."""
        return replace(self, name=self.name.removesuffix("*") + rest, title=f"{self.title}: {rest.replace('_', ' ')}")

    def declares(self, name: str) -> bool:
        """Whether a metric of this name is this quantity or belongs to this family."""
        return name.startswith(self.name[:-1]) if self.name.endswith("*") else name == self.name


class Quantities(tuple[Quantity, ...]):
    """Declared quantities in display order; of several with one name, the first."""

    def __new__(cls, declared: Iterable[Quantity] = ()) -> Self:
        firsts: dict[str, Quantity] = {}
        for quantity in declared:
            firsts.setdefault(quantity.name, quantity)
        return super().__new__(cls, firsts.values())

    def of(self, name: str, unit: str = "1") -> Quantity:
        """Declaration of a metric; if it is undeclared, a plain one from its name and unit."""
        declared = [quantity for quantity in self if quantity.declares(name)]
        for quantity in declared:
            if quantity.name == name:
                return quantity
        if declared:
            return declared[0].named(name.removeprefix(declared[0].name[:-1]))
        return Quantity(name, unit, in_words(name))

    def place(self, name: str) -> tuple[int, str]:
        """Sort key of a metric: declared ones in their order, then the others by name."""
        places = (place for place, quantity in enumerate(self) if quantity.declares(name))
        return next(places, len(self)), name

    def names(self, *, role: Role | None = None, plots: Container[Plot | None] | None = None) -> list[str]:
        """Names of the quantities with this role and one of these plots; None: any."""
        return [q.name for q in self if (role is None or q.role is role) and (plots is None or q.plot in plots)]


def readable(value: float, unit: str = "1") -> str:
    """A value with four significant digits, from 1,000 on a whole number, and its unit, of which "1" is left out.

    A time is written as it is said: 0.2151 h is 12.9 min, 1.3 h is 1 h 18 min.
    """
    if (said := _time(value, unit)) is not None:
        return said
    text = f"{value:,.0f}" if 1_000 <= abs(value) < 1e15 else f"{value + 0.0:.4g}"  # + 0.0: no "-0"
    return text if unit == "1" else f"{text} {written_unit(unit, value)}"


def readable_bytes(count: float) -> str:
    """Bytes with four significant digits in the largest binary unit that gives at least 1."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return readable(count / factor, unit)
    return f"{count:,.0f} bytes"


FEWEST_SAMPLES = 6  # samples below which a bootstrap of the median is their range, and no interval


def readable_interval(
    low: float | None, high: float | None, samples: Sequence[float] | None, unit: str, to: str = " – "
) -> str:
    """The 95 % interval (15.48 – 15.49 ms); of few samples their range, called so; "" without either."""
    name = ""
    if low is None or high is None or low != low or high != high:
        if samples is None or not 1 < len(samples) < FEWEST_SAMPLES:
            return ""
        name, low, high = "range ", min(samples), max(samples)
    first, last = readable(low, unit), readable(high, unit)
    number, _, end = first.partition(" ")
    if end and last.partition(" ")[2] == end:  # the unit once
        first = number
    return f"{name}{first}{to}{last}"


def written_unit(unit: str, value: float = 0.0) -> str:
    """A unit as it is written: °C for C; tokens, but 1 token."""
    return {"C": "°C", "token": "token" if value == 1 else "tokens"}.get(unit, unit)


def in_words(name: str) -> str:
    """A name from code as a heading: "gpu_sm-clock" as "GPU SM clock"."""
    words = " ".join(_WRITTEN.get(word.lower(), word) for word in re.split(r"[ _-]+", name))
    return words[:1].upper() + words[1:]


def _time(value: float, unit: str) -> str | None:
    """A time in the unit in which it is read; None if that is its own, and for what is no time."""
    if unit not in _SECONDS or not math.isfinite(value) or value == 0:
        return None
    size = abs(value)
    if unit != "h" and size < _MOST[unit] and (size >= 1 or unit == "ms"):
        return None
    seconds = size * _SECONDS[unit]
    if seconds < 7_200 and (unit != "h" or size < 1):
        other = next((name for name in ("min", "s") if seconds >= _SECONDS[name]), "ms")
        return f"{value * _SECONDS[unit] / _SECONDS[other]:.3g} {other}"
    hours = seconds / 3_600
    whole, minutes = divmod(round(60 * hours), 60)
    text = f"{hours:,.0f} h" if whole >= 100 else f"{whole} h {minutes:02d} min" if minutes else f"{whole} h"
    return "-" * (value < 0) + text


def check_quantities(quantities: Sequence[Quantity]) -> None:
    """Refuse declarations that cannot be stored or told apart. Raises ValueError."""
    names = [quantity.name for quantity in quantities if isinstance(quantity, Quantity)]
    for each in quantities:
        if not isinstance(each, Quantity):
            raise ValueError(f"QUANTITIES: {each!r}: is not a Quantity; use jobs.schema.quantities.Quantity")
        texts = (each.name, each.unit, each.title, each.short)
        shown = each.plot or each.role is Role.HEADLINE
        enums = ((each.better, Better | None), (each.role, Role), (each.plot, Plot | None))
        for wrong, fix in (
            (not each.title or not all(isinstance(x, str) and x.isprintable() for x in texts), "use printable texts"),
            *((not isinstance(x, kind), f"{x!r}: use a member of Better, Role or Plot") for x, kind in enums),
            (shown and str(each.name).endswith("*"), "a family is neither drawn nor a headline; declare its members"),
            (each.plot is Plot.GROWTH and each.unit in _NOT_DIVIDED, "growth is fitted in ms, s or MiB; use one"),
            (not _NAME.fullmatch(str(each.name)), "use lower-case letters, digits and '_', a letter first"),
            (names.count(each.name) > 1, "is declared twice; keep one of them"),
            (not 1 <= len(str(each.unit)) <= 20, "unit: use 1 to 20 characters"),
        ):
            if wrong:
                raise ValueError(f"QUANTITIES: {each.name!r}: {fix}")


TIME = Quantity("time", "ms", "Time", "time", Better.LOWER, Role.HEADLINE, Plot.GROWTH)
THROUGHPUT = Quantity("throughput", "tok/s", "Throughput", "throughput", Better.HIGHER, Role.HEADLINE, Plot.RATE)
THROUGHPUT_NEEDED = Quantity("throughput_needed", "tok/s", "Throughput that the plan needs")
ENERGY = Quantity("energy_per_token", "J/tok", "Energy per token", "energy", Better.LOWER, Role.HEADLINE)
PEAK_EXTRA_MEMORY = Quantity(
    "peak_extra_memory", "MiB", "Peak memory beyond inputs", "extra memory", Better.LOWER, Role.HEADLINE, Plot.GROWTH
)
PEAK_MEMORY = Quantity(
    "peak_memory", "MiB", "Peak memory allocated", "allocated memory", Better.LOWER, Role.HEADLINE, Plot.GROWTH
)
# Not a headline: reserved memory depends on the points measured before.
PEAK_RESERVED = Quantity(
    "peak_reserved", "MiB", "Peak memory reserved", "reserved memory", Better.LOWER, plot=Plot.GROWTH
)
PEAK_DRIVER = Quantity("peak_driver", "MiB", "Memory in use on the card", better=Better.LOWER)
PEAK_RSS = Quantity("peak_rss", "MiB", "Peak resident set", better=Better.LOWER)
MEMORY = (PEAK_EXTRA_MEMORY, PEAK_MEMORY, PEAK_RESERVED, PEAK_DRIVER, PEAK_RSS)

ESTIMATE_ERROR = Quantity("estimate_error", "%", "Error of the memory estimate")
ORACLE_ERROR = Quantity("oracle_error", "1", "Error against the oracle", better=Better.LOWER)
ORACLE_ERROR_BOUND = Quantity("oracle_error_bound", "1", "Bound of the error against the oracle")
ROWS_ERROR = Quantity("rows_error", "1", "Error of rows at the size timed", better=Better.LOWER)
ROWS_ERROR_BOUND = Quantity("rows_error_bound", "1", "Bound of the error of rows")
AGREEMENT = (ORACLE_ERROR, ORACLE_ERROR_BOUND, ROWS_ERROR, ROWS_ERROR_BOUND)

STAGE = Quantity("stage_*", "ms", "Stage", better=Better.LOWER, role=Role.STAGE)

GPU_UTILIZATION = Quantity("gpu_utilization", "%", "GPU utilisation", better=Better.HIGHER, role=Role.TELEMETRY)
GPU_POWER = Quantity("gpu_power", "W", "GPU power", role=Role.TELEMETRY)
GPU_SM_CLOCK = Quantity("gpu_sm_clock", "MHz", "SM clock", role=Role.TELEMETRY)
GPU_TEMPERATURE = Quantity("gpu_temperature", "C", "GPU temperature", role=Role.TELEMETRY)
GPU_MEMORY_USED = Quantity("gpu_memory_used", "MiB", "Memory used on the GPU", role=Role.TELEMETRY)
GPU_PROCESSES = Quantity("gpu_processes", "1", "Processes on the GPU", role=Role.TELEMETRY)
GPU_THROTTLED = Quantity("gpu_throttled", "%", "Samples with a throttle", better=Better.LOWER, role=Role.TELEMETRY)
GPU_ENERGY = Quantity("gpu_energy", "J", "GPU energy", role=Role.TELEMETRY)
GPU_LEVELS = (GPU_UTILIZATION, GPU_POWER, GPU_SM_CLOCK, GPU_TEMPERATURE)
TELEMETRY = (*GPU_LEVELS, GPU_MEMORY_USED, GPU_PROCESSES, GPU_THROTTLED, GPU_ENERGY)

# Series of every point on a CPU.
CPU_UTILIZATION = Quantity("cpu_utilization", "%", "CPU utilisation", role=Role.TELEMETRY)
RESIDENT_MEMORY = Quantity("resident_memory", "MiB", "Resident memory", role=Role.TELEMETRY)
LIVE = (
    *(GPU_UTILIZATION, GPU_MEMORY_USED, GPU_POWER, GPU_SM_CLOCK, GPU_TEMPERATURE),
    *(CPU_UTILIZATION, RESIDENT_MEMORY),
)

# For runs stored without declarations: figures that others report, journals of earlier versions.
SHARED = Quantities((TIME, THROUGHPUT, *MEMORY, ESTIMATE_ERROR, *AGREEMENT, STAGE, *TELEMETRY))
