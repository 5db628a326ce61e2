"""The values in a run that a rule's bound is compared with."""

from collections import defaultdict
from dataclasses import dataclass

from jobs.schema.axes import MORE, RESULTS_NAME, more_columns
from jobs.schema.quantities import readable
from jobs.schema.states import PointState
from orchestrator.judge.analysis import named, surroundings
from orchestrator.judge.evidence import Run
from orchestrator.judge.rules import ExponentRule, MetricRule, RatioRule, Rule, StatesRule
from orchestrator.judge.scope import Row, Scope, Where


@dataclass(frozen=True)
class Candidate:
    """A value to compare with the bound."""

    value: float
    points: list[str]
    what: str  # in words
    interval: tuple[float, float] | None = None  # of a fit
    query: str | None = None  # SQL that gives the value; None for a fit
    seq_len: int | None = None  # the length of its points; None for a fit


@dataclass(frozen=True)
class Found:
    """The evidence of a run for a rule."""

    candidates: list[Candidate]
    lacking: str = ""  # why it is incomplete
    unit: str = "1"
    refused: str = ""  # why values of this run are not compared with each other


def find(rule: Rule, run: Run, scope: Scope) -> Found:
    """The evidence of a run for a rule."""
    match rule:
        case ExponentRule():
            return _exponents(rule, run, scope)
        case MetricRule():
            return _metrics(rule, run, scope)
        case RatioRule():
            return _ratios(rule, run, scope)
        case StatesRule():
            return _states(rule, run, scope)


def requirement(rule: Rule, scope: Scope) -> str:
    """The evidence that a rule needs, in words."""
    if isinstance(rule, StatesRule):
        return f"no points ({scope})"
    if isinstance(rule, RatioRule):
        above, below = rule.numerator, rule.denominator
        if above.where == below.where:
            return f"{above.metric} with {below.metric} ({scope})"
        return f"{above.metric} of {above.where} beside {below.metric} of {below.where} ({scope})"
    more = f" at {rule.min_lengths} or more lengths" if isinstance(rule, ExponentRule) else ""
    return f"{rule.metric}{more} ({scope})"


def _exponents(rule: ExponentRule, run: Run, scope: Scope) -> Found:
    fits = [fit for fit in run.fits(rule.metric, scope) if len(fit.lengths) >= rule.min_lengths]
    several = f", the worst of {len(fits)} series" if len(fits) > 1 else ""
    candidates = []
    for fit in fits:
        series = f"{named(fit.series['implementation'])} {fit.series['pass']}"
        series += "".join(f" [{text}]" for text in surroundings(fit.series))
        exponent, low, high = fit.exponent, fit.ci_low, fit.ci_high
        if fit.refused and fit.mix is not None:
            series += f": no power, but {fit.mix}"
            growing = 1 - fit.mix.parts[0] / sum(fit.mix.parts)
            exponent, low, high = (growing + part for part in (fit.mix.share, fit.mix.share_low, fit.mix.share_high))
        what = (
            f"{series}: {fit.metric} grows {'there ' if fit.refused else ''}as S^{exponent:.3f} (95 % interval "
            f"{low:.3f} to {high:.3f}, {len(fit.lengths)} lengths {fit.lengths[0]:,} to {fit.lengths[-1]:,}){several}"
        )
        candidates.append(Candidate(exponent, list(fit.point_ids), what, (low, high)))
    return Found(candidates)


def _metrics(rule: MetricRule, run: Run, scope: Scope) -> Found:
    rows = run.of(rule.metric, scope)
    several = f", the worst of {len(rows)} points" if len(rows) > 1 else ""
    candidates = []
    for row in rows:
        value, shown = (abs(row["value"]), "abs(value)") if rule.absolute else (row["value"], "value")
        what = f"{named(row['label'])}: {rule.metric} {readable(row['value'], row['unit'])}{several}"
        query = f"SELECT {shown} FROM v_metrics WHERE {_is_metric(row)}"
        candidates.append(Candidate(value, [row["point_id"]], what, query=query, seq_len=row["seq_len"]))
    unit = rows[0]["unit"] if rows else rule.unit
    return Found(candidates, _lacking(rule, run, {row["point_id"] for row in rows}, scope), unit)


