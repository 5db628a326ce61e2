"""Go/no-go rules as data: validated targets from YAML. orchestrator.judge.verdicts evaluates them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, StrictInt, ValidationError, field_validator, model_validator

from jobs.schema.axes import AXES
from jobs.schema.states import FAILED, PointState
from jobs.schema.training_plan import TrainingPlan
from jobs.specs.validation import describe
from jobs.specs.yaml_text import YamlError, read_mapping
from orchestrator.errors import UserError
from orchestrator.judge.scope import ANY, Hardware, Strict, Where, no_common_axis
from orchestrator.settings import SOURCES

DEFAULT_GATES = Path(__file__).with_name("gates.yaml")
READY_SPECS = SOURCES / "jobs" / "configs"
_MOST = 10_000  # points or lengths of a run that a rule may need: with more it would never have evidence
_LONGEST_NAME = 80  # of the columns of the table `verdict`
Name = Annotated[str, Field(min_length=1, max_length=_LONGEST_NAME, pattern=r"^[a-z0-9][a-z0-9-]*$")]
Words = Annotated[str, Field(min_length=1)]
Bound = Annotated[float, Field(strict=True, allow_inf_nan=False)]  # no value violates a bound of NaN
_SHAPE = (*(axis.name for axis in AXES if axis.name not in ("implementation", "batch")), "gpu")


def _check_columns(names: tuple[str, ...]) -> tuple[str, ...]:
    if unknown := sorted(set(names) - {*_SHAPE, "batch", "point_id", "implementation"}):
        raise ValueError(f"unknown column {unknown[0]!r}; use some of {', '.join(_SHAPE)}")
    return names


Same = Annotated[tuple[str, ...], AfterValidator(_check_columns)]


class GatesError(UserError):
    """The rules cannot be used; one line per mistake: field, value, fix."""


class Measure(Strict):
    """The way to missing evidence: a ready spec to submit, or any text."""

    spec: str | None = Field(None, description="file name of a ready spec (jobs/configs)")
    set: tuple[str, ...] = Field((), description="KEY=VALUE to override in it")
    text: Words | None = None

    @model_validator(mode="before")
    @classmethod
    def _or_text(cls, data: Any) -> Any:
        return {"text": data} if isinstance(data, str) else data

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.spec is None) == (self.text is None):
            raise ValueError("give either spec (the file name of a ready spec), or a text")
        if self.set and self.spec is None:
            raise ValueError("set: needs a spec; name one")
        known = sorted(path.name for path in READY_SPECS.glob("*.yaml"))
        if self.spec is not None and self.spec not in known:
            raise ValueError(f"spec: {self.spec!r}: is no ready spec; use one of {', '.join(known)}")
        if wrong := next((each for each in self.set if "=" not in each), None):
            raise ValueError(f"set: {wrong!r}: is not KEY=VALUE; write e.g. lengths=[512,1024]")
        return self

    def at(self, values: Mapping[str, int]) -> Measure:
        """The way with the plan's values instead of their names in braces, as "{seq_len}"."""
        changed = self.set
        for name, value in values.items():
            changed = tuple(each.replace(f"{{{name}}}", str(value)) for each in changed)
        return self.model_copy(update={"set": changed})


