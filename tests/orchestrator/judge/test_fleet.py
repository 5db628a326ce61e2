"""Which card of a fleet is ill: eight cards of a made-up driver, of which some are."""

from collections.abc import Mapping
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from made_up_runs import T0, attempt, planned

from jobs.hardware import health
from jobs.schema import card_health
from jobs.schema.quantities import GPU_THROTTLED
from jobs.schema.states import PointState
from orchestrator.errors import UserError
from orchestrator.judge.fleet import Card, Level, judge_cards, require_preflight
from orchestrator.report import fleet as tables
from orchestrator.run.webhook import Ended
from orchestrator.store import Store
from orchestrator.store import records as rec

WELL: Mapping[str, Any] = {
    "limit": 700_000,
    "errors": {pynvml.NVML_VOLATILE_ECC: 0, pynvml.NVML_AGGREGATE_ECC: 0},
    "rows": (0, 0, 0, 0),
    "links": 18,
    "width": 16,
    "clock": 1700,
    "driver": "580",
    "log": "",
    "gemm": 700.0,
    "throttled": 0.0,
}


def link(card: Mapping[str, Any], number: int) -> int:
    if number >= 18:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    return int(number < card["links"])


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML whose devices are mappings."""
    answers = {
        "Count": lambda: 8,
        "PowerManagementLimit": lambda card: card["limit"],
        "PowerManagementDefaultLimit": lambda _: 700_000,
        "TotalEccErrors": lambda card, _, since: card["errors"][since],
        "RemappedRows": lambda card: card["rows"],
        "MaxPcieLinkWidth": lambda _: 16,
        "MaxPcieLinkGeneration": lambda _: 5,
        "CurrPcieLinkWidth": lambda card: card["width"],
        "CurrPcieLinkGeneration": lambda _: 5,
        "ClockInfo": lambda card, _: card["clock"],
        "NvLinkState": link,
        "Index": lambda card: card["index"],
        "PciInfo": lambda card: SimpleNamespace(busId=f"00000000:{card['index']}B:00.0"),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", answer)


def preflight(
    store: Store, ill: Mapping[int, Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch, run: str = "r"
) -> None:
    """A run of eight cards, of which those in `ill` have other values than WELL."""
    records: list[rec.Record] = [rec.RunRecord(run_id=run, at=T0, name="p", kind="preflight", spec={}, spec_hash="0")]
    for index in range(8):
        card = {**WELL, "index": index, **ill.get(index, {})}
        monkeypatch.setattr(health, "_kernel_log", lambda card=card: card["log"])
        found, more = health.at_rest(card)
        rates = dict.fromkeys((card_health.COPY_RATE, card_health.HOST_COPY_RATE), 50.0)
        rates |= {card_health.GEMM_RATE: card["gemm"], GPU_THROTTLED: card["throttled"]}
        figures = found | health.read(card, health.UNDER_LOAD) | rates
        gpu = {"name": "NVIDIA H200", "uuid": f"GPU-{index}", "driver": card["driver"], **more}
        records += attempt(
            planned(run, index, "x", 1, T0, {"device": "cuda"}),
            T0 + timedelta(seconds=index),
            20,
            card.get("state", PointState.OK),
            reason=card.get("reason"),
            environment={"gpu": gpu},
            metrics=()
            if "state" in card
            else [{"name": each.name, "unit": each.unit, "value": value} for each, value in figures.items()],
        )
    store.apply_many(records)


@pytest.fixture
def history(driver: None, sqlite_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preflight of the day before, of eight cards that were well."""
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "T0", T0 - timedelta(days=1))
        preflight(sqlite_store, {}, monkeypatch, run="before")


def named(cards: list[Card]) -> set[tuple[int, str, str, str]]:
    """Findings that are not OK: index of the card, check, level and value."""
    return {
        (int(card.label[-1]), *found[:3]) for card in cards for found in card.findings if found.level is not Level.OK
    }


def test_in_a_fleet_that_is_well_nothing_is_named(history: None, sqlite_store: Store, monkeypatch) -> None:
    preflight(sqlite_store, {}, monkeypatch)
    cards = judge_cards(sqlite_store)
    assert named(cards) == set()
    assert [card.label for card in cards] == [f"NVIDIA H200 {index}" for index in range(8)]
    assert not tables.to_do(cards).rows


