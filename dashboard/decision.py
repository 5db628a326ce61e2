"""Decision card: a sentence, the plan, a line a rule with a column a machine, and the steps that are left."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd
import streamlit as st

from dashboard import parts
from jobs.schema.quantities import in_words
from jobs.schema.states import Result

if TYPE_CHECKING:
    from orchestrator.judge.decisions import Decision
    from orchestrator.judge.steps import Step
    from orchestrator.judge.verdicts import RuleVerdict, TargetVerdict

_ANY_MACHINE = "Any machine"  # the column of a target that names no hardware
_TRANSFERRED = "⇄"
_NO_RULE = ":gray[–]"
_MEANING = {Result.GO: "holds", Result.NO_GO: "fails", Result.UNKNOWN: "open"}
# A value is a link: it looks like text, so that twenty of them stay readable, and like a link under the pointer.
_STYLE = """<style>
[class*=st-key-rules-] td a { color: inherit !important; text-decoration: none !important; }
[class*=st-key-rules-] td a:is(:hover, :focus-visible) { text-decoration: underline dotted !important; }
[class*=st-key-rules-] :is(td, th) { padding: 0.1rem 0.5rem !important; }
[class*=st-key-rules-] :is(td, th):first-child * { white-space: nowrap; }
[class*=st-key-reasons-] td { padding: 0.3rem 0.5rem !important; vertical-align: top; }
[class*=st-key-reasons-] td:nth-child(1) { width: 30%; }
[class*=st-key-reasons-] td:nth-child(2) { width: 17%; }
[class*=st-key-reasons-] td:nth-child(4) { width: 13%; }
[class*=st-key-rules-] td p { font-variant-numeric: tabular-nums; }
@media (max-width: 640px) {
  [class*=st-key-rules-] :is(td, th) { padding: 0.1rem 0.25rem !important; }
  [class*=st-key-rules-] :is(td, th):first-child * { white-space: normal; }
}
[class*=st-key-decision-] h3 { padding: 0 0 0.9rem; }
</style>"""


def show(decision: Decision) -> None:
    """Draw the card."""
    st.html(_STYLE)
    with st.container(border=True, key=f"decision-{decision.name}", gap="xsmall"):
        st.markdown(f"### {parts.badge(decision.result, parts.RESULTS)} {parts.plain(decision.title)}")
        st.markdown(parts.plain(decision.sentence))
        if decision.plan is not None:
            st.caption(_plan(decision))
        if any(rule.value is not None for verdict in decision.verdicts for rule in verdict.rules):
            _rules(decision)
        _reasons(decision)
        _steps(decision)


def _plan(decision: Decision) -> str:
    """The plan's need beside each measured throughput and the hours that it would take."""
    plan = decision.plan
    assert plan is not None
    text = (
        f"**Plan** {plan.steps:,} steps × {plan.tokens_per_step:,} tokens in {plan.hours:g} h "
        f"need {parts.number(plan.needed, 'tok/s')}"
    )
    measured = [
        f"{parts.number(rule.value, rule.unit)} on {parts.plain(_machine(verdict))} would take "
        f"{parts.minutes(60 * plan.hours_at(rule.value))}"
        for verdict in _machines(decision)
        for rule in verdict.rules
        if rule.unit == "tok/s" and rule.bound == plan.needed and rule.value
    ]
    return f"{text} · **Measured** {'; '.join(measured) or 'nothing yet'}"


def _rules(decision: Decision) -> None:
    """Draw a line a rule with a column a machine; a value links to its point, with the reason as hover text."""
    lines: dict[str, list[RuleVerdict]] = {rule.rule: [] for verdict in decision.verdicts for rule in verdict.rules}
    for verdict in _machines(decision):
        for rule in verdict.rules:
            lines[rule.rule].append(rule)
    table = pd.DataFrame(
        {
            "Rule": ["**Verdict**", *map(_name, lines)],
            "Bound": ["", *map(_bounds, lines.values())],
            **{_column(decision, verdict): _cells(verdict, list(lines)) for verdict in _machines(decision)},
        }
    )
    with st.container(key=f"rules-{decision.name}", gap="xsmall"):
        st.table(table, border="horizontal", hide_index=True)
        st.caption("  \n".join([_legend(decision), *_commits(decision)]))


def _legend(decision: Decision) -> str:
    signs = [f"{_sign(result)} {meaning}" for result, meaning in _MEANING.items()]
    if any(rule.transferred for verdict in decision.verdicts for rule in verdict.rules):
        signs.append(f"{_TRANSFERRED} measured on a similar card")
    if len({tuple(rule.rule for rule in verdict.rules) for verdict in decision.verdicts}) > 1:
        signs.append(f"{_NO_RULE} no rule there")
    return " · ".join([*signs, "hover a value for its reason, click for its point"])


def _commits(decision: Decision) -> list[str]:
    """A warning for each machine whose rules rest on different commits."""
    return [
        f":orange[:material/difference:] {parts.plain(_machine(verdict))}: the rules rest on different commits: "
        + ", ".join(map(parts.code, verdict.commits))
        for verdict in _machines(decision)
        if len(verdict.commits) > 1
    ]


def _bounds(rules: list[RuleVerdict]) -> str:
    """A rule's bound; all of them where machines differ, so that a line breaks between them only."""
    return " or ".join(dict.fromkeys(parts.bound(rule).replace(" ", "\N{NO-BREAK SPACE}") for rule in rules))


