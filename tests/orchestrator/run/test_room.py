"""Room for points here and on a cluster: on one node, or their ranks on several."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.schema.point import Machine
from jobs.specs.load import parse_spec
from orchestrator.errors import UserError
from orchestrator.execute import local
from orchestrator.execute.local import LocalExecutor
from orchestrator.execute.ray_cluster import RayExecutor
from orchestrator.execute.room import MOST_A_CORE, Share, check_resources
from orchestrator.settings import Settings

TWO_HOSTS = [{"CPU": 8.0, "GPU": 2.0, "accelerator_type:H100": 1.0}, {"CPU": 8.0, "GPU": 1.0}]


def _spec(**changes: Any) -> Any:
    return parse_spec(
        {"kind": "train", "name": "t", "device": "cuda", "seq_len": 32, "steps": 20, "batch": 12} | changes
    )


def _share(ranks: int, card_type: str | None = None, cpus: float = 1) -> Share:
    return Share.of(_spec(ranks=ranks, resources={"num_cpus": cpus}), float(ranks), card_type)


def test_ranks_of_a_point_may_be_on_several_nodes_and_are_counted_whole() -> None:
    check_resources(_spec(ranks=3), TWO_HOSTS)
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
    ("changes", "message"),
    [
        (
            {"ranks": 4, "resources": {"num_cpus": 2}},
            "ranks: 4: all nodes of the cluster together have room for 3, with 1 GPU and 0.5 CPU cores each; start "
            "more workers or use fewer ranks",
        ),
        (
            {"ranks": 3, "resources": {"num_cpus": 3, "accelerator_type": "H100"}},
            "ranks: 3: all nodes of the cluster together have room for 2, with 1 GPU and 1 CPU cores each on H100; "
            "start more workers or use fewer ranks",
        ),
        (
            {"ranks": 2, "resources": {"num_cpus": 20}},
            "resources.num_cpus: 20: is 10 for each of 2 ranks, and no node of the cluster has more than 8; ask for "
            "fewer",
        ),
        (
            {"resources": {"num_gpus": 3}},
            "resources.num_gpus: 3: no node of the cluster has more than 2; start a worker that has (nsa up on a GPU "
            "host) or ask for fewer",
        ),
    ],
)
def test_what_a_cluster_lacks_is_told(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_resources(_spec(**changes), TWO_HOSTS)
    assert str(caught.value) == message


def test_ranks_on_a_cluster_have_the_interpreter_of_its_workers() -> None:
    with pytest.raises(UserError, match=r"^python: '/opt/other/bin/python': on a cluster, ranks run under"):
        RayExecutor(_spec(ranks=2, python=[None, "/opt/other/bin/python"]), Settings())
