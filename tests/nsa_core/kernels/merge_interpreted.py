"""The merge of slots and branches alone, in Triton's interpreter: sums, with slots packed and unpacked."""

import pytest
import torch
from kernel_interpreter import MARKS

from nsa_core import NSAConfig

pytestmark = MARKS
BRANCHES = ("cmp", "slc", "win")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_sum_of_two_ways_and_the_third_make_the_bits_of_three(dtype):
    from nsa_core.kernels.merge import Rows, gated_sum

    generator = torch.Generator().manual_seed(0)
    one, two, three = torch.randn(3, 2, 30, 4, 16, generator=generator).to(dtype)
    gates = torch.rand(2, 30, 4, 3, generator=generator)
    rows, results = Rows(4, 0, 30, 0, 60), [torch.empty_like(one) for _ in range(2)]
    gated_sum([one, two, three], gates, results[0], rows)
    both = torch.addcmul(three.float() * gates[..., 2:], one.float(), gates[..., :1]).to(dtype)
    gated_sum([both, two], gates, results[1], rows)
    exact = sum(x.double() * gates[..., i : i + 1].double() for i, x in enumerate((one, two, three)))
    assert (results[0] - exact).norm() < {torch.float16: 1e-3, torch.float32: 1e-6}[dtype] * exact.norm()
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0 if dtype == torch.float16 else 1e-6)


def packed(numbers, exponents):
    """Packed form (shared/packed_slots.py) of rows of integers [..,128] whose blocks have exponents [..,4]."""

    def as_int32(x):
        return ((x + 2**31) % 2**32 - 2**31).to(torch.int32)

    w_j_t_b = (numbers + 2048).unflatten(-1, (4, 4, 4, 2))
    pairs = (w_j_t_b[..., 0] + w_j_t_b[..., 1] * 4096).movedim(-1, -3)  # [.., block, run, pair]
    words = [pairs[..., k] + (pairs[..., 3] // 256**k % 256) * 2**24 for k in range(3)]
    return as_int32(torch.stack(words, -3).flatten(-3)), as_int32((exponents * 256 ** torch.arange(4)).sum(-1))


@pytest.fixture
def packed_and_plain():
    """Slots, packed and not, of two groups of two heads in rows 2.. of 6 of two sequences, without first and last."""
    from nsa_core.kernels.merge import Rows, Slots

    generator = torch.Generator().manual_seed(0)
    shape, rows = (14, 3, 2), Rows(2, 2, 4, 1, 14)
    numbers = torch.randint(-2047, 2048, (*shape, 128), generator=generator)
    exponents = torch.randint(120, 132, (*shape, 4), generator=generator)
    plain = numbers.unflatten(-1, (4, 4, 4, 2)) * (exponents - 137.0).exp2()[..., None, None, :, None]
    lse = torch.randn(shape, generator=generator)
    return [Slots(*packed(numbers, exponents), lse, rows), Slots(plain.flatten(-4), None, lse, rows)]


def test_packed_slots_are_summed(packed_and_plain):
    from nsa_core.kernels.call import Call
    from nsa_core.kernels.merge import sum_dq

    packed, plain = packed_and_plain
    got = torch.randn(2, 6, 4, 128)
    want = got.clone()
    for n, row in enumerate(plain.parts.sum(1), start=1):  # by sequence, group and row
        b, group, i = n // 8, n // 4 % 2, n % 4
        want[b, 2 + i, 2 * group : 2 * group + 2] += row
    sum_dq(packed, got, Call(NSAConfig(), BRANCHES, 0, 1.0))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("keeps", [True, False])
def test_packed_slots_are_merged(packed_and_plain, keeps):
    from nsa_core.kernels.call import Call
    from nsa_core.kernels.merge import gated_sum

    call = Call(NSAConfig(), BRANCHES, 0, 1.0, keeps=keeps)
    outputs, gates, lse = torch.randn(3, 2, 6, 4, 128), torch.rand(2, 6, 4, 3), torch.randn(2, 6, 4)
    results = []
    for slots in packed_and_plain:
        given, lses, out = [x.clone() for x in outputs], lse.clone(), torch.zeros(2, 6, 4, 128)
        gated_sum(given, gates, out, slots.rows, slots, 1, lses, call)
        results.append([*given, lses, out])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)
    assert torch.equal(results[0][1], outputs[1]) != keeps
