"""Decision cards of hand-made decisions, in Streamlit's test harness."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
from streamlit.testing.v1 import AppTest

from jobs.schema.states import Result
from jobs.schema.training_plan import TrainingPlan
from orchestrator.judge.decisions import Decision
from orchestrator.judge.scope import Hardware
from orchestrator.judge.steps import Step
from orchestrator.judge.verdicts import RuleVerdict, TargetVerdict

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
