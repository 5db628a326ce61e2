"""Overview page: the running runs, a decision card for each target, the latest runs."""

from dataclasses import replace

import streamlit as st

from dashboard import data, grids, help_pages, parts
from dashboard.address import leave
from jobs.schema.quantities import in_words
from jobs.schema.states import Origin, Result, RunState
from orchestrator.errors import UserError
from orchestrator.judge.crossover import Crossing
from orchestrator.judge.decisions import Decision
from orchestrator.judge.steps import merged, total
from orchestrator.judge.verdicts import RuleVerdict, TargetVerdict
from orchestrator.report.now import failures
from orchestrator.store import Store

LATEST = 5
_ANY_MACHINE = "Any machine"  # the column of a target that names no hardware
_TRANSFERRED = "⇄"
_NO_RULE = ":gray[–]"
_MEANING = {Result.GO: "holds", Result.NO_GO: "fails", Result.UNKNOWN: "open"}


@data.explained
def page() -> None:
    store = data.open_store()
    st.title("Overview")
    counts = data.counts(store)
    if not counts["runs"]:
        help_pages.nothing_yet()
        return
    live = bool(counts["runs_running"])
    if live:
        st.fragment(_going_on, run_every=data.LIVE_SECONDS)(store, seen=counts)
    st.fragment(_failures, run_every=data.IDLE_SECONDS)(store)
    _decisions(store)
    st.header("Latest runs")
    st.fragment(_runs_table, run_every=data.LIVE_SECONDS if live else data.IDLE_SECONDS)(store, live)
    st.page_link("runs.py", label="All runs", icon=":material/list_alt:")


@data.explained
def _failures(store: Store) -> None:
    """Show in a line how many runs failed within a day, if any did."""
    if failed := failures(data.now(store, parts.zone())[-1].lines):
        with st.container(horizontal=True, vertical_alignment="center"):
            text = f"**{parts.count(failed, 'run')}** of the last 24 hours failed, or had points that failed"
            st.markdown(f":material/error: {text}", width="content")
            st.page_link("now.py", label="Which, and why", icon=":material/arrow_forward:")


@data.explained
def _going_on(store: Store, *, seen: dict[str, int]) -> None:
    """Show the running runs and their activity; redraw the whole page when the counts change."""
    if data.counts(store) != seen:
        st.rerun()
    for row in data.runs(store, state=RunState.RUNNING).to_dict("records"):
        with st.container(border=True, gap="xsmall"):
            with st.container(horizontal=True, vertical_alignment="center"):
                st.markdown(
                    f"{parts.badge('running', parts.RUN_STATES)} **{parts.plain(row['name'])}** "
                    f"{parts.code(row['run_id'])}",
                    width="stretch",
                )
                query = {"run": row["run_id"]}
                st.page_link("runs.py", label="Follow this run", icon=":material/open_in_full:", query_params=query)
            st.progress(parts.progress(row), text=f"{parts.tally(row)} of {parts.count(row['points'], 'point')}")
            for point in data.running(store, row["run_id"]):
                st.caption(parts.doing(point))


def _decisions(store: Store) -> None:
    """Draw the verdicts, where NSA pays, and a card for each target; wrong rules leave the rest of the page."""
    try:
        decisions, crossings = data.judged(store)
    except UserError as err:
        help_pages.explain(err)
        return
    verdicts = [verdict for each in decisions for verdict in each.verdicts if verdict.hardware]
    measured = {
        each.name: sum(not rule.transferred and rule.value is not None for rule in each.rules) for each in verdicts
    }
    verdicts.sort(key=lambda verdict: -measured[verdict.name])
    machines = list(dict.fromkeys(verdict.hardware.title for verdict in verdicts if verdict.hardware))
    label, usual = "The answer for (none chosen: for all machines)", machines[0] if machines else None
    mine = st.segmented_control(label, machines, default=usual, key="machine", bind="query-params")
    with st.container(border=True, key="answers-all", gap="xsmall"):
        st.markdown("### May we start?")
        grids.table([row for each in decisions for row in _start(each, mine)])
    if crossings:
        with st.container(border=True, key="crossovers", gap="xsmall"):
            st.markdown("### Where NSA begins to pay")
            grids.table([_pays(each) for each in crossings])
            st.page_link("results.py", label="The ratios at every length", icon=":material/grid_on:")
    for each in decisions:
        card(each, mine)