def _ratios(rule: RatioRule, run: Run, scope: Scope) -> Found:
    above, below = rule.numerator, rule.denominator
    bottoms = [row for row in run.of(below.metric, scope, below.where) if row["per_sequence"] > 0]
    tops = run.of(above.metric, scope, above.where) if bottoms else []  # metrics are read on demand
    if not tops:
        return Found([])
    # Both sides of a ratio agree in the columns `same`, and in all kind-specific axes that the rule does not name.
    chosen = {MORE + name for side in (above, below) for name in side.where.axes}
    same = (*rule.same, *({name for row in (*tops, *bottoms) for name in more_columns(row)} - chosen))
    under: dict[tuple, list[Row]] = defaultdict(list)
    for row in bottoms:
        under[tuple(row.get(name) for name in same)].append(row)
    pairs = [(top, bottom) for top in tops for bottom in under[tuple(top.get(name) for name in same)]]
    if above.metric == below.metric and all(top["point_id"] == bottom["point_id"] for top, bottom in pairs):
        pairs = []  # of two patterns that match the same
    refused = ""
    if apart := [pair for pair in pairs if _on_other_texts(run, *pair)]:
        labels = " and ".join(row["label"] for row in apart[0])
        refused = f"{labels} were trained on different texts, as the files changed between them"
        pairs = [pair for pair in pairs if pair not in apart]
    several = f", the worst of {len(pairs)} pairs" if len(pairs) > 1 else ""
    candidates = []
    for top, bottom in pairs:
        ratio = top["per_sequence"] / bottom["per_sequence"]
        points = list(dict.fromkeys([top["point_id"], bottom["point_id"]]))
        other = f" of {named(bottom['label'])}" if len(points) > 1 else ""
        what = f"{named(top['label'])}: {above.metric} {readable(top['per_sequence'])} against "
        what += f"{readable(bottom['per_sequence'])}{other}{several}"
        sides = f"{_is_metric(top, 'a.')} AND {_is_metric(bottom, 'b.')}"
        query = f"SELECT a.per_sequence / b.per_sequence FROM v_metrics a, v_metrics b WHERE {sides}"
        candidates.append(Candidate(ratio, points, what, query=query, seq_len=top["seq_len"]))
    lacking = refused or _lacking(rule, run, {top["point_id"] for top, _ in pairs}, scope, above.where)
    return Found(candidates, lacking, refused=refused)


def _states(rule: StatesRule, run: Run, scope: Scope) -> Found:
    """The number of points in a state that the rule forbids."""
    if not (points := run.in_scope(scope)):
        return Found([], unit="points")
    bad, exceptions = [], {RESULTS_NAME.get(name, name): state for name, state in rule.but.items()}
    for point in points:
        expected = exceptions.get(point["implementation"])
        forbidden = point["state"] in rule.none_of and str(point["reason"]).startswith(rule.because or "")
        if point["state"] != expected if expected else forbidden:
            bad.append(point)
    # Skipped points were not to be measured and do not count; cancelled ones were, so the result stays open.
    due = [point for point in points if point["state"] != PointState.SKIPPED]
    ended = [point for point in due if PointState(point["state"]).ended and point["state"] != PointState.CANCELLED]
    least = max(len(due), rule.min_points)
    states = "otherwise than they should" if rule.but else ", ".join(rule.none_of)
    states += f" by {rule.because}" if rule.because else ""
    what = f"{len(bad)} of {len(points)} points ended {states}"
    if bad:
        why = "reason" if rule.because else "state"
        what += ": " + "; ".join(f"{point['label']} ({point[why]})" for point in bad[:3])
    lacking = "" if bad or len(ended) >= least else f"{len(ended)} of {least} were run to their end"
    is_bad = f"state IN ({', '.join(map(quoted, rule.none_of))})"
    is_bad += f" AND reason LIKE {quoted(f'{rule.because}%')}" if rule.because else ""
    for implementation, state in exceptions.items():
        is_bad = f"CASE implementation WHEN {quoted(implementation)} THEN state <> {quoted(state)} ELSE {is_bad} END"
    evidence = [point["point_id"] for point in bad or ended]
    query = f"SELECT count(*) FROM v_points WHERE point_id IN ({', '.join(map(quoted, evidence))}) AND {is_bad}"
    return Found([Candidate(float(len(bad)), evidence, what, query=query)], lacking, "points")


def _is_metric(row: Row, table: str = "") -> str:
    """SQL that chooses a row of v_metrics."""
    return f"{table}point_id = {quoted(row['point_id'])} AND {table}metric = {quoted(row['metric'])}"


def quoted(text: str) -> str:
    """A text in SQL."""
    return "'" + text.replace("'", "''") + "'"


def _on_other_texts(run: Run, top: Row, bottom: Row) -> bool:
    """Whether two losses are of trainings on different texts, e.g. as files were edited between two points."""
    if not all(row["unit"].startswith("nat/") for row in (top, bottom)):
        return False  # how fast a training is does not depend on what it reads
    texts = [run.texts.get(row["point_id"]) for row in (top, bottom)]
    return None not in texts and len(set(texts)) > 1


def _lacking(rule: MetricRule | RatioRule, run: Run, have: set[str], scope: Scope, *more: Where) -> str:
    """The missing evidence of this run; "" if it is complete."""
    if len(have) < rule.min_points:
        return f"only {len(have)} of at least {rule.min_points} points"
    points = run.in_scope(scope, *more) if rule.every else []
    # A failed point lacks the value, too; only skipped points, which were never to be measured, are left out.
    without = [p for p in points if p["state"] != PointState.SKIPPED and p["point_id"] not in have]
    return f"{len(without)} point(s) lack it, e.g. {without[0]['label']} ({without[0]['state']})" if without else ""
