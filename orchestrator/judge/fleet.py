"""Which card of the fleet is ill, by the preflight points that are stored, and what to do about it.

A card's counters and limits speak for themselves. Its speed is held against the fleet's own: the median of all stored
points of its type and sizes. Fewer than four of those are no fleet: UNKNOWN, as is what a card or host does not report.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from statistics import median
from typing import Any, NamedTuple

from jobs.schema import card_health as health
from jobs.schema.quantities import GPU_THROTTLED, Quantity, readable
from jobs.schema.states import PointState
from orchestrator.store import Store, queries

FEWEST = 4  # points or cards that make a fleet
_RUNS = 4  # the newest of a node, which say how many cards it has
_WARN, _BAD = 0.95, 0.90  # of the fleet's median
_THROTTLED = 5.0  # percent of the time
_NO_REPORT = "neither the driver nor the host reports it"
_RESET = "drain the node and reset the card (nvidia-smi --gpu-reset); replace it if it happens again"


class Level(StrEnum):
    """Result of a check; the worst comes first."""

    BAD = "BAD"
    WARN = "WARN"
    UNKNOWN = "UNKNOWN"
    OK = "OK"


class Finding(NamedTuple):
    """Result of one check of a card."""

    check: str
    level: Level
    value: str = "–"
    why: str = ""  # it is not OK
    fix: str = ""


@dataclass(frozen=True)
class Card:
    """A card as its newest preflight found it."""

    label: str  # its type, and its index on the node
    node: str
    uuid: str
    point_id: str
    at: datetime
    findings: tuple[Finding, ...]

    @property
    def level(self) -> Level:
        return min((found.level for found in self.findings), key=list(Level).index)


def judge_cards(store: Store) -> list[Card]:
    """All cards that a preflight was run on, the worst first. Raises StoreUnavailable."""
    looks = [_look(row) for row in queries.preflights(store)]
    newest: dict[str, _Look] = {}
    known: set[str] = set()  # nodes that named a card
    for look in looks:
        if look.gpu.get("uuid"):
            known.add(look.node)
        elif look.node in known:
            continue
        newest.setdefault(look.uuid, look)
    fleet = _Fleet(looks, list(newest.values()))
    cards = [
        Card(
            label=" ".join(map(str, filter(lambda part: part is not None, (look.type[0], look.gpu.get("index"))))),
            node=look.node,
            uuid=uuid,
            point_id=look.row["point_id"],
            at=look.row["ended_at"],
            findings=tuple(_findings(look, fleet)),
        )
        for uuid, look in newest.items()
    ]
    return sorted(cards, key=lambda card: (list(Level).index(card.level), card.node, card.label, card.uuid))


class _Look(NamedTuple):
    """A point of a card (`queries.preflights`)."""

    row: Mapping[str, Any]
    gpu: Mapping[str, Any]  # what tells the card from others; {}: none
    node: str
    uuid: str  # of the card; without one, a text that stands for the node
    type: tuple[Any, ...]  # what points must share for their rates to be comparable; the card's name first


def _look(row: Mapping[str, Any]) -> _Look:
    environment, config = row["environment"], row["config"]
    gpu = environment.get("gpu") or {}
    node = row["node"] or environment.get("host") or "unknown node"
    name = gpu.get("name") or ("CPU" if row["device"] == "cpu" else "unknown card")
    uuid = gpu.get("uuid") or f"{node}: {row['device']}"
    return _Look(row, gpu, node, uuid, (name, config.get("size"), config.get("copy_mib")))


class _Fleet:
    """The fleet's usual figures. `looks`: all points; `newest`: that of each card."""

    def __init__(self, looks: Sequence[_Look], newest: Sequence[_Look]) -> None:
        self._values: dict[Any, list[float]] = defaultdict(list)
        self.cards: dict[str, dict[str, float]] = defaultdict(dict)  # that a node reported, by node and run
        for look in looks:
            for name, value in look.row["figures"].items():
                self._values[look.type, name].append(value)
            if (count := look.row["figures"].get(health.GPU_COUNT.name)) is not None:
                self.cards[look.node].setdefault(look.row["run_id"], count)
        self.drivers = Counter(driver for look in newest if (driver := look.gpu.get("driver")))

    def usual(self, look: _Look, quantity: Quantity) -> tuple[float | None, int]:
        """The median of the fleet's points of the card's type, and their number; None of fewer than four."""
        values = self._values[look.type, quantity.name]
        return (median(values) if len(values) >= FEWEST else None), len(values)


