"""The pages of the seeds' reports take up what is stored, and name the spec that would measure what is not."""

import re
import shlex
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from made_up_runs import attempt

from jobs.schema.point import Machine, Point
from jobs.schema.states import Origin, PointState, RunState
from jobs.specs.kinds import axes_of, kind_module
from jobs.specs.load import load_spec
from jobs.specs.spec import JobSpec
from orchestrator.judge.rules import READY_SPECS
from orchestrator.report.template import render
from orchestrator.store import Store, importer, queries, upgrade
from orchestrator.store import records as rec

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = ROOT / "docs" / "results" / "templates" / "seeds"
H200 = Machine("cuda", "NVIDIA H200", 140 * 2**30)
T0 = datetime(2026, 11, 24, tzinfo=UTC)
ENVIRONMENT = {
    "packages": {"torch": "2.99"}, "python": "3.12", "gpu": {"name": H200.name, "driver": "1", "memory_mib": "2"},
    "variables": {"NSA_X": "1"}, "training": {"parameters": 5},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """No page shows what memory a point is predicted to take, which is seconds of work."""
    monkeypatch.setattr("jobs.measure.call.ModelCase.predicted_bytes", lambda self: None)


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> str:
    """URL of a database with the figures of the reports alone."""
    url = f"sqlite:///{tmp_path_factory.mktemp('seeds') / 'nsa.db'}"
    upgrade(url)
    with Store.open(url) as store:
        importer.import_file(store, ROOT / "orchestrator" / "reference_data" / "seed_measurements.csv")
    return url


def ready(file: str, settings: Sequence[str]) -> JobSpec:
    return load_spec(READY_SPECS / file, settings)


def filled(url: str, *pages: str) -> dict[str, str]:
    """Pages by name, from what is stored there."""
    with Store.open(url, readonly=True) as store:
        run_ids = list(queries.run_ids(store, origin=Origin.MEASURED))
        return {page: render(store, TEMPLATES / f"{page}.j2", run_ids, ready) for page in pages}


def test_without_results_every_answer_names_the_spec_that_would_give_it(reported: str) -> None:
    for name, text in filled(reported, *(path.stem for path in TEMPLATES.glob("[!_]*.j2"))).items():
        specs = {match[1] for match in re.finditer(r"not measured: `([\w.]+)", text)}
        assert specs, name
        assert not [spec for spec in specs if f"jobs/configs/{spec}" not in text], name
        assert "not run yet" in text
        assert "H200" not in text


def run_of(spec: str, number: int = 0, settings: tuple[str, ...] = (), change: Any = None) -> list[rec.Record]:
    """Records of a run of a ready spec in which every point is ok, its values those of `values`."""
    loaded = load_spec(ROOT / "jobs" / "configs" / f"{spec}.yaml", settings)
    kind = kind_module(loaded.kind)
    run_id = f"20261124-00000{number}-{loaded.name}"
    begin = T0 + timedelta(minutes=number)
    records: list[rec.Record] = [
        rec.RunRecord(
            run_id=run_id, at=begin, name=loaded.name, kind=loaded.kind, spec=loaded.model_dump(mode="json"),
            spec_hash="5" * 16, git_commit="c" * 40, git_dirty=False, quantities=tuple(kind.QUANTITIES),
            axes=axes_of(kind),
        )
    ]  # fmt: skip
    units = {each.name: each.unit for each in kind.QUANTITIES if not each.name.endswith("*")}
    for index, point in enumerate(loaded.all_points(dict.fromkeys(loaded.python, H200))):
        state, values = (change or (lambda point: (PointState.OK, {})))(point)
        found = [{"name": name, "unit": unit, "value": values.get(name, 7.0)} for name, unit in units.items()]
        plan = rec.PointRecord(
            run_id=run_id, at=begin, point_id=f"{run_id}/{index}", index=index, key=f"{index:016x}", label=point.label,
            config=dict(point.config), axes=point.axes.to_record(),
        )  # fmt: skip
        end = {"metrics": found} if state is PointState.OK else {"reason": f"made {state}"}
        records += attempt(plan, begin, 0, state, route={"cmp": "made-up"}, environment=ENVIRONMENT, **end)
    return [*records, rec.RunEndRecord(run_id=run_id, at=begin, state=RunState.DONE)]


@pytest.fixture
def stored(reported: str, tmp_path: Path) -> Callable[..., str]:
    """Function that stores runs beside the reports' figures, in a database of the test's own, and gives its URL."""
    path = tmp_path / "nsa.db"
    path.write_bytes(Path(reported.removeprefix("sqlite:///")).read_bytes())

    def store(*runs: list[rec.Record]) -> str:
        with Store.open(f"sqlite:///{path}") as opened:
            for records in runs:
                opened.apply_many(records)
        return f"sqlite:///{path}"

    return store


def test_the_newest_run_that_has_a_point_counts_and_a_failure_is_no_number(stored: Callable[..., str]) -> None:
    def older(point: Point) -> tuple[PointState, dict[str, float]]:
        return PointState.OK, {"forward_memory": 1111.0}

    def newer(point: Point) -> tuple[PointState, dict[str, float]]:
        if point.axes.implementation == "naive":
            return PointState.CANCELLED, {}
        if point.axes.seq_len == 1024:
            return PointState.HANG, {}
        return PointState.OK, {"forward_memory": 2222.0}

    url = stored(run_of("backward_m7c", 1, change=older), run_of("backward_m7c", 2, change=newer))
    text = filled(url, "backward-hang.md")["backward-hang.md"]
    assert "| 512 | 5,165 MiB | 2,222 MiB | 1,111 MiB |" in text
    assert "| 1,024 | hang | hang | 1,111 MiB |" in text
    assert re.search(r"33 of 63 points hung, the first triton all m7c_125m 5 layers S=1024: made hang", text)


@pytest.mark.parametrize(
    ("spec", "page", "settings"),
    [
        ("soak_m7c", "fit-for-production.md", ("minutes=22", "piece_minutes=8", "deadlines.heartbeat_s=60")),
        ("backward_hang", "which-part-hangs.md", ("implementations=[triton]", "device=cuda")),
        ("train_2gpu", "training-speed.md", ("gradient_compression=bf16", "bucket_mb=100", "attention=[nsa]")),
    ],
)
def test_a_command_submits_what_ran(
    stored: Callable[..., str], spec: str, page: str, settings: tuple[str, ...]
) -> None:
    text = filled(stored(run_of(spec, 1, settings)), page)[page]
    row = next(line for line in text.splitlines() if line.startswith("| `nsa submit") and "20261124-000001" in line)
    words = shlex.split(row.split("`")[1])
    assert words[2] == f"jobs/configs/{spec}.yaml"
    given = [value for option, value in pairwise(words) if option == "--set"]
    assert set(settings) <= set(given)
    again, ran = (load_spec(ROOT / words[2], each).model_dump(mode="json") for each in (given, settings))
    assert again == ran
