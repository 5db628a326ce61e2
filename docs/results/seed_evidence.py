"""Evidence for the pages of the seeds' reports: stored points by spec and coordinates, the newest run first.

What no stored run has is "not measured", with the spec that would measure it.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from seed_commands import needed, setting, whole
from tables import CONFIGS, commits, device, number, rate

from jobs.schema.axes import AXES, MORE
from jobs.schema.states import Origin, PointState
from jobs.specs.load import load_spec
from jobs.specs.spec import JobSpec
from orchestrator.judge.analysis import Fit, scaling_fits
from orchestrator.store import Store, queries

Row = Mapping[str, Any]
Figure = tuple[str, str]  # a metric's name and unit

_COLUMNS = {axis.name for axis in AXES}
_OPEN = (PointState.PENDING, PointState.RUNNING, PointState.CANCELLED, PointState.LOST)
_LINEAR, _QUADRATIC = 1.25, 1.7  # exponents up to which, and from which on, a growth is called so


@dataclass(frozen=True)
class Spec:
    """A ready spec, with the settings to override in it."""

    file: str
    settings: tuple[str, ...] = ()

    @cached_property
    def asked(self) -> dict[str, Any]:
        """The spec with its settings, as a run of it would keep it."""
        return self._with([]).model_dump(mode="json")

    def _with(self, settings: Iterable[str]) -> JobSpec:
        return load_spec(CONFIGS / self.file, (*self.settings, *settings))

    @property
    def name(self) -> str:
        return self.asked["name"]

    @property
    def title(self) -> str:
        """The file and the settings, on one line."""
        return " ".join([self.file, *self.settings])

    def command(self, run: Row | None) -> str:
        """The command that submits what a run ran; without one, the spec with its settings."""
        differing = self._differing(run["spec"]) if run else []
        sets = [f"--set {shlex.quote(each)}" for each in (*self.settings, *differing)]
        return " ".join(["nsa submit", f"jobs/configs/{self.file}", *sets])

    def _differing(self, ran: Row) -> list[str]:
        """Settings in which a run differs from this spec with its settings."""
        kind = type(self._with([]))
        return needed(lambda settings: whole(self._with(settings).model_dump(mode="json"), kind), whole(ran, kind))

    def matches(self, run: Row) -> bool:
        """Whether a run of the file was submitted with these settings."""
        names = (each.partition("=")[0] for each in self.settings)
        return all(setting(run["spec"], name) == setting(self.asked, name) for name in names)

    @property
    def not_measured(self) -> str:
        return f"not measured: `{self.title}`"


class Evidence:
    """Points and values of stored runs.

    Args:
        runs: rows of `queries.run` of our own runs, oldest first; the newest that has a point is its evidence.
    """

    def __init__(self, store: Store, runs: Sequence[Row]) -> None:
        self.store = store
        self.runs = list(reversed(runs))
        ids = [run["run_id"] for run in self.runs]
        self._points = {run_id: [] for run_id in ids}
        for row in queries.states(store, run_ids=ids).to_dict("records"):
            self._points[row["run_id"]].append(row)
        self._values: dict[str, dict[str, float]] = {}
        self._fitted: dict[str, list[Fit]] = {}
        reported = queries.measurements(store, origin=Origin.REPORTED)
        for frame in (queries.measurements(store, run_ids=ids), reported):
            for point_id, metric, value in zip(frame["point_id"], frame["metric"], frame["value"], strict=True):
                self._values.setdefault(point_id, {})[metric] = value
        self._reported = queries.states(store, origin=Origin.REPORTED).to_dict("records")

    def of(self, spec: Spec) -> list[Row]:
        """The runs of a spec with its settings, newest first; those of `VARIANTS` count as theirs alone."""
        others = [each for each in VARIANTS if each.file == spec.file and each != spec]
        own = [run for run in self.runs if run["name"] == spec.name and spec.matches(run)]
        return [run for run in own if spec in VARIANTS or not any(other.matches(run) for other in others)]

    def at_commit(self, commit: str) -> Evidence:
        """The evidence of one commit's runs alone."""
        return Evidence(self.store, [run for run in reversed(self.runs) if run["git_commit"] == commit])

    def points(self, spec: Spec, **axes: object) -> list[Row]:
        """Ended points with these coordinates, of the newest run that has some.

        `env` and `python` are the usual ones unless given; `ANY` is any value.
        """
        for run in self.of(spec):
            rows = [row for row in self._points[run["run_id"]] if row["state"] not in _OPEN]
            if found := [row for row in rows if _matches(row, {"env": None, "python": None, **axes})]:
                return found
        return []

    def value(self, spec: Spec, metric: str, **axes: object) -> float | None:
        """A metric of the only point with these coordinates; None if it is not ok or has none."""
        found = self.points(spec, **axes)
        return self._values.get(found[0]["point_id"], {}).get(metric) if found else None

    def cell(self, spec: Spec, *figures: Figure, **axes: object) -> str:
        """A point's figures with units, its state if it has failed, or the spec that would measure it."""
        found = self.points(spec, **axes)
        if not found:
            return spec.not_measured
        if found[0]["state"] != PointState.OK:
            return str(found[0]["state"])
        values = self._values.get(found[0]["point_id"], {})
        told = [shown(values[metric], unit) for metric, unit in figures if metric in values]
        return ", ".join(told) if told else spec.not_measured

    def states(self, spec: Spec, **axes: object) -> str:
        """The number of points by state, as "3 ok, 1 oom"; or the spec that would measure them."""
        found = self.points(spec, **axes)
        return tally(found) if found else spec.not_measured

    def state(self, spec: Spec, **axes: object) -> str:
        """The state of the only point with these coordinates, or the spec that would measure it."""
        found = self.points(spec, **axes)
        return str(found[0]["state"]) if found else spec.not_measured

    def samples(self, spec: Spec, metric: str, **axes: object) -> list[float]:
        """The samples of a metric of the first point with these coordinates; [] without any."""
        for row in self.points(spec, **axes)[:1]:
            kept = queries.metrics(self.store, row["point_id"]).to_dict("records")
            return [float(x) for each in kept if each["name"] == metric for x in each["samples"] or ()]
        return []

    def mode(self, spec: Spec, **axes: object) -> str:
        """The cards and the mode of the first point with these coordinates; "" without one."""
        config, card = self.config(spec, **axes), self.card(spec, **axes)
        if not config:
            return ""
        count = (config.get("ranks") or {}).get("ranks", 1)
        told = [f"{count} × {card}" if count > 1 else card, "compiled" if config.get("compile") else "eager"]
        told += ["CUDA graphs"] * bool(config.get("cuda_graphs"))
        told += ["checkpointing"] * bool(config.get("model", {}).get("checkpointing"))
        return ", ".join(told)

    def card(self, spec: Spec, **axes: object) -> str:
        """The card of the first point with these coordinates, as "H100"; "CPU" without one, "" without a point."""
        if not self.points(spec, **axes):
            return ""
        name = self.environment(spec, **axes).get("gpu", {}).get("name")
        return str(name).removeprefix("NVIDIA ").split()[0] if name else "CPU"

    def beside(
        self, spec: Spec, told: str = "times are of a shared card, memory is each one's own", own: int = 1
    ) -> str:
        """A sentence on other processes on the card while a run's points were measured; "" if there were none.

        Args:
            told: what that means.
            own: processes of a point's own on the card.
        """
        points = self.points(spec, env=ANY, python=ANY)
        counts = [self._values.get(row["point_id"], {}).get("gpu_processes", 1) for row in points]
        shared = [count for count in counts if count > own]
        if not shared:
            return ""
        return (
            f"Of the {len(points)} points of `{spec.file}`, {len(shared)} ran while other processes used the card, up "
            f"to {max(shared):.0f} in all (`gpu_processes`): {told}."
        )

    def environment(self, spec: Spec, **axes: object) -> Mapping[str, Any]:
        """The environment of the first point with these coordinates; {} without one."""
        for row in self.points(spec, **axes):
            if found := (queries.point(self.store, row["point_id"]) or {})["environment"]:
                return found
        return {}

    def route(self, spec: Spec, **axes: object) -> Mapping[str, str]:
        """The kernels of the first point with these coordinates; {} without one."""
        found = self.points(spec, **axes)
        return (queries.point(self.store, found[0]["point_id"]) or {}).get("route") or {} if found else {}

    def warnings(self, spec: Spec) -> list[str]:
        """The messages of a spec's newest run."""
        runs = self.of(spec)
        return [str(text) for text in queries.events(self.store, runs[0]["run_id"])["message"]] if runs else []

    def fit(self, spec: Spec, metric: str, implementation: str, pass_: str) -> Fit | None:
        """The growth of a metric in a spec's newest run."""
        runs = self.of(spec)
        fits = self._fits(runs[0]["run_id"]) if runs else []
        wanted = (metric, implementation, pass_)
        series = ((fit, (fit.metric, fit.series["implementation"], fit.series["pass"])) for fit in fits)
        return next((fit for fit, name in series if name == wanted), None)

    def _fits(self, run_id: str) -> list[Fit]:
        """All fits of a run, made once."""
        if run_id not in self._fitted:
            self._fitted[run_id] = scaling_fits(queries.scaling(self.store, run_ids=[run_id]))
        return self._fitted[run_id]

    def growth(self, spec: Spec, metric: str, implementation: str, pass_: str) -> str:
        """A fitted exponent with its interval, in words; or the spec that would measure it."""
        fit = self.fit(spec, metric, implementation, pass_)
        if fit is None:
            return spec.not_measured
        word = "at most linear" if fit.exponent <= _LINEAR else "quadratic" if fit.exponent >= _QUADRATIC else "between"
        return f"S^{fit.exponent:.2f} ({fit.ci_low:.2f} to {fit.ci_high:.2f}): {word}"

    def seed(self, report: str, figure: Figure, size: str, variant: str = "") -> str:
        """A figure of a seed's report by its label, "forward 12 layers dim 768 S=128"; "" if it has none."""
        name = f"nsa-vibe{f' ({variant})' if variant else ''} {size}"
        for row in self._reported:
            label = str(row["label"])
            if row["run_name"] == f"report {report}" and (label == name or label.startswith(f"{name} (")):
                value = self._values.get(row["point_id"], {}).get(figure[0])
                if row["state"] != PointState.OK:
                    return str(row["state"])
                if value is not None:
                    return shown(value, figure[1])
        return ""

    def seed_point(self, report: str, size: str) -> Row | None:
        """A reported point by the beginning of its label."""
        named = (row for row in self._reported if row["run_name"] == f"report {report}")
        return next((row for row in named if str(row["label"]).startswith(f"nsa-vibe {size}")), None)

    def notes(self, report: str, word: str) -> str:
        """Notes of a seed's report that hold a word."""
        stored = {row["run_id"] for row in self._reported if row["run_name"] == f"report {report}"}
        notes = [note for run_id in stored for note in (queries.run(self.store, run_id) or {})["spec"]["notes"]]
        return "; ".join(note for note in notes if word in note)

    def config(self, spec: Spec, **axes: object) -> Mapping[str, Any]:
        """The configuration of the first point with these coordinates; {} without one."""
        found = self.points(spec, **axes)
        return (queries.point(self.store, found[0]["point_id"]) or {})["config"] if found else {}

    def sources(self, specs: Iterable[Spec]) -> list[list[str]]:
        """A row each spec: the command of its newest run, and that run with state, device, points and commit."""
        rows = []
        for spec in specs:
            runs = self.of(spec)
            run = runs[0] if runs else None
            told = ["not run yet", "", "", ""]
            if run:
                told = [f"{run['run_id']} ({run['state']})", device(run), tally(self._points[run["run_id"]])]
                told.append(commits([dict(run)]))
            rows.append([f"`{spec.command(run)}`", *told])
        return rows