def _findings(look: _Look, fleet: _Fleet) -> Iterator[Finding]:
    """The result of every check, the same checks for each card."""
    row, missing = look.row, _NO_REPORT
    figures = row["figures"]
    if row["device"] == "cpu":
        figures, missing = {}, "the point ran on the CPU: nothing of a card was measured"
    elif row["state"] != PointState.OK:
        figures, missing = {}, f"the preflight itself ended as {row['state']}"
        blamed = look.gpu.get("uuid") and row["state"] != PointState.LOST  # whose worker or node went away
        level = Level.BAD if blamed else Level.UNKNOWN
        yield Finding(
            *("preflight", level, row["state"], row["reason"] or ""),
            "read its log and stacks, and run it again; drain the node if it ends so again",
        )
    yield _driver(look.gpu.get("driver"), fleet, missing)
    for check, (quantities, judge) in _ABSOLUTE.items():
        values = [figures.get(quantity.name) for quantity in quantities]
        if None in values:
            yield Finding(check, Level.UNKNOWN, why=_XID_UNREAD if check == _XID and figures else missing)
        elif check == _XID:
            yield Finding(check, *judge(*values, look.gpu.get("xids") or ()))
        else:
            yield Finding(check, *judge(*values))
    counts = list(fleet.cards[look.node].values())[:_RUNS]
    yield _count(figures.get(health.GPU_COUNT.name), counts, missing)
    for check, (quantity, fix) in _BESIDE.items():
        value, (usual, points) = figures.get(quantity.name), fleet.usual(look, quantity)
        if value is None or usual is None:
            few = f"{points} stored points of this card's type and sizes; {FEWEST} make a median to hold it against"
            shown = "–" if value is None else readable(value, quantity.unit)
            yield Finding(check, Level.UNKNOWN, shown, missing if value is None else few)
            continue
        share = value / usual if usual else 1.0
        level = Level.BAD if share < _BAD else Level.WARN if share < _WARN else Level.OK
        why = f"{100 * share:.0f} % of the fleet's median, {readable(usual, quantity.unit)} in {points} points"
        yield Finding(check, level, readable(value, quantity.unit), *((why, fix) if level != Level.OK else ()))


def _driver(driver: str | None, fleet: _Fleet, missing: str) -> Finding:
    cards = fleet.drivers.total()
    if driver is None:
        return Finding("driver", Level.UNKNOWN, why=missing)
    if cards < FEWEST:
        why = f"the driver of {cards} cards is known; {FEWEST} make a fleet to hold it against"
        return Finding("driver", Level.UNKNOWN, driver, why)
    usual, holders = fleet.drivers.most_common(1)[0]
    if fleet.drivers[driver] == holders:
        return Finding("driver", Level.OK, driver)
    why = f"{holders} of {cards} cards have {usual}"
    return Finding("driver", Level.WARN, driver, why, "install the same driver on all nodes")


def _count(count: float | None, counts: Sequence[float], missing: str) -> Finding:
    if count is None or len(counts) < 2:
        why = missing if count is None else "the node's first preflight: nothing to hold it against"
        return Finding("count", Level.UNKNOWN, "–" if count is None else f"{count:.0f}", why)
    if count >= max(counts):
        return Finding("count", Level.OK, f"{count:.0f}")
    fix = "find the card that is gone (nvidia-smi, dmesg); restart the node"
    return Finding("count", Level.BAD, f"{count:.0f}", f"this node lately had {max(counts):.0f}", fix)


