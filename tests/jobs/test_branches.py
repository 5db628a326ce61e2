"""The branches kind: each branch by itself, proved by what it runs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from travelling import CPU, HEADS, NSA, QUICK, measured

from jobs.branches import Spec
from jobs.measure import isolation
from jobs.measure.check import WrongResult
from jobs.specs.fit import ACTS_ON
from nsa_core import NSAConfig, nsa_attention
from nsa_core._inputs import Operands
from nsa_core.backends import triton
from nsa_core.functional import BRANCHES
from nsa_core.kernels.runtime.launch import record
from nsa_core.routes import Branch


def _of(branch: str) -> dict[str, int]:
    """The sizes that act on a branch; on others they are refused."""
    return {name: size for name, size in NSA.items() if branch in (*ACTS_ON[name], "all")}


def _spec(**changes: Any) -> Spec:
    data = {"kind": "branches", "name": "t", "backends": ["chunked"], "shape": HEADS, "lengths": [64], "timing": QUICK}
    return Spec.model_validate(data | changes)


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
    (point,) = _spec(branches=[branch], nsa=_of(branch), backends=[backend], passes=["forward+backward"]).points(CPU)
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
    (point,) = _spec(branches=["win"], nsa=_of("win"), passes=["forward"]).points(CPU)
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