ANY = object()
"""Any value of a coordinate, or none."""


def _matches(row: Row, axes: Mapping[str, object]) -> bool:
    for name, wanted in axes.items():
        key = name.rstrip("_")
        value = row.get(key if key in _COLUMNS or key == "label" else MORE + key)
        none = value is None or value != value  # NaN
        if wanted is ANY or (wanted is None and none):
            continue
        if none or value != wanted:
            return False
    return True


def together(told: Mapping[str, str]) -> str:
    """Texts with their titles, or one without if all are equal."""
    first = next(iter(told.values()))
    same = all(text == first for text in told.values())
    return first if same else "; ".join(f"{title}: {text}" for title, text in told.items())


def tally(points: Iterable[Row]) -> str:
    """The number of points by state, the most first."""
    counts = Counter(str(row["state"]) for row in points)
    return ", ".join(
        f"{count} {state}" for state, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    )


def shown(value: float, unit: str) -> str:
    """A value with its unit, as long as its precision is worth."""
    match unit:
        case "token":
            return f"{value:,.0f} tokens"
        case "MiB":
            text = f"{math.floor(value + 0.5):,}"  # half up, as the reports do
        case "tok/s":
            text = rate(value)
        case "J/tok":
            text = f"{value:.3g}"
        case "%":
            text = f"{value:.1f}"
        case "1":
            return f"{value:g}"
        case _:
            text = number(value)
    return f"{text} {unit}"


