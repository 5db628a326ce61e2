"""Room for points here and on a cluster: on one node, or their ranks on several."""

from typing import Any

import pytest
from ray._raylet import PythonFunctionDescriptor
from ray.remote_function import RemoteFunction

from jobs.schema.point import Machine
from jobs.specs.load import parse_spec
from orchestrator.errors import UserError
from orchestrator.execute import local
from orchestrator.execute.local import LocalExecutor
from orchestrator.execute.ray_cluster import RayExecutor, Share, _task
from orchestrator.execute.requirements import MOST_A_CORE
from orchestrator.settings import Settings

TWO_HOSTS = [{"CPU": 8.0, "GPU": 2.0, "accelerator_type:H100": 1.0}, {"CPU": 8.0, "GPU": 1.0}]


def _spec(**changes: Any) -> Any:
    return parse_spec(
        {"kind": "train", "name": "t", "device": "cuda", "seq_len": 32, "steps": 20, "batch": 12} | changes
    )


def _share(ranks: int, card_type: str | None = None, cpus: float = 1, gpus: float | None = None) -> Share:
    return Share.of(_spec(ranks=ranks, resources={"num_cpus": cpus}), gpus or float(ranks), card_type)


def test_ranks_of_a_point_may_be_on_several_nodes_and_are_counted_whole() -> None:
    _share(3).check(TWO_HOSTS)
    assert _share(3).points(TWO_HOSTS) == 1
    assert _share(2).points(TWO_HOSTS) == 1, "two ranks of another point would wait for the third GPU's fellow"
    assert _share(1).points(TWO_HOSTS) == 3
    assert _share(2, "H100").points(TWO_HOSTS) == 1
    assert _share(3, "H100").points(TWO_HOSTS) == 0
    assert _share(2, cpus=20).points(TWO_HOSTS) == 0


@pytest.mark.parametrize(
    ("resources", "slots"),
    [
        ({"num_cpus": 1e-4}, 2 * MOST_A_CORE),
        ({"num_cpus": 1e-4, "workers": 5}, 5),
        ({"num_cpus": 0.5}, 4),
        ({"num_cpus": 2}, 1),
    ],
)
def test_a_tiny_share_of_a_core_does_not_start_thousands_of_points(monkeypatch, resources, slots) -> None:
    monkeypatch.setattr(local.os, "sched_getaffinity", lambda pid: {0, 1})
    executor = LocalExecutor(_spec(device="cpu", resources=resources))
    assert executor.slots(Machine("cpu", "test processor", 8 << 30)) == slots
    if "workers" not in resources:
        assert Share(1, resources["num_cpus"], 0, None).points([{"CPU": 2.0}]) == slots


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (
            _share(4, cpus=2),
            "ranks: 4: all nodes of the cluster together have room for 3, each with 1 GPU and 0.5 CPU cores: no node "
            "has more than 2 GPU and 8 CPU cores, the cards are H100; start more workers or use fewer ranks",
        ),
        (_share(3, "H100", cpus=3), "ranks: 3: all .* room for 2, each with 1 GPU and 1 CPU cores on H100: "),
        (_share(2, cpus=20), "ranks: 2: all .* room for 0, each with 1 GPU and 10 CPU cores: no node has more than 2 "),
        (_share(1, gpus=3), "resources: no node of the cluster has 3 GPU and 1 CPU cores: no node has more than 2 GPU"),
        (_share(1, "A100"), "resources: no node .* on A100: .*, the cards are H100; start a worker that has"),
    ],
)
def test_what_a_cluster_lacks_is_told(share: Share, message: str) -> None:
    with pytest.raises(UserError, match=message):
        share.check(TWO_HOSTS)


def test_ranks_on_a_cluster_have_the_interpreter_of_its_workers() -> None:
    with pytest.raises(UserError, match=r"^python: '/opt/other/bin/python': on a cluster, ranks run under"):
        RayExecutor(_spec(ranks=2, python=[None, "/opt/other/bin/python"]), Settings())


@pytest.mark.parametrize(("asked", "fits"), [("A100-80G", False), ("A100-40G", True), ("A100", True), (None, True)])
def test_a_card_of_another_size_is_not_the_one_that_was_asked_for(asked: str | None, fits: bool) -> None:
    reason = _spec(resources={"accelerator_type": asked}).resources.misfit(
        Machine("cuda", "NVIDIA A100-SXM4-40GB", 40_960 << 20)
    )
    assert (reason is None) == fits
    if reason:
        assert "Ray chose NVIDIA A100-SXM4-40GB with 40 GiB, which it calls A100, too; start nodes" in reason


def test_a_job_that_holds_the_cores_of_its_points_is_refused() -> None:
    share, nodes = _share(1, cpus=2, gpus=1e-9), {"a": {"CPU": 2.0, "GPU": 1.0}, "b": {"CPU": 1.0}}
    share.check_beside(nodes, "b", {"CPU": 1.0})
    with pytest.raises(UserError, match=r"^entrypoint: this job itself holds 1 CPU, which its points need; .*$"):
        share.check_beside(nodes, "a", {"CPU": 1.0})


def test_probes_and_points_of_all_runs_are_one_function_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else their tasks wait in queues of their own, of which Ray may serve one alone while another run has points."""
    monkeypatch.setattr(RemoteFunction, "options", lambda self, **_: self)
    made = [_task(1, 0, None, retries=2), _task(1, 0, None)]
    assert len({PythonFunctionDescriptor.from_function(each._function, each._uuid) for each in made}) == 1
