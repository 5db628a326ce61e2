"""Every kernel compiles for sm80 and sm90, without a GPU, within its shared memory and without spills."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pkgutil import walk_packages
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
PACKAGE = "nsa_core.kernels"


def check(*options: str) -> subprocess.CompletedProcess[str]:
    """The check, in a process of its own: kernels made for the interpreter cannot be compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", f"{PACKAGE}.aot", *options]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@functools.cache
def lines(arch: int) -> list[str]:
    """Output of the check for one device."""
    done = check("--arch", str(arch))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def kernels() -> set[str]:
    """Kernels of the package: its Triton functions except for those that only other Triton functions call."""
    modules = [import_module(found.name) for found in walk_packages(import_module(PACKAGE).__path__, f"{PACKAGE}.")]
    device, host = set[FunctionType](), set[FunctionType]()
    for module in modules:
        for x in vars(module).values():
            if getattr(x, "__module__", None) == module.__name__:
                if _is_triton(x):
                    device.add(x.fn)
                elif isinstance(x, FunctionType):
                    host.add(x)
    launched, called = (
        {f for x in functions for f in _named(x.__code__, x.__globals__)} for functions in (host, device)
    )
    return {f"{f.__module__.removeprefix(f'{PACKAGE}.')}.{f.__name__}" for f in device - (called - launched)}


def _named(code: CodeType, variables: Mapping[str, Any]) -> Iterator[FunctionType]:
    """Triton functions that the code refers to, as global variables or as attributes of modules."""
    for name in code.co_names:
        x = variables.get(name)
        found: list[Any] = (
            [getattr(x, attribute, None) for attribute in code.co_names] if isinstance(x, ModuleType) else [x]
        )
        yield from (y.fn for y in found if _is_triton(y))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _named(constant, variables)


def _is_triton(x: Any) -> bool:
    from triton.runtime.jit import KernelInterface

    return isinstance(x, KernelInterface)


def test_kernels_are_told_from_the_functions_that_they_call(kernels: set[str]) -> None:
    assert {"merge._merge", "decode.step._decode_window", "span.forward_hopper._all_spans_forward"} <= kernels
    assert not {"merge._slot", "decode.choose.best_of_chunk", "shared.ranges.load_rows"} & kernels


@pytest.mark.parametrize("arch", [80, 90])
def test_every_kernel_fits_the_device(arch: int, kernels: set[str]) -> None:
    expected = {name for name in kernels if arch == 90 or "_hopper." not in name}
    assert {word for line in lines(arch) for word in line.split() if "._" in word} == expected


def test_keys_stay_in_registers_on_hopper() -> None:
    """At head dim 128 k·q reads its keys from registers, as dv and dk read p and ds; else a fifth of products would."""
    found = [line for line in lines(90) if re.search(r"sm90 32/8 .*_span_backward_kv", line)]
    shares = [int(held) / int(total) for held, total in re.findall(r"held (\d+)/(\d+)", "\n".join(found))]
    assert len(shares) == len(found) > 0
    assert min(shares) >= 0.5


def test_a_group_of_128_heads_fits_a_block_of_hopper() -> None:
    """A tile holds a whole group: with as many stages as smaller groups have, it took 314,368 bytes."""
    told = check("--arch", "90", "--heads", "128/1", "--kernel", "_selected_backward").stdout
    shared = [int(found) for found in re.findall(r"_selected_backward +shared +(\d+)", told)]
    assert shared, told
    assert max(shared) <= 227 << 10
