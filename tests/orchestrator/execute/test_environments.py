"""Points under environment variables and interpreters of their own, in real child processes."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from other_interpreters import make_interpreter
from supervised import Ended, supervised

from jobs.schema.point import Point
from jobs.schema.states import PointState
from jobs.specs.spec import Deadlines
from orchestrator.errors import UserError
from orchestrator.execute import gpu_release, requirements
from orchestrator.execute.requirements import Requirements
from orchestrator.execute.supervisor import Conditions

KINDS = Path(__file__).parents[1] / "kinds"
WARM = Conditions("cpu", Deadlines(startup_s=60, heartbeat_s=30, point_s=60), warm=True)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another interpreter with this one's packages, and the tests' kinds as installed ones."""
    return make_interpreter(
        tmp_path_factory.mktemp("other"), *(path for path in sys.path if path.endswith("site-packages")), KINDS
    )


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter without packages."""
    return make_interpreter(tmp_path_factory.mktemp("bare"))


@pytest.fixture
def measured(tmp_path: Path) -> Callable[..., list[Ended]]:
    """Supervises points and returns their ends."""

    def run(points: Sequence[Point], conditions: Conditions = WARM, **options: str) -> list[Ended]:
        updates = supervised(points, conditions, tmp_path / "store", **options)
        return [update for update in updates if isinstance(update, Ended)]

    return run


def wants(**changes: object) -> Requirements:
    return replace(Requirements("cpu", "drill", ({},), (None,), {}, None), **changes)


def test_a_warm_child_is_replaced_when_the_environment_or_interpreter_changes(
    snippet_kind, measured, other: str
) -> None:
    point = snippet_kind.point("print(sys.executable)")
    under = [point, replace(point, env={"TORCH_LOGS": "a"}), replace(point, env={"TORCH_LOGS": "b"})]
    points = [*under, replace(under[2], python=other)]
    ends = measured([each for point in points for each in (point, point)], replace(WARM, settings=("TORCH_LOGS",)))
    assert [end.outcome.state for end in ends] == [PointState.OK] * 8
    pids = [end.outcome.environment["pid"] for end in ends]
    assert pids[::2] == pids[1::2]
    assert len(set(pids)) == 4
    effective = [end.outcome.environment["settings"] for end in ends[::2]]
    assert effective == [{"TORCH_LOGS": value} for value in ("unset", "a", "b", "b")]
    assert [str(end.files["stdout.txt"]).strip() for end in ends[::2]] == [*[sys.executable] * 3, other]


FOREIGN = """
import jobs, orchestrator, numpy
from pathlib import Path
beat('on')
assert 'poison' not in os.environ['PYTHONPATH'], os.environ['PYTHONPATH']
[folder] = os.environ['PYTHONPATH'].split(os.pathsep)
assert sorted(os.listdir(folder)) == ['jobs', 'nsa_core', 'orchestrator']
assert Path(orchestrator.__file__).parent.parent == Path(folder)
print(Path(orchestrator.__file__).resolve().parent.parent)
import time
def stuck_here(): time.sleep(60)
if not os.environ.get('TORCH_LOGS'): stuck_here()
"""


def test_another_interpreter_gets_our_sources_and_nothing_of_this_ones_search_path(
    snippet_kind, measured, other: str, monkeypatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/poison")
    monkeypatch.setenv("PYTHONHOME", "/poison")
    hasty = replace(WARM, deadlines=Deadlines(startup_s=60, heartbeat_s=2, point_s=60))
    point = replace(snippet_kind.point(FOREIGN), python=other)
    good, stuck = measured([replace(point, env={"TORCH_LOGS": "x"}), point], hasty)
    assert good.outcome.state is PointState.OK, good.files
    assert str(good.files["stdout.txt"]).strip() == str(Path(requirements.__file__).resolve().parents[2])
    assert stuck.outcome.state is PointState.HANG, stuck.outcome.reason
    assert "stuck_here" in stuck.files["stacks.txt"]


def test_settings_without_effect_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    code = "import torch; print(torch.backends.cpu.get_cpu_capability().lower())"
    default = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    env = {"ATEN_CPU_CAPABILITY": default, "OWN_VARIABLE": "is passed", "PYTORCH_CUDA_ALLOC_CONF": "backend:native"}
    with pytest.raises(UserError) as caught:
        requirements.check(wants(envs=[env]))
    same, allocator = str(caught.value).splitlines()
    assert same.startswith(f"env.ATEN_CPU_CAPABILITY: {default!r}: has no effect on node ")
    assert same.endswith(f": without it, {default.upper()} is in effect as well; remove it")
    assert "it concerns GPUs, and the points run on the CPU; remove it" in allocator


def test_an_interpreter_that_lacks_a_package_is_refused_with_the_package(bare: str) -> None:
    with pytest.raises(
        UserError, match=rf"^python: '{bare}': lacks the package \w+ on node .*; install it with {bare}"
    ):
        requirements.check(wants(pythons=(bare,)))


def test_paths_and_interpreters_that_a_node_lacks_are_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("here/in", "empty"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "text").touch()
    pythons = (None, "/no/python", str(tmp_path / "text"), str(tmp_path))
    paths = {"data.path": "here", "data.other": "/no/data", "data.more": "empty"}
    lines = requirements.missing(wants(paths=paths, pythons=pythons))
    assert [line.partition(" on node ")[0] for line in lines] == [
        "data.other: '/no/data': does not exist",
        "data.more: 'empty': is an empty folder",
        "python: '/no/python': does not exist",
        f"python: '{tmp_path / 'text'}': is not a program that may be run",
        f"python: '{tmp_path}': is not a program that may be run",
    ]
    with pytest.raises(
        UserError, match=r"^data\.path: 'gone': does not exist on node .*; put it there, or give a path"
    ):
        requirements.check(wants(paths={"data.path": "gone"}))


def test_a_point_planned_for_another_card_is_not_measured(snippet_kind, measured, monkeypatch) -> None:
    monkeypatch.setattr(gpu_release.nvml, "describe", lambda gpu: {"name": "NVIDIA A100"})
    cuda = replace(WARM, device="cuda", card="NVIDIA H200")
    [end] = measured([snippet_kind.point("pass")], cuda, gpus="0")
    assert end.outcome.state is PointState.ERROR
    assert "planned for NVIDIA H200, node " in str(end.outcome.reason)
    assert "has NVIDIA A100; name one type in resources.accelerator_type" in str(end.outcome.reason)
    same = replace(cuda, card="NVIDIA A100")
    assert [end.outcome.state for end in measured([snippet_kind.point("pass")], same, gpus="0")] == [PointState.OK]
