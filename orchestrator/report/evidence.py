"""Evidence for templates: the stored points and values of a ready spec, the newest run first.

What no stored run has is "not measured", with the spec that would measure it.
"""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property
from typing import Any

import yaml
from markupsafe import Markup
from pydantic_core import to_jsonable_python

from jobs.schema.axes import AXES, MORE, RESULTS_NAME
from jobs.schema.quantities import readable
from jobs.schema.states import PointState
from orchestrator.judge.analysis import scaling_fits
from orchestrator.judge.decisions import Decision, decisions
from orchestrator.judge.rules import load_gates
from orchestrator.judge.verdicts import evaluate
from orchestrator.settings import load_settings
from orchestrator.store import Store, queries

Row = Mapping[Any, Any]
LoadSpec = Callable[[str, Sequence[str]], Any]  # reads a ready spec by its file's name, with settings. Raises UserError
ANY = object()  # any value of an axis, or none
_COLUMNS = {axis.name for axis in AXES} | {"label", "backend"}
_OPEN = (PointState.PENDING, PointState.RUNNING, PointState.CANCELLED, PointState.LOST)
_LINEAR, _QUADRATIC = 1.25, 1.7  # exponents up to which, and from which on, a growth is called so


class Evidence:
    """Points and values of stored runs, given newest first, each read once."""

    def __init__(self, store: Store, run_ids: Sequence[str], load: LoadSpec) -> None:
        self.store = store
        self.load = cache(load)
        self.runs = [run for run_id in run_ids if (run := queries.run(store, run_id)) is not None]
        self.points = cache(lambda run_id: queries.states(store, run_ids=[run_id]).to_dict("records"))
        self.fits = cache(lambda run_id: scaling_fits(queries.scaling(store, run_ids=[run_id])))
        self._measured: dict[str, dict[str, dict[str, tuple[float, str]]]] = {}

    def values(self, row: Row) -> Mapping[str, tuple[float, str]]:
        """A point's metrics: value and unit by name."""
        if row["run_id"] not in self._measured:
            points = self._measured[row["run_id"]] = defaultdict(dict)
            for each in queries.measurements(self.store, run_ids=[row["run_id"]]).to_dict("records"):
                points[each["point_id"]][each["metric"]] = each["value"], each["unit"]
        return self._measured[row["run_id"]][row["point_id"]]

    @cached_property
    def decisions(self) -> list[Decision]:
        """The decisions on these runs by the rules of the settings."""
        gates = load_gates(load_settings().gates)
        return decisions(gates, evaluate(self.store, gates, [run["run_id"] for run in self.runs]))