XID = "[1.0] NVRM: Xid (PCI:0000:{}B:00): {}, pid=1, GPU has fallen off the bus.\n"
ILL = [
    # the check that finds it, how the card is, level and value of the finding
    ("power limit", {"limit": 500_000}, Level.WARN, "500 W"),
    ("remapped rows", {"rows": (0, 2, 0, 0)}, Level.WARN, "2"),
    ("remapped rows", {"rows": (0, 1, 1, 0)}, Level.BAD, "1"),  # one waits
    ("remapped rows", {"rows": (0, 1, 0, 1)}, Level.BAD, "1"),  # one failed
    ("Xid errors", {"log": XID.format(2, 79) + XID.format(2, 13)}, Level.BAD, "79"),
    ("GEMM", {"gemm": 560.0}, Level.BAD, "560 TFLOP/s"),
    ("ECC errors", {"errors": {0: 3, 1: 5}}, Level.BAD, "3"),
    ("NVLink", {"links": 16}, Level.BAD, "16"),
    ("PCIe", {"width": 8}, Level.WARN, "gen 5 ×8"),
    ("clock", {"clock": 1580}, Level.WARN, "1,580 MHz"),
    ("driver", {"driver": "570"}, Level.WARN, "570"),
    ("throttled", {"throttled": 60.0}, Level.WARN, "60 %"),
]


@pytest.mark.parametrize(("check", "change", "level", "value"), ILL, ids=str)
def test_a_card_that_is_ill_is_named_and_nothing_else(
    history: None, sqlite_store: Store, monkeypatch, check, change, level, value
) -> None:
    preflight(sqlite_store, {2: change}, monkeypatch)
    cards = judge_cards(sqlite_store)
    assert named(cards) == {(2, check, level, value)}
    assert (cards[0].label, cards[0].level) == ("NVIDIA H200 2", level), "the worst comes first"
    [row] = tables.to_do(cards).rows
    assert row[:3] == [level, "NVIDIA H200 2 on bench1", check]
    assert all(row[3:]), "with the reason and what to do"


def test_faults_of_programs_and_of_other_cards_blame_no_card(history: None, sqlite_store: Store, monkeypatch) -> None:
    preflight(sqlite_store, {2: {"log": XID.format(2, 31) + XID.format(3, 79)}}, monkeypatch)
    assert named(judge_cards(sqlite_store)) == set()


def test_what_cannot_be_read_is_unknown_for_the_others_too(history: None, sqlite_store: Store, monkeypatch) -> None:
    preflight(sqlite_store, {index: {"log": None} for index in range(8)}, monkeypatch)
    cards = judge_cards(sqlite_store)
    assert {card.level for card in cards} == {Level.UNKNOWN}
    [row] = tables.to_do(cards).rows
    assert (row[0], row[2]) == (Level.UNKNOWN, "Xid errors")
    assert "dmesg" in row[4]


def test_the_newest_preflight_of_a_card_counts_and_one_that_fails_is_bad(
    history: None, sqlite_store: Store, monkeypatch
) -> None:
    preflight(sqlite_store, {2: {"limit": 500_000}, 3: {"state": PointState.HANG, "reason": "silent"}}, monkeypatch)
    cards = judge_cards(sqlite_store)
    assert {found[:3] for found in named(cards) if found[2] is not Level.UNKNOWN} == {
        (2, "power limit", Level.WARN),
        (3, "preflight", Level.BAD),
    }
    monkeypatch.setitem(globals(), "T0", T0 + timedelta(days=1))
    preflight(sqlite_store, {}, monkeypatch, run="later")
    assert named(judge_cards(sqlite_store)) == set()


def test_a_node_that_has_lost_a_card_says_so(driver: None, sqlite_store: Store, monkeypatch) -> None:
    preflight(sqlite_store, {}, monkeypatch)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 7)
    monkeypatch.setitem(globals(), "T0", T0 + timedelta(days=1))
    preflight(sqlite_store, {}, monkeypatch, run="later")
    assert {found[1:] for found in named(judge_cards(sqlite_store))} == {("count", Level.BAD, "7")}


def test_the_newest_runs_say_how_many_cards_a_node_has(driver: None, sqlite_store: Store, monkeypatch) -> None:
    """A smaller pod may have the name of one that had more."""
    preflight(sqlite_store, {}, monkeypatch)
    assert {found[1:] for found in named(judge_cards(sqlite_store))} == {("count", Level.UNKNOWN, "8")}, "one look"
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 4)
    begun = T0
    for day in range(1, 5):
        monkeypatch.setitem(globals(), "T0", begun + timedelta(days=day))
        preflight(sqlite_store, {}, monkeypatch, run=f"later{day}")
    assert named(judge_cards(sqlite_store)) == set()