class Plan(TrainingPlan):
    """A planned run: its length and mode, beside its steps, tokens a step and hours."""

    seq_len: int | None = Field(None, ge=1)
    mode: Annotated[dict[str, str], AfterValidator(no_common_axis)] = Field({})  # values of the axes of its mode
    parallel: str | None = None  # that on several GPUs

    @model_validator(mode="after")
    def _whole_sequences(self) -> Self:
        if self.seq_len and self.tokens_per_step % self.seq_len:
            raise ValueError(f"tokens_per_step: {self.tokens_per_step}: is no multiple of seq_len {self.seq_len}")
        return self

    def values(self, gpus: int) -> dict[str, int]:
        """Numbers for commands, on so many GPUs; none without a length."""
        if self.seq_len is None:
            return {}
        batch = self.tokens_per_step // self.seq_len
        return {
            "seq_len": self.seq_len,
            "batch": batch,
            "tokens": self.tokens_per_step,
            "micro_batch": max(batch // max(gpus, 1), 1),
            "checkpoint_every": max(1, 4_096_000 // self.tokens_per_step),  # a dozen and more in a soak's piece
        }

    def where(self, names: Iterable[str], gpus: int) -> Where:
        """The filter of points that agree with the plan in `names` (of AtPlan)."""
        mode = self.mode | ({"parallel": self.parallel} if gpus > 1 and self.parallel else {})
        values = self.values(gpus) | {"mode": mode}
        return Where.model_validate({"axes" if name == "mode" else name: values[name] for name in names})


AtPlan = Literal["seq_len", "batch", "mode"]
QUESTIONS = ("right", "feasible", "worth it")
_UNCHANGED: Any = None  # a default alone: in a file, null is no value to change a field to


class Instead(Strict):
    """Lesser evidence that counts as transferred: of points that do not agree with the plan in `without`."""

    what: Words = Field(description="what differs, in words")
    without: tuple[AtPlan, ...] = ()
    where: Where = ANY


class Change(Strict):
    """A rule's differences on one hardware; `where` replaces the fields that it gives."""

    where: Where = ANY
    measure: Measure = _UNCHANGED
    at_most: Bound = _UNCHANGED
    at_least: Bound = _UNCHANGED


class _Rule(Strict):
    """Fields of every rule; `measure` tells how to get missing evidence."""

    rule: Name
    title: Words
    measure: Measure
    where: Where = ANY
    headline: bool = Field(False, description="its figure belongs into a sentence about the target")
    gpus: Literal["all"] | None = Field(None, description="all: measured on all GPUs of the hardware; None: on one")
    min_gpus: StrictInt = Field(0, ge=0, description="the rule is for hardware with that many")
    transfers: bool = Field(False, description="evidence of another card of the same architecture may count")
    per_hardware: dict[str, Change] = Field({}, description="what differs on a hardware, by its name")
    on_several: Change = Field(Change(), description="what differs on several GPUs; per_hardware comes first")
    question: Literal["right", "feasible", "worth it"] | None = Field(None, description="the one that it answers")
    at_plan: tuple[AtPlan, ...] = Field((), description="coordinates in which points agree with the target's plan")
    instead: tuple[Instead, ...] = Field((), description="lesser evidence, in the order of preference")
    says: str | None = Field(None, description="its figure in words, with {value}, {inverse} or {bound}")

    @field_validator("says")
    @classmethod
    def _can_be_filled(cls, says: str | None) -> str | None:
        try:
            (says or "").format(value=1.0, inverse=1.0, bound=1.0)
            return says
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as err:
            raise ValueError(f"{err} cannot be filled in; use {{value}}, {{inverse}} or {{bound}}") from None

    def judged_on(self, hardware: Hardware | None, plan: Plan | None) -> Self:
        """The rule as it is judged on a hardware (None: any machine), for a plan."""
        where, given, gpus = self.where, {}, hardware.gpus if hardware and self.gpus == "all" else 1
        here = self.per_hardware.get(hardware.name) if hardware else None
        for change in filter(None, (self.on_several if gpus > 1 else None, here)):
            given |= {name: getattr(change, name) for name in change.model_fields_set}
            where = where.also(change.where)
        if plan is None:
            return self.model_copy(update=given | {"where": where})
        lesser = []
        for each in self.instead:
            agreed = plan.where(set(self.at_plan) - set(each.without), gpus)
            lesser.append(each.model_copy(update={"where": where.also(agreed).also(each.where)}))
        given |= {"instead": tuple(lesser), "measure": given.get("measure", self.measure).at(plan.values(gpus))}
        return self.model_copy(update=given | {"where": where.also(plan.where(self.at_plan, gpus))})


class _Bounded(_Rule):
    at_most: Bound | None = None
    at_least: Bound | Literal["plan", "seq_len"] | None = Field(None, description="plan: the tok/s that it needs")

    @model_validator(mode="after")
    def _one_bound(self) -> Self:
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError("give either at_most or at_least")
        changes = {f"per_hardware.{name}": change for name, change in self.per_hardware.items()}
        for name, change in {**changes, "on_several": self.on_several}.items():
            if other := sorted(change.model_fields_set & {"at_most", "at_least"} - self.model_fields_set):
                raise ValueError(f"{name}.{other[0]}: is not the bound of this rule; change the one that it has")
        return self

    def bound_for(self, plan: Plan | None) -> tuple[Literal["<=", ">="], float]:
        """How a value is to compare with the bound, and the bound, for a target's plan."""
        if self.at_most is not None:
            return "<=", self.at_most
        assert self.at_least is not None, "one of both is given"
        if not isinstance(self.at_least, str):
            return ">=", self.at_least
        assert plan is not None, "validated with the target"
        return ">=", plan.needed if self.at_least == "plan" else float(plan.seq_len or 0)


class ExponentRule(_Bounded):
    """Bound on the fitted exponent of the matching series; the worst one decides."""

    kind: Literal["exponent"]
    metric: str
    min_lengths: int = Field(3, ge=3, le=_MOST)


class MetricRule(_Bounded):
    """Bound on a metric of the matching points; the worst one decides. `every`: each point must have the metric."""

    kind: Literal["metric"]
    metric: str
    unit: str = Field(max_length=20)
    absolute: bool = False
    proof: str | None = Field(None, description="a point without this metric does not violate the bound")
    every: bool = False
    min_points: int = Field(1, ge=1, le=_MOST)


class Side(Strict):
    """One side of a ratio; times and memory are per sequence (divided by the batch)."""

    metric: str
    where: Where = ANY


class RatioRule(_Bounded):
    """Bound on numerator / denominator over pairs of points equal in the columns `same`; the worst pair decides.

    `every`: each point of the run that the numerator matches must have a pair.
    """

    kind: Literal["ratio"]
    numerator: Side
    denominator: Side
    same: Same = _SHAPE
    every: bool = False
    min_points: int = Field(1, ge=1, le=_MOST)

    @model_validator(mode="after")
    def _of_two(self) -> Self:
        above, below, same = self.numerator, self.denominator, set(self.same)
        asked = [self.where.also(side.where).requested for side in (above, below)]
        if above.metric == below.metric and ("point_id" in same or asked[0] == asked[1]):
            raise ValueError("denominator: is the numerator, so that the ratio is 1; give it another metric or where")
        if apart := [name for name in above.where.apart_in(below.where) if same & {name, "point_id"}]:
            raise ValueError(f"same: no point matches both sides' {apart[0]}, so that there is no pair; leave it out")
        return self


class StatesRule(_Rule):
    """Rule that no matching point is in one of the states `none_of`."""

    kind: Literal["states"]
    none_of: tuple[PointState, ...] = tuple(sorted(FAILED))
    but: dict[str, PointState] = Field({}, description="the state in which points of an implementation are to end")
    because: str | None = Field(None, min_length=1, description="only for reasons that begin so")
    min_points: int = Field(1, ge=1, le=_MOST)

    @model_validator(mode="after")
    def _names_a_failure(self) -> Self:
        if not (FAILED & {*self.none_of} or self.but):
            raise ValueError(
                f"none_of: names no failure, so that all may fail; use some of {', '.join(sorted(FAILED))}"
            )
        return self


_KINDS = ("exponent", "metric", "ratio", "states")
Rule = Annotated[ExponentRule | MetricRule | RatioRule | StatesRule, Field(discriminator="kind")]


class Target(Strict):
    """A decision: GO only if every rule holds; on each of its hardware separately, if it names any."""

    name: Annotated[Name, Field(max_length=_LONGEST_NAME - 41)]  # a verdict's has "/" and its hardware's, too
    title: Words
    plan: Plan | None = None
    crossovers: tuple[str, ...] = Field((), description="the first that has evidence is named in sentences")
    hardware: tuple[str, ...] = ()
    rules: tuple[Rule, ...]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.rules:
            raise ValueError("rules: is empty; without a rule nothing would be decided")
        _check_distinct("rules", (rule.rule for rule in self.rules))
        _check_distinct("hardware", self.hardware)
        if self.plan is None and any(getattr(rule, "at_least", None) == "plan" for rule in self.rules):
            raise ValueError("at_least: 'plan' needs a plan; add steps, tokens_per_step and hours to the target")
        of_plan = [rule.rule for rule in self.rules if rule.at_plan or getattr(rule, "at_least", None) == "seq_len"]
        if of_plan and (self.plan is None or self.plan.seq_len is None):
            raise ValueError(f"rules.{of_plan[0]}: needs a plan with seq_len; add both to the target")
        for rule in self.rules:
            of_hardware = {name: getattr(rule, name) for name in ("gpus", "min_gpus", "transfers", "per_hardware")}
            of_hardware["on_several"] = rule.on_several.model_fields_set
            if not self.hardware and (given := [name for name, value in of_hardware.items() if value]):
                raise ValueError(f"rules.{rule.rule}.{given[0]}: needs a target with hardware; add hardware")
            if unknown := sorted(rule.per_hardware.keys() - set(self.hardware)):
                where = f"rules.{rule.rule}.per_hardware"
                raise ValueError(f"{where}: {unknown[0]!r} is not hardware of this target; add it there")
        return self

    def rules_on(self, hardware: Hardware | None) -> list[Rule]:
        """The rules that are judged on a hardware, as they are judged there; None: on any machine."""
        gpus = hardware.gpus if hardware else 0
        return [rule.judged_on(hardware, self.plan) for rule in self.rules if gpus >= rule.min_gpus or not hardware]


class Crossover(Strict):
    """A workload, and the length from which on NSA takes less time than dense attention: the ratio falls below 1."""

    name: str = Field(min_length=1, max_length=_LONGEST_NAME)
    title: Words
    where: Where = ANY
    numerator: Side
    denominator: Side
    same: Same = _SHAPE


class Gates(Strict):
    """The rules of all targets, and the hardware that they are about."""

    hardware: tuple[Hardware, ...] = ()
    crossovers: tuple[Crossover, ...] = ()
    targets: tuple[Target, ...]

    @model_validator(mode="before")
    @classmethod
    def _share_rules(cls, data: Any) -> Any:
        """A target whose `rules` are the name of another has the same."""
        targets = data.get("targets") if isinstance(data, dict) else None
        if not isinstance(targets, list) or not all(isinstance(each, dict) for each in targets):
            return data
        named = {str(each.get("name")): each.get("rules") for each in targets}
        rules = [{"rules": named.get(str(each["rules"]), each["rules"])} if "rules" in each else {} for each in targets]
        return data | {"targets": [each | shared for each, shared in zip(targets, rules, strict=True)]}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.targets:
            raise ValueError("targets: is empty; add one")
        _check_distinct("targets", (target.name for target in self.targets))
        _check_distinct("hardware", (each.name for each in self.hardware))
        for target in self.targets:
            for field, known in (("crossovers", self.crossovers), ("hardware", self.hardware)):
                if unknown := sorted(set(getattr(target, field)) - {each.name for each in known}):
                    where = f"targets.{target.name}.{field}"
                    raise ValueError(f"{where}: {unknown[0]!r} is unknown; describe it in the file's {field}")
            for hardware in filter(None, self.of(target)):
                if not target.rules_on(hardware):
                    raise ValueError(f"targets.{target.name}.rules: none is for {hardware.name}; lower a min_gpus")
        return self

    def of(self, target: Target) -> list[Hardware | None]:
        """The hardware that a target is judged on; [None] if it names none."""
        known = {each.name: each for each in self.hardware}
        return [known[name] for name in target.hardware] or [None]

    def on(self, machine: str | None) -> Gates:
        """The rules of the targets that are judged on a hardware, on it alone; None: on all. Raises GatesError."""
        if machine is None:
            return self
        on_it = {"hardware": (machine,)}
        if targets := tuple(each.model_copy(update=on_it) for each in self.targets if machine in each.hardware):
            return self.model_copy(update={"targets": targets})
        known = sorted({name for target in self.targets for name in target.hardware})
        raise GatesError(f"--on: {machine!r}: no target is judged on it; use one of {', '.join(known)}")

    def only(self, requested: str | None) -> Gates:
        """The rules of one target, on one hardware if it is TARGET/HARDWARE; None: all targets. Raises GatesError."""
        if requested is None:
            return self
        name, slash, hardware = requested.partition("/")
        for target in self.targets:
            if target.name == name and (hardware in target.hardware or not slash):
                chosen = target.model_copy(update={"hardware": (hardware,)} if hardware else {})
                return self.model_copy(update={"targets": (chosen,)})
        verdicts = ([each.name, *(f"{each.name}/{machine}" for machine in each.hardware)] for each in self.targets)
        raise GatesError(f"target: {requested!r} is unknown; use one of {', '.join(chain(*verdicts))}")


def _check_distinct(field: str, names: Iterable[str]) -> None:
    for name, number in Counter(names).items():
        if number > 1:
            raise ValueError(f"{field}: {name!r} comes twice; remove one, or give it another name")


def load_gates(path: Path | None = None) -> Gates:
    """The rules at `path`, read again when it changed; None: the default gates.yaml. Raises GatesError."""
    path, changed = path or DEFAULT_GATES, None
    with suppress(OSError):  # read_mapping says what is wrong
        stat = path.stat()
        changed = stat.st_mtime_ns, stat.st_size
    return _gates_in(path, changed)


@lru_cache(maxsize=4)
def _gates_in(path: Path, changed: Any) -> Gates:  # `changed` is the cache's key only
    data = None
    try:
        data = read_mapping(path, "gates", "targets:")
        return Gates.model_validate(data)
    except YamlError as err:
        raise GatesError(str(err)) from None
    except ValidationError as err:
        raise GatesError("\n".join(describe(err, data, "gates", _KINDS))) from None
