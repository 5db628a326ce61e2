"""deploy/kuberay without a cluster: its promises in docs/deployment.md and docs/security.md, read from the manifests.

They were validated against KubeRay's schemas by hand, as these are 2 MB that belong to another project.
"""

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


def test_ray_demands_its_token_in_the_image_of_the_compose_file() -> None:
    assert CLUSTER["spec"]["authOptions"] == {"mode": "token"}
    assert not [env for each in containers() for env in each.get("env", ()) if env["name"].startswith("RAY_AUTH")]
    pinned = re.search(r"^ray==(\S+)", (ROOT / "constraints-shared.txt").read_text(), re.MULTILINE)
    assert pinned
    assert CLUSTER["spec"]["rayVersion"] == pinned[1]
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["ray-head"]
    assert {each["image"] for each in containers()} == {compose["image"]}


def test_workers_have_a_gpu_each_and_a_volume_for_what_they_write() -> None:
    for each in containers():
        requests, limits = each["resources"]["requests"], each["resources"]["limits"]
        assert requests == limits
        assert limits.get("nvidia.com/gpu") == ("1" if each["name"] == "ray-worker" else None)
    assert HEAD["rayStartParams"]["num-gpus"] == HEAD["rayStartParams"]["num-cpus"] == "0"
    assert "NSA_HOME=/data\n" in DOCKERFILE
    for pod in ("head", "worker"):
        assert PODS[pod]["containers"][0]["volumeMounts"] == [{"name": "data", "mountPath": "/data"}]


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
