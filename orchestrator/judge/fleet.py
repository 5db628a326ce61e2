"""Which card of the fleet is ill, by the preflight points that are stored, and what to do about it.

A card's counters and limits speak for themselves. Its speed is held against the fleet's own: the median of all stored
points of its type and sizes. Fewer than four of those are no fleet: UNKNOWN, as is what a card or host does not report.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from statistics import median
from typing import Any, NamedTuple

from jobs.schema import card_health as health
from jobs.schema.quantities import GPU_THROTTLED, Quantity, readable
from jobs.schema.states import PointState
from orchestrator.errors import UserError
from orchestrator.store import Store, queries

FEWEST = 4  # points or cards that make a fleet
FRESH = timedelta(days=1)  # of a preflight that a spec requires
_RUNS = 4  # the newest of a node, which say how many cards it has
_WARN, _BAD = 0.95, 0.90  # of the fleet's median
_THROTTLED = 5.0  # percent of the time


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


class _Fault(NamedTuple):
    """A fault that a check finds without the rest of the fleet; the check's quantities fill the texts in."""

    present: Callable[..., bool]
    level: Level
    why: str
    fix: str


_XID = "Xid errors"
_RESET = "drain the node and reset the card (nvidia-smi --gpu-reset); replace it if it happens again"
_POWER = (health.POWER_LIMIT, health.POWER_DEFAULT)
_ROWS = (health.REMAPPED_ROWS, health.REMAP_PENDING, health.REMAP_FAILED)
_LINK = (health.PCIE_WIDTH, health.PCIE_WIDTH_MAX, health.PCIE_GENERATION, health.PCIE_GENERATION_MAX)
# By check: its quantities, the value that is shown, and the faults, of which the first counts that is present.
_BY_ITSELF: Mapping[str, tuple[Sequence[Quantity], str, Sequence[_Fault]]] = {
    "power limit": (_POWER, "{0:,.0f} W", [
        _Fault(lambda limit, default: limit < default, Level.WARN, "below the default of {1:,.0f} W",
               "nvidia-smi --power-limit={1:.0f}, unless someone lowered it on purpose"),
    ]),
    "throttled": ((GPU_THROTTLED,), "{0:.4g} %", [
        _Fault(lambda share: share >= _THROTTLED, Level.WARN,
               "the clock was lowered for so much of the time against the card's will",
               "look at cooling and power supply: nvidia-smi --query --display=PERFORMANCE"),
    ]),
    "ECC errors": ((health.ECC_ERRORS, health.ECC_ERRORS_EVER), "{0:.0f}", [
        _Fault(lambda new, _: new > 0, Level.BAD, "uncorrected errors since the last reset", _RESET),
        _Fault(lambda _, ever: ever > 0, Level.WARN, "{1:.0f} uncorrected before the last reset", "watch it"),
    ]),
    "remapped rows": (_ROWS, "{0:.0f}", [
        _Fault(lambda *rows: rows[2] > 0, Level.BAD, "a row of its memory is broken and no spare one is left",
               "replace the card"),
        _Fault(lambda *rows: rows[1] > 0, Level.BAD, "a broken row is in use until the next reset",
               "drain the node and reset the card: nvidia-smi --gpu-reset"),
        _Fault(lambda *rows: rows[0] > 0, Level.WARN, "broken rows were replaced by spare ones",
               "watch it: spare rows run out"),
    ]),
    _XID: ((health.XIDS,), "{xids}", [
        _Fault(lambda count: count > 0, Level.BAD, "the kernel's log has Xid errors that blame the card", _RESET),
    ]),
    "PCIe": (_LINK, "gen {2:.0f} ×{0:.0f}", [
        _Fault(lambda width, most, generation, newest: width < most or generation < newest, Level.WARN,
               "card and slot have gen {3:.0f} ×{1:.0f}", "reseat the card, or its riser"),
    ]),
}  # fmt: skip
_SLOW = "run it again with nothing else on the node; if it stays slow, keep long runs off this card"
_BESIDE = {
    "NVLink": (health.NVLINKS, "look for links that are down (nvidia-smi nvlink --status); restart the node"),
    "clock": (health.LOAD_CLOCK, "look at power limit, cooling, and locked clocks (nvidia-smi --reset-gpu-clocks)"),
    "GEMM": (health.GEMM_RATE, _SLOW),
    "copy": (health.COPY_RATE, _SLOW),
    "copy from host": (health.HOST_COPY_RATE, "look at the PCIe link, and at the NUMA node of the process"),
}