def _power(limit: float, default: float) -> tuple[Any, ...]:
    if limit >= default:
        return Level.OK, readable(limit, "W")
    fix = f"nvidia-smi --power-limit={default:.0f}, unless someone lowered it on purpose"
    return Level.WARN, readable(limit, "W"), f"below the default of {readable(default, 'W')}", fix


def _throttled(share: float) -> tuple[Any, ...]:
    if share < _THROTTLED:
        return Level.OK, readable(share, "%")
    fix = "look at cooling and power supply: nvidia-smi --query --display=PERFORMANCE"
    return (
        Level.WARN,
        readable(share, "%"),
        "the clock was lowered for so much of the time against the card's will",
        fix,
    )


def _ecc(errors: float, ever: float) -> tuple[Any, ...]:
    if errors:
        return Level.BAD, f"{errors:.0f}", "uncorrected errors since the last reset", _RESET
    if ever:
        return Level.WARN, f"{ever:.0f} ever", "uncorrected errors before the last reset", "watch it"
    return Level.OK, "0"


def _rows(rows: float, pending: float, failed: float) -> tuple[Any, ...]:
    if failed:
        return Level.BAD, f"{rows:.0f}", "a row of its memory is broken and no spare one is left", "replace the card"
    if pending:
        fix = "drain the node and reset the card: nvidia-smi --gpu-reset"
        return Level.BAD, f"{rows:.0f}", "a broken row is in use until the next reset", fix
    if rows:
        return Level.WARN, f"{rows:.0f}", "broken rows were replaced by spare ones", "watch it: spare rows run out"
    return Level.OK, "0"


def _xids(count: float, codes: Sequence[int]) -> tuple[Any, ...]:
    if not count:
        return Level.OK, "none"
    named = ", ".join(map(str, dict.fromkeys(codes)))
    return Level.BAD, named or f"{count:.0f}", "the kernel's log has Xid errors that blame the card", _RESET


def _pcie(width: float, most: float, generation: float, newest: float) -> tuple[Any, ...]:
    link = f"gen {generation:.0f} ×{width:.0f}"
    if width >= most and generation >= newest:
        return Level.OK, link
    return Level.WARN, link, f"card and slot have gen {newest:.0f} ×{most:.0f}", "reseat the card, or its riser"


_XID = "Xid errors"
_XID_UNREAD = "the kernel's log cannot be read there; look on the host: dmesg | grep Xid"
_ABSOLUTE: Mapping[str, tuple[Sequence[Quantity], Callable[..., tuple[Any, ...]]]] = {
    "power limit": ((health.POWER_LIMIT, health.POWER_DEFAULT), _power),
    "throttled": ((GPU_THROTTLED,), _throttled),
    "ECC errors": ((health.ECC_ERRORS, health.ECC_ERRORS_EVER), _ecc),
    "remapped rows": ((health.REMAPPED_ROWS, health.REMAP_PENDING, health.REMAP_FAILED), _rows),
    _XID: ((health.XIDS,), _xids),
    "PCIe": (
        (health.PCIE_WIDTH, health.PCIE_WIDTH_MAX, health.PCIE_GENERATION, health.PCIE_GENERATION_MAX),
        _pcie,
    ),
}
_SLOW = "run it again with nothing else on the node; if it stays slow, keep long runs off this card"
_BESIDE = {
    "NVLink": (health.NVLINKS, "look for links that are down (nvidia-smi nvlink --status); restart the node"),
    "clock": (health.LOAD_CLOCK, "look at power limit, cooling, and locked clocks (nvidia-smi --reset-gpu-clocks)"),
    "GEMM": (health.GEMM_RATE, _SLOW),
    "copy": (health.COPY_RATE, _SLOW),
    "copy from host": (health.HOST_COPY_RATE, "look at the PCIe link, and at the NUMA node of the process"),
}