class Spec:
    """A ready spec with settings, and what its stored runs say."""

    def __init__(
        self, evidence: Evidence, file: str, *settings: str, without: Sequence[str] = (), commit: str = ""
    ) -> None:
        """Find the runs (of this commit) that were submitted with these settings, and not with one of `without`."""
        self._evidence = evidence
        self._without = without
        self.file = file
        self.settings = settings
        self.title = " ".join([file, *settings])
        self.not_measured = Markup("not measured: `{}`").format(self.title)
        # A setting that a stored spec leaves out had its default.
        fields = type(evidence.load(file, ())).model_fields
        optional = {name: field for name, field in fields.items() if not field.is_required()}
        defaults = {name: field.get_default(call_default_factory=True) for name, field in optional.items()}
        self._defaults = to_jsonable_python(defaults)
        self._ready = self._defaults | evidence.load(file, settings).model_dump(mode="json")
        wanted = {name: _setting(self._ready, name) for name in (each.partition("=")[0] for each in settings)}
        refused = [(name, yaml.safe_load(value)) for name, _, value in (each.partition("=") for each in without)]
        self.runs: list[Row] = []  # newest first
        for run in evidence.runs:
            ran = self._defaults | run["spec"]
            asked = all(_setting(ran, name) == value for name, value in wanted.items())
            other = any(_setting(ran, name) == value for name, value in refused)
            if run["name"] == self._ready["name"] and asked and not other and commit in ("", run["git_commit"]):
                self.runs.append(run)
        self.newest = self.runs[0] if self.runs else None
        self.all_points = evidence.points(self.newest["run_id"]) if self.newest else []

    def at_commit(self, commit: str) -> Spec:
        """The same spec with its runs of one commit alone."""
        return Spec(self._evidence, self.file, *self.settings, without=self._without, commit=commit)

    def points(self, **axes: object) -> list[Row]:
        """Ended points with these axes, of the newest run that has some; `env` and `python` are the usual ones."""
        for run in self.runs:
            rows: list[Row] = [row for row in self._evidence.points(run["run_id"]) if row["state"] not in _OPEN]
            if found := [row for row in rows if _matches(row, {"env": None, "python": None, **axes})]:
                return found
        return []

    def value(self, metric: str, **axes: object) -> float | None:
        """A metric of the first point with these axes; None if it is not ok or has none."""
        found = self.points(**axes)
        return self._evidence.values(found[0]).get(metric, (None,))[0] if found else None

    def cell(self, *metrics: str, **axes: object) -> str:
        """A point's metrics with units, its state if it failed, or the spec that would measure it."""
        found = self.points(**axes)
        if not found:
            return self.not_measured
        if found[0]["state"] != PointState.OK:
            return str(found[0]["state"])
        values = self._evidence.values(found[0])
        return ", ".join(readable(*values[name]) for name in metrics if name in values) or self.not_measured

    def state(self, **axes: object) -> str:
        """The state of the first point with these axes, or the spec that would measure it."""
        found = self.points(**axes)
        return str(found[0]["state"]) if found else self.not_measured

    def states(self, **axes: object) -> str:
        """The number of points by state, as "3 ok, 1 oom"; or the spec that would measure them."""
        found = self.points(**axes)
        return tally(found) if found else self.not_measured

    def samples(self, metric: str, **axes: object) -> list[float]:
        """The samples of a metric of the first point with these axes."""
        found = self.points(**axes)
        rows = queries.metrics(self._evidence.store, found[0]["point_id"]).to_dict("records") if found else []
        return [float(each) for row in rows if row["name"] == metric for each in row["samples"] or ()]

    def details(self, **axes: object) -> Mapping[str, Any]:
        """Configuration, environment and route of the first point with these axes that has an environment."""
        for row in self.points(**axes):
            if (found := queries.point(self._evidence.store, row["point_id"])) and found["environment"]:
                return found
        return {"config": {}, "environment": {}, "route": {}}

    def card(self, **axes: object) -> str:
        """The card of the first point with these axes, as "H100"; "CPU" without one, "" without a point."""
        if not self.points(**axes):
            return ""
        name = self.details(**axes)["environment"].get("gpu", {}).get("name")
        return str(name).removeprefix("NVIDIA ").split()[0] if name else "CPU"

    def mode(self, **axes: object) -> str:
        """Cards and mode of the first point with these axes: "2 × H100, compiled, CUDA graphs"; "" without one."""
        config, card = self.details(**axes)["config"], self.card(**axes)
        if not config:
            return ""
        layout = config.get("layout") or config.get("ranks") or {}  # runs before 0.2.0 have it as `ranks`
        count = layout.get("ranks", 1)
        words = [f"{count} × {card}" if count > 1 else card, "compiled" if config.get("compile") else "eager"]
        words += ["CUDA graphs"] * bool(config.get("cuda_graphs"))
        words += ["checkpointing"] * bool(config.get("model", {}).get("checkpointing"))
        return ", ".join(words)

    def beside(self, meaning: str = "times are of a shared card, memory is each one's own", own: int = 1) -> str:
        """A sentence on other processes that used the card; "" if none did. `own`: processes of a point itself."""
        points = self.points(env=ANY, python=ANY)
        counts = [self._evidence.values(row).get("gpu_processes", (1,))[0] for row in points]
        shared = [count for count in counts if count > own]
        if not shared:
            return ""
        return Markup(
            f"Of the {len(points)} points of `{self.file}`, {len(shared)} ran while other processes used the card, up "
            f"to {max(shared):.0f} in all (`gpu_processes`): {meaning}."
        )

    def warnings(self) -> list[str]:
        """The messages of the newest run."""
        run = self.newest
        return [str(text) for text in queries.events(self._evidence.store, run["run_id"])["message"]] if run else []

    def growth(self, metric: str, implementation: str, pass_: str) -> str:
        """A fitted growth, in words; or the spec that would measure it."""
        run, implementation = self.newest, RESULTS_NAME.get(implementation, implementation)
        for fit in self._evidence.fits(run["run_id"]) if run else ():
            if (fit.metric, fit.series["implementation"], fit.series["pass"]) == (metric, implementation, pass_):
                if fit.refused:
                    return str(fit)
                linear = "at most linear" if fit.exponent <= _LINEAR else "between"
                word = "quadratic" if fit.exponent >= _QUADRATIC else linear
                return f"{fit}: {word}"
        return self.not_measured

    @property
    def command(self) -> str:
        """The command that submits what the newest run ran; without one, the spec with its settings."""
        settings = list(self.settings)
        if self.newest:
            ran = self._defaults | self.newest["spec"]
            differing = changes(self._ready, ran)
            for each in reversed(differing):  # without those that follow from the others
                others = [other for other in differing if other != each]
                with suppress(ValueError):  # a SpecError: without it the others do not go together
                    spec = self._evidence.load(self.file, (*self.settings, *others)).model_dump(mode="json")
                    differing = differing if changes(self._defaults | spec, ran) else others
            settings += differing
        return " ".join(
            ["nsa submit", f"jobs/configs/{self.file}", *(f"--set {shlex.quote(each)}" for each in settings)]
        )