def _cells(verdict: TargetVerdict, lines: list[str]) -> list[str]:
    """A machine's column; a dash where it lacks a rule."""
    rules = {rule.rule: rule for rule in verdict.rules}
    return [
        _sign(verdict.result, str(verdict.result)),
        *(_cell(rules[line]) if line in rules else _NO_RULE for line in lines),
    ]


def _cell(rule: RuleVerdict) -> str:
    """A rule's sign and value; with evidence a link to the first of its points, whose hover text is the reason."""
    text = _sign(rule.result)
    if rule.value is not None:
        text += f"\N{NO-BREAK SPACE}{parts.amount(rule.value, rule.unit)}"
    if rule.transferred:
        text += f" {_TRANSFERRED}"
    if not rule.evidence:
        return text
    return parts.point_link(rule.evidence[0], text, hover=_hover(rule))


def _sign(result: Result, name: str = "") -> str:
    look = parts.RESULTS[result]
    return f":{look.color}[{look.sign} **{name}**]" if name else f":{look.color}[{look.sign}]"


def _hover(rule: RuleVerdict) -> str:
    told = [f"{rule.title}: {rule.result}"]
    if rule.margin is not None:
        told.append(f"bound {parts.bound(rule)}, margin {parts.amount(rule.margin, rule.unit)}")
    if rule.transferred:
        told.append(f"measured on {rule.transferred}")
    return "; ".join([*told, rule.reason])


def _reasons(decision: Decision) -> None:
    """Draw the rules on the chosen machine with their reasons and all their points."""
    machines = {_column(decision, verdict): verdict for verdict in _machines(decision)}
    label = "Reasons and evidence on"
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        st.caption(label, width="content")
        chosen = st.segmented_control(
            label, list(machines), key=f"why-{decision.name}", bind="query-params", label_visibility="collapsed"
        )
    if chosen is not None:
        with st.container(key=f"reasons-{decision.name}"):
            table = pd.DataFrame([_reason(rule) for rule in machines[chosen].rules])
            st.table(table, border="horizontal", hide_index=True)


def _reason(rule: RuleVerdict) -> dict[str, str]:
    told = [] if rule.value is None else [parts.amount(rule.value, rule.unit)]
    told.append(f"bound\N{NO-BREAK SPACE}{parts.bound(rule)}")
    if rule.margin is not None:
        told.append(f"margin\N{NO-BREAK SPACE}{parts.amount(rule.margin, rule.unit)}")
    return {
        "Rule": f"{parts.badge(rule.result, parts.RESULTS)} {parts.plain(rule.title)}",
        "Value": ", ".join(told),
        "Why": parts.plain(rule.reason),
        "Evidence": parts.evidence(rule.evidence),
    }


def _steps(decision: Decision) -> None:
    """Draw the commands that would settle the open rules, and what no command settles yet."""
    ready = [step for step in decision.steps if step.command]
    missing = [step for step in decision.steps if not step.command]
    if not decision.steps:
        return
    label = f"What would settle the open rules: {parts.count(len(ready), 'command')}" + _total(ready)
    with st.expander(label, icon=":material/checklist:", key=f"next-{decision.name}", bind="query-params"):
        for step in ready:
            st.markdown(_step(step), help=parts.plain(step.basis) or None)
            st.code(step.command, language="bash", wrap_lines=True)
        if ready:
            plan, resolve = (parts.code(f"nsa {command} {decision.name}") for command in ("plan", "resolve"))
            st.caption(f"{plan} prints them; {resolve} runs those that this cluster can run.")
        if missing:
            st.markdown("**No command of this version measures:**")
            st.markdown("\n".join(f"- {_lacking(step)}" for step in missing))


def _step(step: Step) -> str:
    gpus = parts.count(step.gpus, "GPU") if step.gpus else "CPU"
    time = "time unknown" if step.minutes is None else f"about {parts.minutes(step.minutes)}"
    return f"**{parts.plain(step.hardware)}** · {gpus}, {time} · settles {_names(step)}"


def _lacking(step: Step) -> str:
    return f"{_names(step)} on {parts.plain(step.hardware)}: {parts.plain(step.lacking)}"


def _names(step: Step) -> str:
    return parts.plain(", ".join(step.settles))


def _total(steps: list[Step]) -> str:
    minutes = [step.minutes for step in steps if step.minutes is not None]
    return f", about {parts.minutes(sum(minutes))}" if minutes and len(minutes) == len(steps) else ""


def _name(rule: str) -> str:
    return parts.plain(in_words(rule))


def _machines(decision: Decision) -> list[TargetVerdict]:
    """Verdicts on measured machines, on those with evidence of a similar card, and on the others, each as declared.

    A narrow screen shows the first columns alone.
    """
    return sorted(decision.verdicts, key=lambda verdict: (not verdict.measured, not verdict.judged))


def _machine(verdict: TargetVerdict) -> str:
    return verdict.hardware.title if verdict.hardware else _ANY_MACHINE


def _column(decision: Decision, verdict: TargetVerdict) -> str:
    """The machine's title, told apart from another machine's of the same title."""
    titles = [_machine(each) for each in decision.verdicts]
    title = _machine(verdict)
    return parts.plain(title if titles.count(title) == 1 else f"{title} ({verdict.name.rpartition('/')[2]})")