MATRIX = Spec("backward_m7c.yaml")
SEARCH = Spec("backward_bisect_m7c.yaml")
HANG = Spec("backward_hang.yaml")
BRANCHES = Spec("branches_m7c.yaml")
CAPACITY = Spec("capacity_m7c.yaml")
DIAGNOSE = Spec("diagnose_m7c.yaml")
DIAGNOSE_1GPU = Spec("diagnose_m7c.yaml", ("ranks=1",))
ESTIMATE = Spec("estimate_m7c.yaml")
PROFILE = Spec("profile_m7c.yaml")
SCALING = Spec("scaling_m7c.yaml")
SOAK = Spec("soak_m7c.yaml")
SOAK_2GPU = Spec("soak_m7c.yaml", ("ranks=2", "parallel=replicate"))
PASSES = Spec("profile_m7c.yaml", ("lengths=[128,512,1024,2048]", "batch=1", "implementations=[triton,naive,dense]"))
TRAIN = Spec("train_m7c.yaml")
TRAIN_2GPU = Spec("train_2gpu.yaml")
TRAIN_SHORT = Spec("train_m7c.yaml", ("seq_len=512",))
TRAIN_1GPU = Spec("train_2gpu.yaml", ("ranks=1", "resources.num_gpus=1", "micro_batch=2", "bucket_mb=null"))
TRAIN_2GPU_LARGER = Spec("train_2gpu.yaml", ("batch=4", "micro_batch=2", "parallel=ddp"))  # the same load of each GPU
TRAIN_REPLICATED = Spec("train_2gpu.yaml", ("parallel=replicate", "bucket_mb=null"))
TRAIN_2GPU_REPLICATED = Spec("train_2gpu.yaml", ("batch=4", "micro_batch=2", *TRAIN_REPLICATED.settings))
TRAIN_SHARDED = Spec("train_2gpu.yaml", ("parallel=fsdp", "bucket_mb=null", "cuda_graphs=false"))
TRAIN_COMPRESSED = Spec("train_2gpu.yaml", ("gradient_compression=bf16", "bucket_mb=100"))
VARIANTS = (
    *(PASSES, SOAK_2GPU, TRAIN_SHORT, TRAIN_COMPRESSED, TRAIN_1GPU, TRAIN_2GPU_LARGER, TRAIN_2GPU_REPLICATED),
    *(TRAIN_REPLICATED, TRAIN_SHARDED, DIAGNOSE_1GPU),
)
"""Specs with settings whose runs are no evidence for the spec without them."""

TIME, THROUGHPUT, ENERGY = ("time", "ms"), ("throughput", "tok/s"), ("energy_per_token", "J/tok")
FORWARD_MEMORY, PEAK, EXTRA = ("forward_memory", "MiB"), ("peak_memory", "MiB"), ("peak_extra_memory", "MiB")
RESERVED, DRIVER = ("peak_reserved", "MiB"), ("peak_driver", "MiB")

WAYS = {"triton": "our kernels", "naive": "masked, S²"}
"""The implementations of kind backward's matrix, as columns."""


def matrix_axes(
    preset: str, layers: int, seq_len: int, branch: str = "all", repeats: int = 1, anomaly: str = "off"
) -> dict[str, Any]:
    """Coordinates of a point of backward_m7c.yaml, without the implementation."""
    size = {"preset": preset, "layers": layers, "seq_len": seq_len}
    return {**size, "branch": branch, "repeats": repeats, "anomaly": anomaly}