def judge_cards(store: Store) -> list[Card]:
    """All cards that a preflight was run on, the worst first. Raises StoreUnavailable."""
    newest: dict[str, tuple[Mapping[str, Any], Mapping[str, Any], str, tuple[Any, ...]]] = {}
    named: set[str] = set()  # nodes that named a card
    fleet: dict[Any, list[float]] = defaultdict(list)  # all values of a quantity, of comparable points
    counts: dict[str, dict[str, float]] = defaultdict(dict)  # GPUs that a node reported, by run, newest first
    for row in queries.preflights(store):
        environment, config = row["environment"], row["config"]
        gpu = environment.get("gpu") or {}
        node = row["node"] or environment.get("host") or "unknown node"
        name = gpu.get("name") or ("CPU" if row["device"] == "cpu" else "unknown card")
        alike = (name, config.get("size"), config.get("copy_mib"))
        for quantity, value in row["figures"].items():
            fleet[alike, quantity].append(value)
        if health.GPU_COUNT.name in row["figures"]:
            counts[node].setdefault(row["run_id"], row["figures"][health.GPU_COUNT.name])
        if gpu.get("uuid"):
            named.add(node)
        elif node in named:
            continue
        newest.setdefault(gpu.get("uuid") or f"{node}: {row['device']}", (row, gpu, node, alike))
    drivers = Counter(gpu["driver"] for _, gpu, *_ in newest.values() if gpu.get("driver"))
    cards = []
    for uuid, (row, gpu, node, alike) in newest.items():
        label = " ".join(str(part) for part in (alike[0], gpu.get("index")) if part is not None)
        usual = {check: fleet[alike, quantity.name] for check, (quantity, _) in _BESIDE.items()}
        findings = _findings(row, gpu, drivers, list(counts[node].values())[:_RUNS], usual)
        cards.append(Card(label, node, uuid, row["point_id"], row["ended_at"], tuple(findings)))
    return sorted(cards, key=lambda card: (list(Level).index(card.level), card.node, card.label, card.uuid))


def require_preflight(store: Store, gpus: Mapping[str, int], now: datetime, command: str) -> None:
    """Raise UserError unless all GPUs, counted by node, had a preflight within a day, none of them BAD; `command` looks
    at them again."""
    cards, mistakes = judge_cards(store), []
    for node, count in gpus.items():
        here = [card for card in cards if card.node == node and not card.uuid.startswith(f"{node}: ")]  # not of a CPU
        fresh = [card for card in here if now - card.at <= FRESH]
        bad = ((card, each) for card in fresh for each in card.findings if each.level == Level.BAD)
        for card, (check, _, value, why, fix) in bad:
            about = f"{card.label} ({card.uuid}) on {node} is BAD"
            mistakes.append(f"{about}: {check} {value}, {why}: {fix}; then")
        if len(fresh) < count:
            old = "".join(f"; {card.label}: {card.at:%Y-%m-%d %H:%M} UTC" for card in here if card not in fresh)
            mistakes.append(f"{count - len(fresh)} of {count} GPUs of {node} had no preflight within a day{old};")
    if not any(gpus.values()):
        mistakes = ["there is no GPU to look at; leave the field out, or start a node with GPUs and"]
    if mistakes:
        raise UserError("\n".join(f"requires_preflight: true: {mistake} run {command}" for mistake in mistakes))