@data.explained
def _runs_table(store: Store, live: bool) -> None:
    if bool(data.counts(store)["runs_running"]) != live:
        st.rerun()  # a run began or ended: redraw the whole page
    measured = data.runs(store, origin=Origin.MEASURED, limit=LATEST)
    frame = measured if len(measured) else data.runs(store, limit=LATEST)
    chosen = grids.runs(frame, data.run_notes(store, frame), key="latest-runs")
    if chosen is not None:
        leave("runs", run=chosen)


def card(decision: Decision, mine: str | None = None) -> None:
    """Draw the card; its sentences are of the machine of this title, if it has that."""
    # Mine, measured ones, those with evidence of a similar card, then others: a narrow screen shows the first alone.
    own = [verdict for verdict in decision.verdicts if verdict.hardware and verdict.hardware.title == mine]
    ordered = sorted(decision.verdicts, key=lambda each: (each not in own, not each.measured, not each.judged))
    titles = [parts.plain(each.hardware.title if each.hardware else _ANY_MACHINE) for each in ordered]
    machines = {
        title if titles.count(title) == 1 else f"{title} ({parts.plain(verdict.name.rpartition('/')[2])})": verdict
        for title, verdict in zip(titles, ordered, strict=True)
    }
    with st.container(border=True, key=f"decision-{decision.name}", gap="xsmall"):
        said = replace(decision, verdicts=tuple(own)) if own else decision
        st.markdown(f"### {parts.badge(said.result, parts.RESULTS)} {parts.plain(decision.title)}")
        st.markdown("  \n".join(map(parts.plain, said.sentences)))
        if (plan := decision.plan) is not None:
            measured = [
                f"{parts.number(rule.value, rule.unit)} on {title} would take "
                f"{parts.number(plan.hours_at(rule.value), 'h')}"
                for title, verdict in machines.items()
                for rule in verdict.rules
                if rule.unit == "tok/s" and rule.bound == plan.needed and rule.value and not rule.transferred
            ]
            st.caption(
                f"**Plan** {plan.steps:,} steps × {plan.tokens_per_step:,} tokens in {plan.hours:g} h "
                f"need {parts.number(plan.needed, 'tok/s')} · **Measured** {'; '.join(measured) or 'nothing yet'}"
            )
        if any(verdict.judged for verdict in ordered):
            if not any(verdict.questions for verdict in ordered):
                _rules(decision.name, machines)
            else:
                with st.container(key=f"answers-{decision.name}"):
                    grids.table([{"Machine": title} | _answers(verdict) for title, verdict in machines.items()])
                label = "The rules, with their values and evidence"
                with st.expander(label, icon=":material/rule:", key=f"all-{decision.name}", bind="query-params"):
                    _rules(decision.name, machines)
        _reasons(decision.name, machines)
        if decision.steps:
            _steps(decision)


def _start(decision: Decision, mine: str | None) -> list[dict[str, str]]:
    """A target's verdict on the machine of this title, if it has that; of none, on all its machines."""
    name = {"Plan": parts.plain(decision.title)}
    if mine is None:
        left = total(decision.steps).replace("$", "\\$")
        return [name | {"Verdict": _sign(decision.result, named=True), "To find out": left}]
    own = [verdict for verdict in decision.verdicts if verdict.hardware and verdict.hardware.title == mine]
    return [name | _answers(verdict) for verdict in own]


def _pays(crossing: Crossing) -> dict[str, str]:
    return {
        "Workload": parts.plain(crossing.title),
        "Card": parts.plain(crossing.hardware.title.removeprefix("1× ")),
        "NSA begins to pay": f"**{parts.plain(crossing.words)}**",
    }


def _answers(verdict: TargetVerdict) -> dict[str, str]:
    """The verdict on a machine, the answers to the questions, and what it would take to find out the rest."""
    answers = {question.capitalize(): _sign(result, named=True) for question, result in verdict.questions.items()}
    steps = merged(rule.step for rule in verdict.rules if rule.step)
    return {"Verdict": _sign(verdict.result, named=True), **answers, "To find out": total(steps).replace("$", "\\$")}


