"""A profile on a CUDA device: each stage's range has its kernels' time, in calls that are replayed, too."""

import torch

from jobs.profile import profile_call
from nsa_core import NSAConfig, nsa_attention
from nsa_core.kernels.runtime.launch import observe


def test_the_ranges_of_stages_have_the_time_of_their_kernels():
    device = torch.device("cuda")
    options = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    q, k, v = (torch.randn(1, 4096, heads, 64, **options) for heads in (12, 2, 2))
    gates = torch.rand(1, 4096, 12, 3, **options)

    def call():
        out = nsa_attention(q, k, v, gates, NSAConfig(), backend="triton")
        torch.autograd.grad(out.sum(), [q, k, v, gates])

    with observe() as made:
        call()
    stages = {one.stage for one in made}
    for _ in range(3):
        call()  # captured, then replayed
    profile_call(call, device)  # a process's first profile may miss kernels
    found = profile_call(call, device)
    assert found.ranges_ms.keys() == stages | {"cmp_slc_win"}
    assert min(found.ranges_ms.values()) > 0
    forward = {name for name in stages if "backward" not in name}
    assert sum(found.ranges_ms[name] for name in forward) <= 1.001 * found.ranges_ms["cmp_slc_win"]
    of_stages = sum(found.ranges_ms[name] for name in stages)
    assert 0.5 * found.busy_ms < of_stages <= 1.001 * found.busy_ms  # the rest: PyTorch's own kernels