def changes(ready: Row, ran: Row) -> list[str]:
    """Settings of `ran` that differ from those of `ready`, as "section.key=value", without keys that it lacks."""
    found = []
    for name, value in ran.items():
        usual = ready.get(name)
        if name in ready and _agree(usual, value):
            continue
        if isinstance(value, Mapping) and isinstance(usual, Mapping):
            found += [f"{name}.{each}" for each in changes(usual, value)]
        else:
            text = yaml.safe_dump(_shortest(value), default_flow_style=True, sort_keys=False, width=2**20)
            found.append(name + "=" + text.removesuffix("...\n").strip())
    return found


def _agree(ready: Any, ran: Any) -> bool:
    """Whether values are equal but for keys that the stored one lacks: it is older than they are."""
    if isinstance(ready, Mapping) and isinstance(ran, Mapping):
        return all(_agree(ready.get(name), value) for name, value in ran.items())
    if isinstance(ready, list) and isinstance(ran, list):
        return len(ready) == len(ran) and all(map(_agree, ready, ran))
    return ready == ran


def tally(points: Iterable[Row]) -> str:
    """The number of points by state, the most first."""
    counts = Counter(str(row["state"]) for row in points)
    return ", ".join(f"{count} {state}" for state, count in sorted(counts.items(), key=lambda item: (-item[1], item)))


def device(run: Row) -> str:
    """The cards of a run, as "2 × NVIDIA H100"; "CPU" without any."""
    count = int((run["spec"].get("resources") or {}).get("num_gpus") or 1)
    return f"{count} × {run['gpu']}" if run["gpu"] and count > 1 else run["gpu"] or "CPU"


def _matches(row: Row, axes: Mapping[str, object]) -> bool:
    for name, wanted in axes.items():
        if name == "implementation" and wanted == row["backend"]:
            continue
        value = row.get(name if name in _COLUMNS else MORE + name)
        none = value is None or value != value  # NaN
        if wanted is ANY or (wanted is None and none):
            continue
        if none or value != wanted:
            return False
    return True


def _setting(spec: Row, name: str) -> Any:
    """A setting by its name, "resources.num_gpus"; None if the spec leaves it out."""
    node: Any = spec
    for part in name.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _shortest(value: Any) -> Any:
    """The value with whole numbers instead of floats that are whole."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_shortest(each) for each in value]
    return {name: _shortest(each) for name, each in value.items()} if isinstance(value, dict) else value
