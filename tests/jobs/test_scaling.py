"""The kinds scaling and branches, with real measurements of small cases; each branch is proved by what it runs."""

import math
import re
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from travelling import CPU, HEADS, NSA, QUICK, measured, quiet, values_of

from jobs import branches
from jobs.measure import check, isolation
from jobs.measure.check import WrongResult
from jobs.scaling import Spec, measure
from jobs.schema.point import Machine
from jobs.specs.fit import ACTS_ON
from nsa_core import NSAConfig, nsa_attention
from nsa_core._inputs import Operands
from nsa_core.backends import chunked, triton
from nsa_core.functional import BRANCHES
from nsa_core.kernels.runtime.launch import record
from nsa_core.routes import Branch


def _spec(**changes: Any) -> Spec:
    data: dict[str, Any] = {"kind": "scaling", "name": "t", "implementations": ["chunked", "naive", "dense"]}
    data |= {"lengths": [64], "shape": HEADS, "nsa": NSA, "timing": QUICK} | changes
    if data["implementations"] == ["dense"] and "nsa" not in changes:
        del data["nsa"]  # which would change nothing
    return Spec.model_validate(data)


@pytest.fixture(autouse=True)
def _forget_agreements() -> None:
    check.check_attention.cache_clear()
    check.check_model.cache_clear()


def test_points_are_the_whole_grid_shortest_first() -> None:
    points = _spec(lengths=[128, 64]).points(CPU)
    assert len(points) == 2 * 2 * 3
    assert [p.axes.seq_len for p in points] == [64] * 6 + [128] * 6
    assert points[0].label == "chunked forward S=64"
    assert points[0].axes.query_heads == 4
    assert all(p.estimate_bytes for p in points)
    assert all(p.skip_reason is None for p in points)


def test_points_that_do_not_fit_are_skipped_with_the_arithmetic() -> None:
    points = _spec(lengths=[64, 65536], memory_gib=2, passes=["forward"]).points(CPU)
    skipped = {p.label: p.skip_reason for p in points if p.skip_reason}
    assert list(skipped) == ["naive forward S=65536"]
    reason = str(skipped["naive forward S=65536"])
    assert re.fullmatch("needs .* GiB, memory_gib allows 2 GiB; shorten lengths or use chunked", reason)
    small = Machine("cuda", "small card", 2**20)
    assert "the cuda device has 1 MiB" in str(_spec(lengths=[8192]).points(small)[0].skip_reason)


def test_the_key_ignores_what_dense_attention_does_not_use() -> None:
    def key(window: int, implementation: str) -> str:
        implementations = list(dict.fromkeys([implementation, "chunked"]))
        spec = _spec(nsa=NSA | {"window": window}, implementations=implementations)
        return spec.points(CPU)[0].key("code", CPU)

    assert key(16, "dense") == key(32, "dense")
    assert key(16, "chunked") != key(32, "chunked")


@pytest.mark.parametrize("pass_", ["forward", "forward+backward"])
@pytest.mark.parametrize("implementation", ["chunked", "naive", "dense"])
def test_a_point_brings_time_memory_agreement_and_its_route(implementation: str, pass_: str) -> None:
    point = _spec(implementations=[implementation], passes=[pass_]).points(CPU)[0]
    result = measured(point)
    found = values_of(result)
    assert found["time"] > 0
    samples = {metric.name: metric.samples for metric in result.metrics}
    assert samples["throughput"] == pytest.approx([64 / ms * 1000 for ms in samples["time"]])
    output = 64 * 4 * 8 * 4
    assert found["peak_extra_memory"] >= (2 if pass_ == "forward+backward" else 1) * output / 2**20
    assert found["peak_memory"] > found["peak_extra_memory"]
    assert 0 <= found["oracle_error"] <= found["oracle_error_bound"] < 1e-4
    assert abs(found["estimate_error"]) < 30, "within 10 % at lengths that matter; see tests/nsa_core"
    if implementation == "dense":
        assert set(result.route) == {"dense"}
    else:
        assert result.route == dict.fromkeys(("cmp", "slc", "win", "select"), implementation)
    assert result.environment["packages"]["torch"]


@pytest.mark.parametrize(
    ("implementation", "nsa", "parameters"), [("dense", None, 115_008), ("chunked", NSA | {"compress": "mlp"}, 132_952)]
)
def test_a_whole_model_is_measured_with_all_its_gradients(implementation: str, nsa: Any, parameters: int) -> None:
    spec = _spec(workload="model", shape=None, nsa=nsa, preset="tiny", implementations=[implementation])
    forward, both = (values_of(measured(point)) for point in spec.points(CPU))
    assert both["peak_extra_memory"] >= parameters * 4 / 2**20
    assert forward["peak_extra_memory"] < both["peak_extra_memory"]
    assert both["oracle_error"] <= both["oracle_error_bound"]
    assert spec.points(CPU)[0].axes.layers == 2


def test_a_wrong_implementation_is_never_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = chunked.window
    monkeypatch.setattr(chunked, "window", lambda *args: right(*args) * 1.001)
    phases: list[str] = []
    point = _spec(implementations=["chunked"], passes=["forward"]).points(CPU)[0]
    with pytest.raises(WrongResult, match=r"chunked: output is off by .* of the oracle's largest value"):
        measure(point.case, lambda phase, done=0, total=0: phases.append(phase))
    assert phases == ["check"]


