"""The values in a run that a rule's bound is compared with."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from jobs.schema.axes import MORE, more_columns
from jobs.schema.quantities import readable
from jobs.schema.states import PointState
from orchestrator.judge.analysis import surroundings
from orchestrator.judge.evidence import Run
from orchestrator.judge.rules import ExponentRule, MetricRule, RatioRule
from orchestrator.judge.scope import Row, Scope, Where

BoundedRule = ExponentRule | MetricRule | RatioRule


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


def find(rule: BoundedRule, run: Run, scope: Scope) -> Found:
    """The evidence of a run for a rule."""
    match rule:
        case ExponentRule():
            return _exponents(rule, run, scope)
        case MetricRule():
            return _metrics(rule, run, scope)
        case RatioRule():
            return _ratios(rule, run, scope)


def failures(rule: BoundedRule, run: Run, scope: Scope) -> list[Row]:
    """The failed points of a run that would have been evidence for a rule."""
    sides = (rule.numerator.where, rule.denominator.where) if isinstance(rule, RatioRule) else (rule.where,)
    return list({point["point_id"]: point for side in sides for point in run.failures(scope, side)}.values())


def requirement(rule: BoundedRule, scope: Scope) -> str:
    """The evidence that a rule needs, in words."""
    if isinstance(rule, RatioRule):
        above, below = rule.numerator, rule.denominator
        if above.where == below.where:
            return f"{above.metric} with {below.metric} ({scope})"
        return f"{above.metric} of {above.where} beside {below.metric} of {below.where} ({scope})"
    more = f" at {rule.min_lengths} or more lengths" if isinstance(rule, ExponentRule) else ""
    return f"{rule.metric}{more} ({scope})"


def _exponents(rule: ExponentRule, run: Run, scope: Scope) -> Found:
    fits = [fit for fit in run.fits(rule.metric, scope) if len(fit.lengths) >= rule.min_lengths]
    candidates = []
    for fit in fits:
        series = f"{fit.series['implementation']} {fit.series['pass']}"
        series += "".join(f" [{text}]" for text in surroundings(fit.series))
        exponent, low, high = fit.exponent, fit.ci_low, fit.ci_high
        if fit.refused and fit.mix is not None:
            series += f": no power, but {fit.mix}"
            exponent, low, high = fit.mix.slopes
        what = (
            f"{series}: {fit.metric} grows {'there ' if fit.refused else ''}as S^{exponent:.3f} (95 % interval "
            f"{low:.3f} to {high:.3f}, {len(fit.lengths)} lengths {fit.lengths[0]:,} to {fit.lengths[-1]:,})"
        ) + _of_several(len(fits), "series")
        candidates.append(Candidate(exponent, list(fit.point_ids), what, (low, high)))
    return Found(candidates)


def _metrics(rule: MetricRule, run: Run, scope: Scope) -> Found:
    rows = run.of(rule.metric, scope)
    candidates = []
    for row in rows:
        value, shown = (abs(row["value"]), "abs(value)") if rule.absolute else (row["value"], "value")
        what = f"{row['label']}: {rule.metric} {readable(row['value'], row['unit'])}" + _of_several(len(rows), "points")
        query = f"SELECT {shown} FROM v_metrics WHERE {_is_metric(row)}"
        candidates.append(Candidate(value, [row["point_id"]], what, query=query, seq_len=row["seq_len"]))
    unit = rows[0]["unit"] if rows else rule.unit
    return Found(candidates, _lacking(rule, run, {row["point_id"] for row in rows}, scope), unit)


def _ratios(rule: RatioRule, run: Run, scope: Scope) -> Found:
    above, below = rule.numerator, rule.denominator
    under: dict[tuple, list[Row]] = defaultdict(list)
    for row in run.of(below.metric, scope, below.where):
        if row["per_sequence"] > 0:
            under[_alike(rule, row)].append(row)
    tops = run.of(above.metric, scope, above.where) if under else []  # metrics are read on demand
    pairs = [(top, bottom) for top in tops for bottom in under[_alike(rule, top)]]
    apart = [pair for pair in pairs if _on_other_texts(run, *pair)]
    pairs = [pair for pair in pairs if pair not in apart]
    refused = ""
    if apart:
        labels = " and ".join(row["label"] for row in apart[0])
        refused = f"{labels} were trained on different texts, as the files changed between them"
    candidates = []
    for top, bottom in pairs:
        what = f"{top['label']}: {above.metric} {readable(top['per_sequence'])} against "
        what += readable(bottom["per_sequence"])
        what += "" if top["point_id"] == bottom["point_id"] else f" of {bottom['label']}"
        points = list(dict.fromkeys([top["point_id"], bottom["point_id"]]))
        sides = f"{_is_metric(top, 'a.')} AND {_is_metric(bottom, 'b.')}"
        query = f"SELECT a.per_sequence / b.per_sequence FROM v_metrics a, v_metrics b WHERE {sides}"
        what += _of_several(len(pairs), "pairs")
        ratio = top["per_sequence"] / bottom["per_sequence"]
        candidates.append(Candidate(ratio, points, what, query=query, seq_len=top["seq_len"]))
    lacking = refused or _lacking(rule, run, {top["point_id"] for top, _ in pairs}, scope, above.where)
    return Found(candidates, lacking, refused=refused)


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


def _alike(rule: RatioRule, row: Row) -> tuple:
    """The values in which both sides of a ratio must agree: the columns `same` and all kind-specific axes."""
    named = {MORE + name for side in (rule.numerator, rule.denominator) for name in side.where.axes}
    return tuple(row[name] for name in (*rule.same, *(own for own in more_columns(row) if own not in named)))


def _lacking(rule: MetricRule | RatioRule, run: Run, have: set[str], scope: Scope, *more: Where) -> str:
    """The missing evidence of this run; "" if it is complete."""
    if len(have) < rule.min_points:
        return f"only {len(have)} of at least {rule.min_points} points"
    points = run.in_scope(scope, *more) if rule.every else []
    # A failed point lacks the value, too; only skipped points, which were never to be measured, are left out.
    without = [p for p in points if p["state"] != PointState.SKIPPED and p["point_id"] not in have]
    return f"{len(without)} point(s) lack it, e.g. {without[0]['label']} ({without[0]['state']})" if without else ""


def _of_several(number: int, what: str) -> str:
    return f", the worst of {number} {what}" if number > 1 else ""
