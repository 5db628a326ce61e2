"""Which calls take the forward of span_hopper.py; the kernel itself is tested on a device."""

from importlib.util import find_spec

import pytest
import torch

from nsa_core import NSAConfig

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def warpgroups(monkeypatch, arch=90, heads=8, compressed=63, dim=128, dtype=torch.bfloat16, shared=True, late=0):
    """For two kv heads; `late`: numbers that keys begin behind where 16 bytes are aligned."""
    from nsa_core.kernels import span
    from nsa_core.kernels.plan import Part, Plan

    monkeypatch.setattr(span, "arch", lambda x: arch)
    q = torch.empty(1, 8, heads, dim, dtype=dtype)
    k_cmp, k = torch.empty(1, compressed, 2, dim, dtype=dtype), torch.empty(2 * 8 * dim + late, dtype=dtype)
    k = k[late:].view(1, 8, 2, dim)
    parts = [Part("cmp", k_cmp, k_cmp), Part("slc", k, k), Part("win", k, k)]
    return span._warpgroups(q, parts, Plan(NSAConfig(), ("cmp", "slc", "win"), 0, 1.0, shared=shared))


@pytest.mark.parametrize(("heads", "compressed", "groups"), [(8, 63, 2), (8, 3072, 3), (16, 3072, 3), (32, 3072, 3)])
def test_it_attends_with_two_warpgroups_or_three(monkeypatch, heads, compressed, groups):
    assert warpgroups(monkeypatch, heads=heads, compressed=compressed) == groups


@pytest.mark.parametrize(
    "other",
    [
        {"arch": 80},
        {"arch": 100},
        {"heads": 6, "compressed": 3072},
        {"heads": 16},
        {"heads": 32},
        {"dim": 64},
        {"dtype": torch.float32},
        {"shared": False},
        {"late": 1},
    ],
    ids=str,
)
def test_others_take_the_forward_of_all_devices(monkeypatch, other):
    assert warpgroups(monkeypatch, **other) == 0