def test_a_wrong_gradient_is_found_though_the_output_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    right = chunked.window

    def detached(q: Any, k: Any, *rest: Any) -> Any:
        return right(q, k.detach(), *rest)

    monkeypatch.setattr(chunked, "window", detached)
    forward, both = _spec(implementations=["chunked"]).points(CPU)
    measure(forward.case, quiet)
    with pytest.raises(WrongResult, match="gradient of k"):
        measure(both.case, quiet)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_wrong_though_the_output_is_right(bad: float) -> None:
    truth = {"output": torch.ones(3, dtype=torch.float64), "gradient of q": torch.ones(3, dtype=torch.float64)}
    right = {name: x.float() for name, x in truth.items()}
    got = right | {"gradient of q": torch.tensor([1.0, bad, 1.0])}
    for eager in (right, got):
        with pytest.raises(WrongResult, match="gradient of q is off by inf"):
            check.judge(got, eager, truth, torch.float32, "case", "name")


def test_a_selection_that_is_wrong_far_into_the_sequence_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = chunked.select

    def last_seen(*args: Any) -> torch.Tensor:
        blocks = right(*args)
        blocks[:, 64:, :, 1] = blocks[:, 64:, :, 2] - 1  # a neighbour of the local blocks, whatever its score
        return blocks

    monkeypatch.setattr(chunked, "select", last_seen)
    point = _spec(implementations=["chunked"], passes=["forward"]).points(CPU)[0]
    with pytest.raises(WrongResult, match="selects other blocks than the oracle"):
        measure(point.case, quiet)


def _of(branch: str) -> dict[str, int]:
    """The sizes that act on a branch; on others they are refused."""
    return {name: size for name, size in NSA.items() if branch in (*ACTS_ON[name], "all")}


def _branches(**changes: Any) -> branches.Spec:
    data = {"kind": "branches", "name": "t", "backends": ["chunked"], "shape": HEADS, "lengths": [64], "timing": QUICK}
    return branches.Spec.model_validate(data | changes)


@pytest.mark.parametrize(
    ("backend", "branch"),
    [
        ("chunked", "cmp"),
        ("gather", "slc"),
        ("packed", "slc"),
        ("chunked", "win"),
        ("gather", "all"),
        ("packed", "all"),
    ],
)
def test_a_branch_is_measured_by_itself(backend: str, branch: str) -> None:
    (point,) = _branches(branches=[branch], nsa=_of(branch), backends=[backend], passes=["forward+backward"]).points(
        CPU
    )
    result = measured(point)
    computed = set(result.route) - {"select"}
    assert computed == (set(BRANCHES) if branch == "all" else {branch})
    assert set(result.route.values()) == {backend}
    assert ("trace.txt" in result.files) == (branch != "all")
    assert {"time", "peak_extra_memory", "oracle_error"} <= {metric.name for metric in result.metrics}
    assert point.axes.more == {"branch": branch}


def test_a_branch_that_runs_another_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seeds' isolation only closed the gates: every branch still ran."""

    def closes_gates(q: Any, k: Any, v: Any, gates: Any, config: NSAConfig, *, backend: str, branches: Any) -> Any:
        open_ = torch.tensor([float(name in branches) for name in BRANCHES])
        return nsa_attention(q, k, v, gates * open_, config, backend=backend)

    monkeypatch.setattr(isolation, "nsa_attention", closes_gates)
    (point,) = _branches(branches=["win"], nsa=_of("win"), passes=["forward"]).points(CPU)
    with pytest.raises(WrongResult, match=r"branch win alone also ran for other branches: keys of cmp, keys of slc"):
        measured(point)


def _stages(branch: Branch) -> list[str]:
    """Stages of the kernels' launches, forward and backward, of a branch by itself; nothing runs."""

    def made(heads: int, dim: int) -> torch.Tensor:
        return torch.empty(1, 2048, heads, dim, dtype=torch.bfloat16, device="meta", requires_grad=True)

    def three() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return made(2, 64), made(2, 64), made(2, 64)

    operands, at = Operands(made(4, 64), three(), three(), gates=made(4, 3)), BRANCHES.index(branch)
    with record() as launches:
        out = triton.attend(operands, NSAConfig(), (branch,), 0.125)
        leaves = [operands.q, operands.keys[at], operands.values[at]]
        torch.autograd.grad(out, leaves, torch.empty_like(out))
    return [launch.stage for launch in launches]


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("branch", BRANCHES)
def test_a_branch_that_launches_kernels_of_another_one_is_an_error(branch: Branch) -> None:
    isolation.refuse_foreign(branch, "triton", set(), _stages(branch))
    others = {*BRANCHES} - {branch} - ({"cmp"} if branch == "slc" else set())  # the selection scores compressed keys
    for other in others:
        with pytest.raises(WrongResult, match=f"branch {branch} alone also ran for other branches"):
            isolation.refuse_foreign(branch, "triton", set(), _stages(other))