def test_a_preflight_that_named_no_card_is_unknown_until_one_does(
    driver: None, sqlite_store: Store, monkeypatch
) -> None:
    records = [rec.RunRecord(run_id="r0", at=T0, name="p", kind="preflight", spec={}, spec_hash="0")]
    at, state = T0 - timedelta(days=2), PointState.LOST
    records += attempt(planned("r0", 0, "x", 1, at, {"device": "cuda"}), at, 20, state, reason="its node died")
    sqlite_store.apply_many(records)
    [card] = judge_cards(sqlite_store)
    assert (card.label, card.level) == ("unknown card", Level.UNKNOWN)
    assert card.findings[0][:4] == ("preflight", Level.UNKNOWN, "lost", "its node died")
    preflight(sqlite_store, {}, monkeypatch)
    assert {card.label[:-2] for card in judge_cards(sqlite_store)} == {"NVIDIA H200"}


def test_a_card_alone_has_no_fleet_to_be_held_against(driver: None, sqlite_store: Store, monkeypatch) -> None:
    preflight(sqlite_store, {index: {"state": PointState.CANCELLED} for index in range(1, 8)}, monkeypatch)
    [card] = judge_cards(sqlite_store)
    assert {check for _, check, *_ in named([card])} == {
        *("driver", "count", "NVLink", "clock", "GEMM", "copy", "copy from host")
    }
    assert card.level is Level.UNKNOWN


def test_the_webhook_is_told_of_a_card_that_went_bad(history: None, sqlite_store: Store, monkeypatch) -> None:
    preflight(sqlite_store, {2: {"log": XID.format(2, 79)}, 3: {"limit": 500_000}}, monkeypatch)
    run = rec.RunRecord(run_id="r", at=T0, name="p", kind="preflight", spec={}, spec_hash="0")
    told = Ended(run, "done", 0, 8).judged(sqlite_store, [])
    assert told.bad_cards == (
        "NVIDIA H200 2 on bench1: Xid errors 79, the kernel's log has Xid errors that blame the card",
    )
    assert told.message("https://hooks.slack.com/services/T/B/x")["text"].endswith(f"BAD {told.bad_cards[0]}")
    run = run.model_copy(update={"run_id": "before"})
    assert Ended(run, "done", 0, 8).judged(sqlite_store, []).bad_cards == (), "what others found is not its own"


def test_a_spec_that_requires_it_is_refused_without_a_good_preflight_of_the_day(
    history: None, sqlite_store: Store, monkeypatch
) -> None:
    def refusal(gpus: Mapping[str, int], hours: float = 1) -> str:
        with pytest.raises(UserError) as refused:
            require_preflight(sqlite_store, gpus, T0 + timedelta(hours=hours), "nsa submit preflight.yaml")
        return str(refused.value)

    preflight(sqlite_store, {2: {"log": XID.format(2, 79)}, 3: {"limit": 500_000}}, monkeypatch)
    bad = refusal({"bench1": 8})
    assert bad.startswith("requires_preflight: true: NVIDIA H200 2 (GPU-2) on bench1 is BAD: Xid errors 79, the kernel")
    assert "reset the card" in bad
    assert bad.endswith("run nsa submit preflight.yaml")
    assert "\n" not in bad, "what is WARN refuses nothing"
    assert refusal({"bench2": 1}).startswith("requires_preflight: true: 1 of 1 GPUs of bench2 had no preflight within")
    assert "there is no GPU" in refusal({"bench1": 0})
    on_cpu = rec.RunRecord(run_id="c", at=T0, name="p", kind="preflight", spec={}, spec_hash="0")
    point = attempt(planned("c", 0, "x", 1, T0, {"device": "cpu"}), T0, 20, PointState.OK)
    point = [each.model_copy(update={"node": "bench3"}) if each.type == "start" else each for each in point]
    sqlite_store.apply_many([on_cpu, *point])
    assert "1 of 1 GPUs of bench3 had no preflight" in refusal({"bench3": 1}), "one on the CPU looks at no card"
    assert f"8 of 8 GPUs of bench1 had no preflight within a day; NVIDIA H200 2: {T0:%Y-%m-%d %H:%M} UTC" in refusal(
        {"bench1": 8}, 25
    )
    monkeypatch.setitem(globals(), "T0", T0 + timedelta(hours=1))
    preflight(sqlite_store, {}, monkeypatch, run="later")
    require_preflight(sqlite_store, {"bench1": 8}, T0 + timedelta(hours=23), "")
    assert "1 of 9 GPUs" in refusal({"bench1": 9})