def _findings(
    row: Mapping[str, Any],
    gpu: Mapping[str, Any],
    drivers: Counter[str],
    counts: Sequence[float],
    fleet: Mapping[str, Sequence[float]],
) -> list[Finding]:
    """The result of every check, the same checks for each card.

    Args:
        drivers: of all cards.
        counts: the numbers of GPUs that the node reported lately.
        fleet: the values of all comparable points, by check of _BESIDE.
    """
    figures, missing, findings = row["figures"], "neither the driver nor the host reports it", []
    if row["device"] == "cpu":
        figures, missing = {}, "the point ran on the CPU: nothing of a card was measured"
    elif row["state"] != PointState.OK:
        figures, missing = {}, f"the preflight itself ended as {row['state']}"
        blamed = gpu.get("uuid") and row["state"] != PointState.LOST  # whose worker or node went away
        fix = "read its log and stacks, and run it again; drain the node if it ends so again"
        level = Level.BAD if blamed else Level.UNKNOWN
        findings.append(Finding("preflight", level, row["state"], row["reason"] or "", fix))

    def hold(check: str, value: str | None, alone: str, level: Level, why: str, fix: str) -> None:
        """Note the level of a value; UNKNOWN where it is missing, or `alone`, without others to hold it against."""
        if value is None or alone:
            reason = (missing,) if value is None else (alone, "look again, or at more cards")
            findings.append(Finding(check, Level.UNKNOWN, value or "–", *reason))
        else:
            findings.append(Finding(check, level, value, *((why, fix) if level != Level.OK else ())))

    driver, cards, [(usual, most)] = gpu.get("driver"), drivers.total(), drivers.most_common(1) or [("", 0)]
    few = (
        f"too few cards to compare with: the driver of {cards} is known, {FEWEST} are needed" if cards < FEWEST else ""
    )
    level, why = Level.WARN if drivers[driver or ""] < most else Level.OK, f"{most} of {cards} cards have {usual}"
    hold("driver", driver, few, level, why, "install the same driver on all nodes")

    xids = ", ".join(map(str, dict.fromkeys(gpu.get("xids") or ())))
    for check, (quantities, shows, faults) in _BY_ITSELF.items():
        values = [figures.get(quantity.name) for quantity in quantities]
        if None in values:
            unread = "the kernel's log cannot be read there; look on the host: dmesg | grep Xid"
            findings.append(Finding(check, Level.UNKNOWN, why=unread if check == _XID and figures else missing))
            continue
        value = shows.format(*values, xids=xids or f"{values[0]:.0f}")
        fault = next((each for each in faults if each.present(*values)), _Fault(bool, Level.OK, "", ""))
        findings.append(Finding(check, fault.level, value, fault.why.format(*values), fault.fix.format(*values)))

    count, lately = figures.get(health.GPU_COUNT.name), max(counts, default=0)
    shown = None if count is None else f"{count:.0f}"
    first = "the node's first preflight: nothing to compare with" if len(counts) < 2 else ""
    level, why = Level.BAD if (count or 0) < lately else Level.OK, f"this node lately had {lately:.0f}"
    hold("count", shown, first, level, why, "find the card that is gone (nvidia-smi, dmesg); restart the node")

    for check, (quantity, fix) in _BESIDE.items():
        value, points, usual = figures.get(quantity.name), len(fleet[check]), median(fleet[check] or [0.0])
        few = f"too few points to compare with: {points} of this card's type and sizes, {FEWEST} are needed"
        share = (value or 0.0) / usual if usual else 1.0
        level = Level.BAD if share < _BAD else Level.WARN if share < _WARN else Level.OK
        why = f"{100 * share:.0f} % of the fleet's median, {readable(usual, quantity.unit)} in {points} points"
        shown = None if value is None else readable(value, quantity.unit)
        hold(check, shown, few if points < FEWEST else "", level, why, fix)
    return findings