def _rules(name: str, machines: dict[str, TargetVerdict]) -> None:
    """Draw a line a rule with a column a machine; a value links to its point, with the reason as hover text."""
    by_rule: dict[str, dict[str, RuleVerdict]] = {}
    for title, verdict in machines.items():
        for rule in verdict.rules:
            by_rule.setdefault(rule.rule, {})[title] = rule
    rows = [{"Rule": "**Verdict**", "Bound": ""}]
    rows[0] |= {title: _sign(verdict.result, named=True) for title, verdict in machines.items()}
    for rule, found in by_rule.items():
        # All bounds where machines differ, so that a line breaks between them only.
        bounds = " or ".join(dict.fromkeys(parts.bound(each) for each in found.values()))
        cells = {title: _cell(found[title]) if title in found else _NO_RULE for title in machines}
        rows.append({"Rule": parts.plain(in_words(rule)), "Bound": bounds, **cells})
    legend = [f"{_sign(result)} {meaning}" for result, meaning in _MEANING.items()]
    if any(rule.transferred for found in by_rule.values() for rule in found.values()):
        legend.append(f"{_TRANSFERRED} measured on a similar card")
    if any(len(found) < len(machines) for found in by_rule.values()):
        legend.append(f"{_NO_RULE} no rule there")
    lines = [" · ".join([*legend, "hover a value for its reason, click for its point"])]
    for title, verdict in machines.items():
        if len(verdict.commits) > 1:
            text = f"{title}: the evidence comes from several commits: {', '.join(map(parts.code, verdict.commits))}"
            lines.append(f":orange[:material/difference:] {text}")
    with st.container(key=f"rules-{name}", gap="xsmall"):
        grids.table(rows)
        st.caption("  \n".join(lines))


def _cell(rule: RuleVerdict) -> str:
    """A rule's sign and value; with evidence a link to the first of its points, whose hover text is the reason."""
    text = _sign(rule.result)
    hover = [f"{rule.title}: {rule.result}"]
    if rule.value is not None:
        text += f"\N{NO-BREAK SPACE}{parts.number(rule.value, rule.unit)}"
    if rule.margin is not None:
        hover.append(f"bound {parts.bound(rule)}, margin {parts.number(rule.margin, rule.unit)}")
    if rule.transferred:
        text += f" {_TRANSFERRED}"
        hover.append(f"measured on {rule.transferred}")
    return (
        parts.point_link(rule.evidence[0], text, hover=parts.named("; ".join([*hover, rule.reason])))
        if rule.evidence
        else text
    )


def _sign(result: Result, *, named: bool = False) -> str:
    look = parts.RESULTS[result]
    return f":{look.color}[{look.sign} **{result}**]" if named else f":{look.color}[{look.sign}]"


def _reasons(name: str, machines: dict[str, TargetVerdict]) -> None:
    """Draw the rules on the chosen machine with their reasons and all their points."""
    label = "Reasons and evidence on"
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        st.caption(label, width="content")
        chosen = st.segmented_control(
            label, list(machines), key=f"why-{name}", bind="query-params", label_visibility="collapsed"
        )
    if chosen is None:
        return
    rows = []
    for rule in machines[chosen].rules:
        figures = [] if rule.value is None else [parts.number(rule.value, rule.unit)]
        figures.append(f"bound\N{NO-BREAK SPACE}{parts.bound(rule)}")
        if rule.margin is not None:
            figures.append(f"margin\N{NO-BREAK SPACE}{parts.number(rule.margin, rule.unit)}")
        title = f"{parts.badge(rule.result, parts.RESULTS)} {parts.plain(rule.title)}"
        why = parts.plain(parts.named(rule.reason))
        rows.append({"Rule": title, "Value": ", ".join(figures), "Why": why, "Evidence": parts.evidence(rule.evidence)})
    with st.container(key=f"reasons-{name}"):
        grids.table(rows)


def _steps(decision: Decision) -> None:
    """Draw the commands that would settle the open rules, and what no command settles yet."""
    ready = [step for step in decision.steps if step.command]
    commands, left = parts.count(len(ready), "command"), total(ready).replace("$", "\\$")
    label = f"What would settle the open rules: {', '.join(filter(None, (commands, left)))}"
    with st.expander(label, icon=":material/checklist:", key=f"next-{decision.name}", bind="query-params"):
        for step in ready:
            gpus, cost = parts.count(step.gpus, "GPU") if step.gpus else "CPU", total([step]).replace("$", "\\$")
            text = f"**{parts.plain(step.hardware)}** · {gpus}, {cost} · settles {parts.plain(', '.join(step.settles))}"
            st.markdown(text, help=parts.plain(step.basis) or None)
            st.code(step.command, language="bash", wrap_lines=True)
        if ready:
            plan, resolve = (parts.code(f"nsa {command} {decision.name}") for command in ("plan", "resolve"))
            st.caption(f"{plan} prints them; {resolve} runs those that this cluster can run.")
        if len(ready) < len(decision.steps):
            st.markdown("**No command of this version measures:**")
        for step in decision.steps[len(ready) :]:  # those without a command are last
            text = f"{', '.join(step.settles)} on {step.hardware}: {step.lacking}"
            st.markdown(f"- {parts.plain(text)}")


if __name__ == "__main__":
    page()
