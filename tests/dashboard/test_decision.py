"""Decision cards of hand-made decisions, and the live part of a point's page, in Streamlit's test harness."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs

import pandas as pd
import pytest
from dashboard_pages import chart_titles, show, text
from streamlit.testing.v1 import AppTest

from dashboard import live
from jobs.schema.states import Result
from jobs.schema.training_plan import TrainingPlan
from orchestrator.judge.decisions import Decision
from orchestrator.judge.scope import Hardware
from orchestrator.judge.steps import Step
from orchestrator.judge.verdicts import RuleVerdict, TargetVerdict
from orchestrator.store import Store
from orchestrator.store.records import PointRecord, Progress, RunRecord, SeriesRecord, StartRecord

PLAN = TrainingPlan(steps=50_000, tokens_per_step=4096, hours=24)
H100 = Hardware(name="1x-h100", title="1× H100", gpu="*H100*", gpus=1, architecture="sm90", accelerator="H100")
H200 = Hardware(name="1x-h200", title="1× H200", gpu="*H200*", gpus=1, architecture="sm90", accelerator="H200")
TWO = Hardware(name="2x-h200", title="2× H200", gpu="*H200*", gpus=2, architecture="sm90", accelerator="H200")
MEASURE = Step("nsa submit train.yaml", "", "1× H100", 1, 75.0, "the same run on an H200", ("throughput",))
MISSING = Step(None, "training on several GPUs (`ranks`)", "2× H200", 2, None, "", ("utilisation",))
EXPONENT = RuleVerdict(
    "memory-exponent", "memory grows no faster than S^1.1", Result.GO, "grows as S^0.998", 0.998, "1", "<=", 1.1, 0.102,
    ["run-1/7", "run-1/8"], "run-1", "aaaaaaaaaa",
)  # fmt: skip
SPEED = RuleVerdict(
    "throughput", "fast enough for the plan", Result.GO, "nsa: 23703.7 tok/s", 23703.7, "tok/s", ">=", PLAN.needed,
    21333.3, ["run-2/0"], "run-2", "bbbbbbbbbb", headline=True,
)  # fmt: skip
MEMORY = RuleVerdict(
    "peak-memory", "an 80 GB card has room", Result.NO_GO, "nsa: 122880 MiB", 122880.0, "MiB", "<=", 109255.0,
    -13625.0, ["run-2/0"], "run-2", "bbbbbbbbbb", headline=True,
)  # fmt: skip
BUSY = RuleVerdict(
    "utilisation", "every GPU is busy", Result.UNKNOWN, "not measured", None, "%", ">=", 80, step=MISSING
)


def unmeasured(rule: RuleVerdict, step: Step) -> RuleVerdict:
    blank = replace(rule, result=Result.UNKNOWN, reason="not measured: it", value=None, margin=None, evidence=[])
    return replace(blank, run_id=None, commit=None, step=step)


def verdict(hardware: Hardware | None, result: Result, *rules: RuleVerdict) -> TargetVerdict:
    return TargetVerdict(f"t/{hardware.name if hardware else ''}", "Fit", result, list(rules), "t", hardware)


def decision(*verdicts: TargetVerdict, plan: TrainingPlan | None = PLAN) -> Decision:
    return Decision("t", "The model is fit", plan, verdicts)


MIXED = decision(
    verdict(H100, Result.UNKNOWN, replace(EXPONENT, transferred="NVIDIA H200"), unmeasured(SPEED, MEASURE),
            unmeasured(replace(MEMORY, bound=61989.0), replace(MEASURE, settles=("peak-memory",)))),
    verdict(H200, Result.NO_GO, EXPONENT, SPEED, MEMORY),
    verdict(TWO, Result.UNKNOWN, unmeasured(EXPONENT, MISSING), BUSY),
)  # fmt: skip


def draw(drawn: Decision, **chosen: str) -> AppTest:
    def script(drawn):  # runs by itself: its names are its own
        from dashboard.overview import card

        card(drawn)

    app = AppTest.from_function(script, kwargs={"drawn": drawn})
    for name, value in chosen.items():
        app.session_state[name] = value
    app.run(timeout=60)
    assert not app.exception, [found.message for found in app.exception]
    return app


def said(app: AppTest) -> str:
    text = "\n".join(str(element.value) for element in (*app.markdown, *app.caption))
    return text.replace("\\", "").replace("\N{NO-BREAK SPACE}", " ")


def rules(app: AppTest) -> pd.DataFrame:
    return app.table[0].value.set_index("Rule")


def test_a_line_a_rule_and_a_column_a_machine():
    table = rules(draw(MIXED)).map(lambda text: text.replace("\N{NO-BREAK SPACE}", " "))
    assert list(table.columns) == ["Bound", "1× H200", "1× H100", "2× H200"]
    assert list(table.index) == ["**Verdict**", "Memory exponent", "Throughput", "Peak memory", "Utilisation"]
    assert [text.split("[")[1].split(" ")[0] for text in table.loc["**Verdict**"].iloc[1:]] == ["✗", "?", "?"]
    assert ":green[✓] 0.998" in table.loc["Memory exponent", "1× H200"]
    assert ":red[✗] 122,880 MiB" in table.loc["Peak memory", "1× H200"]
    assert table.loc["Throughput", "1× H100"] == ":gray[?]"


def test_steps_are_commands_to_copy():
    app = draw(MIXED)
    assert app.expander[0].label == "What would settle the open rules: 1 command, 75 min, 1.2 GPU-h"
    assert [block.value for block in app.code] == ["nsa submit train.yaml"]
    text = said(app)
    assert "1 GPU, 75 min, 1.2 GPU-h · settles throughput, peak-memory" in text
    assert "utilisation on 2× H200: training on several GPUs (`ranks`)" in text


RUN = "20261123-120000-train-ab12"
POINT = f"{RUN}/0"
PLANNED = {"steps": 1000, "tokens_per_step": 1024, "hours": 1.0}


def piece(
    name: str, unit: str, values: list[float], first: int = 0, rank: int = 0, at: datetime | None = None
) -> SeriesRecord:
    steps = tuple(range(first, first + len(values)))
    begun = (at or datetime.now(UTC)).timestamp()
    return SeriesRecord(
        run_id=RUN, point_id=POINT, attempt=1, rank=rank, name=name, unit=unit, steps=steps,
        times=tuple(begun + step for step in steps), values=tuple(values),
    )  # fmt: skip


def training(
    url: str, *pieces: SeriesRecord, plan: Any = None, estimate: int | None = None, device: str = "cpu"
) -> None:
    """A database with one running training."""
    now = datetime.now(UTC) - timedelta(minutes=2)
    begun = RunRecord(run_id=RUN, at=now, name="train", kind="train", spec={}, spec_hash="5")
    axes = {"implementation": "nsa", "seq_len": 128, "device": device}
    planned = PointRecord(
        run_id=RUN, at=now, point_id=POINT, index=0, key="0", label="nsa tiny", config={"plan": plan}, axes=axes,
        estimate_bytes=estimate,
    )  # fmt: skip
    with Store.open(url) as store:
        store.apply_many([begun, planned, StartRecord(run_id=RUN, at=now, point_id=POINT, attempt=1), *pieces])
        store.beat(Progress(RUN, POINT, datetime.now(UTC), "train", 300, 900, 2.0))


def test_a_running_point_shows_its_series_and_when_it_ends(database: str) -> None:
    training(database, piece("loss", "nat/byte", [4.0, 3.0]), piece("cpu_utilization", "%", [91.0, 90.0]))
    app = show("runs", run=RUN, point=POINT)
    said = text(app)
    assert "train: 300 of 900 at 2 a second, about **5 min** left" in said
    assert "Series" in said
    assert "CPU utilisation: 90 %" in said
    assert ": 3 nat/byte" in said
    assert "Expected against actual" not in said, "without a plan or an estimate nothing was expected"
    assert len(app.get("vega_lite_chart")) == 2
    links = {link.proto.label: link.proto.query_string for link in show("runs", run=RUN).get("page_link")}
    assert parse_qs(links["Live"]) == {"run": [RUN], "point": [POINT]}


def test_expected_stands_against_actual(database: str) -> None:
    pieces = [
        piece("throughput", "tok/s", [100.0, 142.2]),
        *(piece("gpu_utilization", "%", [10.0, 96.0 - 30 * rank, 97.0 - 30 * rank], rank=rank) for rank in range(2)),
        piece("training_memory", "MiB", [50.0, 120.0]),
        piece("rank_imbalance", "%", [3.0, 2.5]),
        piece("mfu", "%", [41.0, 42.0]),
    ]
    training(database, *pieces, plan=PLANNED, estimate=100 << 20, device="cuda")
    app = show("runs", run=RUN, point=POINT)
    said = text(app)
    captions = chart_titles(app)
    first = captions.index("MFU: 42 %")
    assert captions[first - 1 : first + 2] == ["Throughput: 142.2 tok/s", "MFU: 42 %", "Rank imbalance: 2.5 %"]
    assert "Throughput,≥ 284.4 tok/s,142.2 tok/s,✗ no" in said
    assert "Time of the planned run,≤ 1 h,2 h,✗ no" in said
    assert "Memory,100 MiB estimated,120 MiB,✗ no" in said
    assert 'median of the least busy rank",≥ 80 %,66 %,✗ no' in said
    assert "67 to 97 %, 2 ranks" in said


@pytest.mark.parametrize("changes", [{"rate": None}, {"rate": 0.0}, {"total": 0}, {"running": 0}, {"rate": 1e-300}])
def test_an_end_that_is_unknown_is_not_told(changes: dict) -> None:
    point = {"running": 1, "phase": "train", "done": 300, "total": 900, "rate": 2.0}
    assert live.remaining(point)
    assert live.remaining(point | changes) == ""
