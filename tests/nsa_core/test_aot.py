"""Every kernel compiles for sm80 and sm90, without a GPU, within its shared memory and without spills."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
KERNELS = {
    "compress._mean",
    "compress._spread",
    "span._span_forward",
    "span_hopper._all_spans_forward",
    "span_queries._span_backward_q",
    "span_queries_hopper._all_spans_backward_q",
    "span_keys._span_backward_kv",
    "span_keys._sum_chunks",
    "scores._importance",
    "scores._choose",
    "selected._selected_forward",
    "selected_hopper._selected_forward_hopper",
    "selected._selected_backward",
    "selected_backward_hopper._selected_backward_hopper",
    "selected._sum_items",
    "inverse._sort_keys",
    "inverse._count",
    "inverse._assign",
    "merge._merge",
    "merge._prepare",
    "merge._sum_dq",
    "decode_take._decode_take",
    "decode_take._decode_take_dense",
    "decode._decode_compressed",
    "decode._decode_window",
    "decode._decode_selected",
    "decode._decode_dense",
    "decode_merge._decode_merge",
    "heads._heads",
    "swiglu._swiglu",
    "swiglu._swiglu_backward",
    "cross_entropy._cross_entropy",
}


@pytest.fixture(scope="module")
def lines():
    """What the check prints, in a process of its own: kernels imported for the interpreter cannot be compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "nsa_core.kernels.aot"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_every_kernel_fits_the_device(lines):
    assert {word for line in lines for word in line.split() if "._" in word} == KERNELS


def test_keys_stay_in_registers_on_hopper(lines):
    """Of the products towards keys at head dim 128 those of keys with queries, besides dv's and dk's: else a fifth."""
    found = [line for line in lines if re.search(r"sm90 32/8 .*_span_backward_kv", line)]
    shares = [int(held) / int(total) for held, total in re.findall(r"held (\d+)/(\d+)", "\n".join(found))]
    assert len(shares) == len(found) > 0
    assert min(shares) >= 0.5
