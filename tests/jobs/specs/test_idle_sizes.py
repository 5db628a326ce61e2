"""Fields of NSAConfig that change nothing of a spec's points are refused, by every kind that has them."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from jobs.specs.fit import ACTS_ON
from jobs.specs.kinds import kinds
from jobs.specs.load import parse_spec
from jobs.specs.spec import SpecError
from nsa_core import NSAConfig, nsa_attention
from nsa_core.functional import BRANCHES
from nsa_core.routes import Branch

CONFIGS = Path(__file__).parents[3] / "jobs" / "configs"
READY = [yaml.safe_load(path.read_text()) for path in sorted(CONFIGS.glob("*.yaml"))]
WITH_NSA = [name for name, module in kinds().items() if "nsa" in module.Spec.model_fields]
SMALL = NSAConfig(8, 4, 16, slc_count=4, window=16)
OTHER = {"cmp_block": 4, "cmp_stride": 8, "slc_block": 8, "slc_count": 5, "init_blocks": 0, "local_blocks": 1}


def _attend(branch: Branch, config: NSAConfig) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 128, heads, 8, generator=generator) for heads in (2, 1, 1))
    return nsa_attention(q, k, v, torch.ones(1, 128, 2, 3), config, backend="naive", branches=(branch,))


@pytest.mark.parametrize("branch", BRANCHES)
def test_the_table_is_what_the_operator_does(branch: Branch) -> None:
    whole = _attend(branch, SMALL)
    changed = {
        name: not torch.equal(whole, _attend(branch, replace(SMALL, **{name: value})))
        for name, value in (OTHER | {"window": 8}).items()
    }
    assert changed == {name: branch in ACTS_ON[name] for name in changed}
    assert set(ACTS_ON) == {field.name for field in fields(NSAConfig)} == {*changed, "compress", "slots"}


def _refused(data: dict[str, Any]) -> str:
    with pytest.raises(SpecError) as caught:
        parse_spec(data)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", WITH_NSA)
def test_every_kind_refuses_what_its_points_lack(kind: str) -> None:
    """As slots on a CPU, and anything of dense attention."""
    base = next(data for data in READY if data["kind"] == kind) | {"device": "cpu", "nsa": {"slots": "exact"}}
    base.pop("cuda_graphs", None)  # which a CPU has not
    named = next(key for key in ("implementations", "backends", "attention") if key in kinds()[kind].Spec.model_fields)
    packed = "a decoding step has none" if kind == "decode" else "only Triton's kernels pack them"
    base[named] = ["nsa"] if named == "attention" else ["chunked"]
    assert _refused(base).startswith(f"nsa.slots: 'exact': {packed}")
    if kind in ("branches", "backward"):  # of NSA alone
        return
    dense = {named: ["dense"], "nsa": {"window": 32}} | ({"peers": ["dense-pytorch"]} if kind == "peers" else {})
    assert _refused(base | dense).startswith("nsa.window: 32: changes nothing of dense attention; leave it out, or add")


@pytest.mark.parametrize(
    ("backends", "branches", "nsa", "message"),
    [
        (
            *(["chunked"], ["win"], {"slc_count": 4, "slots": "exact"}),
            "nsa.slc_count: 4: changes nothing of branch win; leave it out, slots as well, or measure slc or all, too",
        ),
        (["flash"], ["win", "cmp"], {"cmp_block": 16}, "nsa.cmp_block: 16: changes nothing of branch win; "),
        (["naive"], ["slc"], {"window": 32}, "nsa.window: 32: changes nothing of branch slc; leave it out, or measure"),
        (["naive"], ["cmp"], {"cmp_block": 128, "slc_block": 128}, None),  # which must not be shorter
        (["naive"], ["win"], {"cmp_block": 24, "cmp_stride": 12, "slc_block": 24}, "nsa.cmp_block: 24: changes"),
        (["naive", "triton"], ["slc"], {"slots": "exact"}, None),
    ],
)
def test_a_field_must_act_on_a_branch(
    backends: list[str], branches: list[str], nsa: dict[str, Any], message: str | None
) -> None:
    shape = {"query_heads": 4, "kv_heads": 2, "head_dim": 16}
    data = {"kind": "branches", "name": "t", "backends": backends, "branches": branches, "shape": shape, "nsa": nsa}
    data |= {"lengths": [64], "dtype": "bfloat16"}
    if message is None:
        parse_spec(data)
    else:
        assert _refused(data).startswith(message)
