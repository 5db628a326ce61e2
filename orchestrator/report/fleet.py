"""Tables of the fleet's cards, for the page and `nsa fleet`."""

from collections.abc import Sequence
from datetime import UTC, tzinfo

from orchestrator.judge.fleet import Card, Finding, Level
from orchestrator.report.table import Table

_ILL = (Level.BAD, Level.WARN)
_NAMED = 4  # cards, or checks, that a line names


def summary(cards: Sequence[Card], zone: tzinfo = UTC) -> Table:
    """A line a card: what is wrong with it, in a word; times in the zone."""
    rows = []
    for card in cards:
        wrong = [found.check for found in card.findings if found.level == card.level != Level.OK]
        rows.append(
            {
                "Verdict": card.level.value,
                "Card": card.label,
                "Node": card.node,
                "Because of": ", ".join(wrong) if len(wrong) <= _NAMED else f"{len(wrong)} checks",
                "UUID": card.uuid,
                "Preflight": f"{card.at.astimezone(zone):%Y-%m-%d %H:%M %Z}",
            }
        )
    return Table.of("Cards", "", rows)


def to_do(cards: Sequence[Card]) -> Table:
    """Findings that are not OK, the worst first, with the cards that share them, and what to do."""
    alike: dict[Finding, tuple[dict[str, None], dict[str, None]]] = {}  # each with its checks and cards
    for card in cards:
        for found in card.findings:
            if found.level != Level.OK:
                # One line for all that is unknown for one reason.
                key = found if found.level in _ILL else found._replace(check="", value="")
                checks, names = alike.setdefault(key, ({}, {}))
                checks[found.check] = names[f"{card.label} on {card.node}"] = None
    rows = []
    for found, (checks, names) in sorted(alike.items(), key=lambda item: list(Level).index(item[0].level)):
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        rows.append(
            {
                "Level": found.level.value,
                "Card": ", ".join([*names][:_NAMED]) + more,
                "Check": ", ".join(checks),
                "Value": found.value,
                "Why": found.why,
                "What to do": found.fix,
            }
        )
    return Table.of("What to do", "", rows)
