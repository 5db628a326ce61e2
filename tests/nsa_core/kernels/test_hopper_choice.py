"""Which calls take the kernels for Hopper, and how their tiles are described; the kernels are tested on a device."""

import math
from importlib.util import find_spec

import pytest
import torch

from nsa_core import NSAConfig

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
CONFIG = NSAConfig()
SPANS = {"_all_spans_forward", "_all_spans_backward_q"}
SELECTED = {"_selected_forward_hopper", "_selected_backward_hopper"}


def tensor(*shape, dtype=torch.bfloat16, late=False):
    """A tensor; if `late`, it begins 8 bytes after an aligned address."""
    return torch.empty(math.prod(shape) + 4, dtype=dtype)[4 * late :][: math.prod(shape)].view(shape)


def launches(
    monkeypatch, arch=90, heads=8, tokens=2048, dim=128, value_dim=128, dtype=torch.bfloat16, late="", config=CONFIG,
    keys="shared", packed=False,
):  # fmt: skip
    """Launches of a forward and backward of two kv heads; `late`: the unaligned ones of q, k, v and do.

    `packed`: the tokens are two sequences.

    `keys`: shared by all branches, separate, or shared by slc and win alone, without a compressed branch.
    """
    from nsa_core.kernels import operators
    from nsa_core.kernels.runtime.launch import record
    from nsa_core.kernels.shared import hopper

    monkeypatch.setattr(hopper, "arch", lambda x: arch)
    branches = ("slc", "win") if keys == "two branches" else ("cmp", "slc", "win")
    q = tensor(1, tokens, heads, dim, dtype=dtype, late=late == "q")
    gates = tensor(1, tokens, heads, len(branches), dtype=dtype)
    k, v = (tensor(1, tokens, 2, n, dtype=dtype, late=late == x) for x, n in (("k", dim), ("v", value_dim)))
    leaves = [x.requires_grad_() for x in (q, gates, k, v)]
    blocks = torch.zeros(1, tokens, 2, config.slc_count, dtype=torch.int32) if keys == "two branches" else None
    cu = torch.tensor([0, tokens // 2, tokens], dtype=torch.int32) if packed else None
    shared = keys == "shared"
    call = operators.Call(config, branches, 0, 1.0, compresses=shared, longest=tokens if packed else 0, cu=cu)
    with record() as seen:
        pairs = [(k, v)] * 2
        if keys == "separate":
            pairs = [operators.compress(k, v, config), (k, v), (k.clone(), v.clone())]
        out = operators.attend(q, gates, blocks, pairs, call)
        torch.autograd.grad(out, leaves, tensor(*out.shape, dtype=dtype, late=late == "do"))
    return seen


ALL = SPANS | SELECTED
CHOICES = [
    *(({"heads": heads}, ALL) for heads in (8, 16, 32)),  # groups of 4 to 16 heads of 128
    ({"dtype": torch.float16}, SPANS),  # it rounds less than packed slots
    ({"late": "do"}, {"_all_spans_forward", "_selected_forward_hopper"}),  # a gradient that is not aligned
    ({"config": NSAConfig(slc_block=32)}, SPANS),
    ({"config": NSAConfig(slots="exact")}, SPANS),
    ({"config": NSAConfig(local_blocks=0)}, SPANS),  # blocks are not wholly before the query
    ({"tokens": 20}, set()),  # without compressed keys there is nothing to describe
    ({"keys": "separate"}, SELECTED),
    ({"keys": "two branches"}, SELECTED),
    ({"packed": True}, SELECTED),  # tiles of the spans' kernels are stored whole, across the end of a sequence
    *(({"arch": arch}, set()) for arch in (80, 100)),
    *(({"heads": heads}, set()) for heads in (2, 12, 64)),
    *(({name: 64}, set()) for name in ("dim", "value_dim")),
    ({"dtype": torch.float32}, set()),
    *(({"late": name}, set()) for name in ("q", "k", "v")),
]


@pytest.mark.parametrize(("given", "expected"), CHOICES, ids=[str(given) for given, _ in CHOICES])
def test_each_call_takes_the_kernels_that_are_for_it(monkeypatch, given, expected):
    assert ALL & {one.kernel.__name__ for one in launches(monkeypatch, **given)} == expected


EXACT = {"config": NSAConfig(slots="exact")}
PACKED = [({}, (True, True)), ({"late": "do"}, (True, False)), ({"late": "q"}, (False, False)), (EXACT, (False, False))]


@pytest.mark.parametrize(("given", "packed"), PACKED, ids=str)
def test_slots_are_read_as_they_are_written(monkeypatch, given, packed):
    of_slots = [one for one in launches(monkeypatch, **given) if one.constants.get("FREE")]
    reads = {one.kernel.__name__: one.constants["PACKED"] for one in of_slots if "PACKED" in one.constants}
    assert (reads["_merge"], reads["_sum_dq"]) == packed


@pytest.mark.parametrize("arch", [80, 90, 100, 120])
def test_sums_are_rescaled_late_on_the_accumulators_of_hopper_alone(monkeypatch, arch):
    from nsa_core.kernels.runtime.tiles import assume

    with assume(arch):
        spans = [one for one in launches(monkeypatch, arch=80) if one.kernel.__name__ == "_span_forward"]
    assert spans
    assert {one.constants["LATE"] > 0 for one in spans} == {arch == 90}


@pytest.mark.parametrize(("tokens", "programs"), [(40, 2), (8192, 132)])  # 48 rows a tile, of each of two kv heads
@pytest.mark.parametrize("has_gradient", [True, False])
def test_a_forward_alone_sums_two_branches_and_keeps_no_tensor_for_them(monkeypatch, tokens, programs, has_gradient):
    from nsa_core.kernels import operators
    from nsa_core.kernels.runtime.launch import record
    from nsa_core.kernels.shared import hopper

    monkeypatch.setattr(hopper, "arch", lambda x: 90)
    q, gates, k, v = (tensor(1, tokens, *shape) for shape in ((8, 128), (8, 3), (2, 128), (2, 128)))
    call = operators.Call(CONFIG, ("cmp", "slc", "win"), 0, 1.0, compresses=True)
    with record() as seen:
        operators.attend(q.requires_grad_(has_gradient), gates, None, [(k, v)] * 2, call)
    (forward,) = (one for one in seen if one.kernel.__name__ == "_all_spans_forward")
    merges = [one for one in seen if one.kernel.__name__ == "_merge"]
    assert forward.grid == (programs,)
    assert forward.constants["SUMMED"] is not has_gradient
    assert {one.constants["SUMMED"] for one in merges} == {not has_gradient}
    assert (forward.arguments["OW"].x is forward.arguments["OS"].x) is not has_gradient
    assert all(one.arguments["O1"] is forward.arguments["OC"].x for one in merges)
    assert all(one.arguments["O2"] is forward.arguments["OS"].x for one in merges)


@pytest.mark.parametrize("slots", ["packed", "exact"])
def test_sizes_may_be_symbols_of_a_compiler(monkeypatch, slots):
    from nsa_core.kernels import operators
    from nsa_core.kernels.runtime.launch import record
    from nsa_core.kernels.shared import hopper

    monkeypatch.setattr(hopper, "arch", lambda x: 90)

    @torch.compile(dynamic=True, fullgraph=True, backend="eager")
    def attend(q, gates, k, v):
        call = operators.Call(NSAConfig(slots=slots), ("cmp", "slc", "win"), 0, 1.0, compresses=True)
        return operators.attend(q, gates, None, [(k, v)] * 2, call)

    given = [tensor(1, 2048, *shape) for shape in ((8, 128), (8, 3), (2, 128), (2, 128))]
    with torch.no_grad(), record() as seen:
        assert attend(*given).shape == given[0].shape
    assert ("_selected_forward_hopper" in {one.kernel.__name__ for one in seen}) == (slots == "packed")
