"""Every kernel compiles for sm80 and sm90, without a GPU, within its shared memory and without spills."""

import functools
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
KERNELS = {
    "backward_hopper._selected_backward_hopper",
    "backward_kv._span_backward_kv",
    "backward_kv._sum_chunks",
    "backward_q._span_backward_q",
    "backward_q_hopper._all_spans_backward_q",
    "compress._mean",
    "compress._spread",
    "cross_entropy._cross_entropy",
    "forward._span_forward",
    "forward_hopper._all_spans_forward",
    "forward_hopper._selected_forward_hopper",
    "heads._heads",
    "inverse._assign",
    "inverse._count",
    "inverse._sort_keys",
    "kernels._selected_backward",
    "kernels._selected_forward",
    "kernels._sum_items",
    "merge._decode_merge",
    "merge._merge",
    "merge._prepare",
    "merge._sum_dq",
    "scores._choose",
    "scores._importance",
    "step._decode_compressed",
    "step._decode_dense",
    "step._decode_selected",
    "step._decode_window",
    "swiglu._swiglu",
    "swiglu._swiglu_backward",
    "take._decode_take",
    "take._decode_take_dense",
}
HOPPER = {name for name in KERNELS if "_hopper." in name}


@functools.cache
def lines(arch):
    """What the check prints of a device, in a process of its own: kernels for the interpreter cannot be compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "nsa_core.kernels.aot", "--arch", str(arch)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(("arch", "kernels"), [(80, KERNELS - HOPPER), (90, KERNELS)], ids=["sm80", "sm90"])
def test_every_kernel_fits_the_device(arch, kernels):
    assert {word for line in lines(arch) for word in line.split() if "._" in word} == kernels


def test_keys_stay_in_registers_on_hopper():
    """Of the products towards keys at head dim 128 those of keys with queries, besides dv's and dk's: else a fifth."""
    found = [line for line in lines(90) if re.search(r"sm90 32/8 .*_span_backward_kv", line)]
    shares = [int(held) / int(total) for held, total in re.findall(r"held (\d+)/(\d+)", "\n".join(found))]
    assert len(shares) == len(found) > 0
    assert min(shares) >= 0.5
