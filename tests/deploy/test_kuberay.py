"""deploy/kuberay without a cluster: its promises in docs/deployment.md and docs/security.md, read from the manifests.

They were validated against KubeRay's schemas by hand, as these are 2 MB that belong to another project.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs.specs.load import load_spec
from orchestrator.run.order import parse_arguments

ROOT = Path(__file__).resolve().parents[2]
CLUSTER, POLICY = yaml.safe_load_all((ROOT / "deploy/kuberay/raycluster.yaml").read_text())
JOB = yaml.safe_load((ROOT / "deploy/kuberay/rayjob.yaml").read_text())
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()
HEAD = CLUSTER["spec"]["headGroupSpec"]
[WORKERS] = CLUSTER["spec"]["workerGroupSpecs"]
PODS = {
    "head": HEAD["template"]["spec"],
    "worker": WORKERS["template"]["spec"],
    "submitter": JOB["spec"]["submitterPodTemplate"]["spec"],
}
SECRET = "nsa-results"


def containers(*pods: str) -> Iterator[dict[str, Any]]:
    for pod in pods or PODS:
        yield from (*PODS[pod].get("initContainers", ()), *PODS[pod]["containers"])


def mappings(node: Any) -> Iterator[dict[str, Any]]:
    for item in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from mappings(item)
    if isinstance(node, dict):
        yield node


def test_they_are_of_the_kinds_of_the_design() -> None:
    kinds = [(each["apiVersion"], each["kind"]) for each in (CLUSTER, POLICY, JOB)]
    assert kinds == [
        ("ray.io/v1", "RayCluster"),
        ("networking.k8s.io/v1", "NetworkPolicy"),
        ("ray.io/v1", "RayJob"),
    ]


def test_ray_demands_its_token() -> None:
    assert CLUSTER["spec"]["authOptions"] == {"mode": "token"}
    assert not [env for each in containers() for env in each.get("env", ()) if env["name"].startswith("RAY_AUTH")]


def test_ray_is_of_the_version_that_the_image_installs() -> None:
    pinned = re.search(r"^ray==(\S+)", (ROOT / "constraints-shared.txt").read_text(), re.MULTILINE)
    assert pinned
    assert CLUSTER["spec"]["rayVersion"] == pinned[1]
    assert "constraints-shared.txt" in DOCKERFILE
    assert "docker/install.sh /home/nsa/venv/bin/python gpu" in DOCKERFILE
    assert '"$here/constraints-shared.txt"' in (ROOT / "docker/install.sh").read_text()


def test_the_image_is_that_of_the_compose_file() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["ray-head"]
    assert compose["build"]["dockerfile"] == "docker/Dockerfile"
    assert {each["image"] for each in containers()} == {compose["image"]}


@pytest.mark.parametrize("pod", PODS)
def test_nothing_runs_as_root(pod: str) -> None:
    context = PODS[pod]["securityContext"]
    assert context["runAsNonRoot"] is True
    assert f"--uid {context['runAsUser']} nsa" in DOCKERFILE
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert PODS[pod]["automountServiceAccountToken"] is False
    for each in containers(pod):
        own = each["securityContext"]
        assert own == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@pytest.mark.parametrize("each", [*containers()], ids=lambda each: each["name"])
def test_resources_are_bounded_and_named_as_kubernetes_does(each: dict[str, Any]) -> None:
    requests, limits = each["resources"]["requests"], each["resources"]["limits"]
    assert requests == limits
    assert set(limits) == {"cpu", "memory"} | ({"nvidia.com/gpu"} if each["name"] == "ray-worker" else set())


def test_workers_have_one_a100_each_and_the_head_none() -> None:
    [worker] = containers("worker")
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert "A100" in PODS["worker"]["nodeSelector"]["nvidia.com/gpu.product"]
    assert HEAD["rayStartParams"]["num-gpus"] == HEAD["rayStartParams"]["num-cpus"] == "0"


def test_secrets_are_referred_to_and_the_database_is_required() -> None:
    for each in containers("head", "worker"):
        sources = {env["name"]: env["valueFrom"]["secretKeyRef"] for env in each["env"]}
        assert {source["name"] for source in sources.values()} == {SECRET}
        needed = {name for name, source in sources.items() if not source.get("optional")}
        assert needed == {"NSA_DATABASE_URL", "NSA_ARTIFACT_STORE"}
    documented = (ROOT / "docs/deployment.md").read_text()
    keys = {source["key"] for source in mappings(CLUSTER) if source.get("name") == SECRET}
    assert f"secret generic {SECRET}" in documented
    assert all(key in documented for key in keys)


def test_services_are_reached_within_the_cluster_alone() -> None:
    assert HEAD["serviceType"] == "ClusterIP"
    assert "enableIngress" not in HEAD
    found = [node for each in (CLUSTER, JOB) for node in mappings(each)]
    assert not [node for node in found if node.keys() & {"hostNetwork", "hostPort", "hostPath", "nodePort"}]


def test_other_pods_reach_no_port_of_ray() -> None:
    spec, own = POLICY["spec"], {"ray.io/cluster": CLUSTER["metadata"]["name"]}
    assert (spec["podSelector"], spec["policyTypes"]) == ({"matchLabels": own}, ["Ingress"])
    among, submission = spec["ingress"]
    assert among == {"from": [{"podSelector": {"matchLabels": own}}]}
    assert submission["ports"] == [{"port": 8265, "protocol": "TCP"}]
    assert all("podSelector" in source for source in submission["from"])
    labels = JOB["spec"]["submitterPodTemplate"]["metadata"]["labels"]
    assert labels in [source["podSelector"]["matchLabels"] for source in submission["from"]]


def test_the_job_runs_a_ready_spec_of_the_image_on_this_cluster() -> None:
    spec = JOB["spec"]
    assert spec["clusterSelector"] == {"ray.io/cluster": CLUSTER["metadata"]["name"]}
    python, flag, package, *args = spec["entrypoint"].split()
    assert (python, flag, package) == ("python", "-m", "jobs")
    given = parse_arguments(args)
    assert "WORKDIR /opt/nsa\n" in DOCKERFILE
    path = ROOT / given.spec.relative_to("/opt/nsa")
    assert load_spec(path, given.set).resources.accelerator_type == "A100"
    assert spec["backoffLimit"] == 0


def test_the_image_writes_where_a_volume_is() -> None:
    assert "NSA_HOME=/data\n" in DOCKERFILE
    for pod in ("head", "worker"):
        assert "data" in [volume["name"] for volume in PODS[pod]["volumes"]]
        assert PODS[pod]["containers"][0]["volumeMounts"] == [{"name": "data", "mountPath": "/data"}]
