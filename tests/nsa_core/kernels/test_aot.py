"""Every kernel compiles for sm80 and sm90, without a GPU, within its shared memory and without spills.

compiled_kernels.csv holds what `make aot` compiled; here its launches are compared with those of today's source, and a
sample of them is compiled again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import astuple
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from pkgutil import walk_packages
from types import FunctionType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from nsa_core.kernels.aot.resources import Usage

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
PACKAGE = "nsa_core.kernels"
TABLE = Path(__file__).with_name("compiled_kernels.csv")


@pytest.fixture(scope="module")
def kernels() -> set[str]:
    """Kernels of the package: its Triton functions except for those that only other Triton functions call."""
    from nsa_core.kernels.aot.resources import globals_named, unwrapped

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
        {unwrapped(x) for f in functions for _, x in globals_named(f.__code__, f) if unwrapped(x) in device}
        for functions in (host, device)
    )
    return {f"{f.__module__.removeprefix(f'{PACKAGE}.')}.{f.__name__}" for f in device - (called - launched)}


def _is_triton(x: Any) -> bool:
    from triton.runtime.jit import KernelInterface

    return isinstance(x, KernelInterface)


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        yield pool


@pytest.fixture(scope="module")
def usages(pool: ProcessPoolExecutor) -> dict[str, Usage]:
    """Resources by the launch's key, of all that the operator launches today."""
    from nsa_core.kernels.aot import __main__ as aot

    keys, known = aot.wanted(aot.CASES, pool), aot.read(TABLE)
    new, gone = sorted(keys.keys() - known.keys()), sorted(known.keys() - keys.keys())
    assert not new, f"kernels, their constants or Triton changed, {len(new)} launches are new: run `make aot`"
    assert not gone, f"{len(gone)} launches are made no more: run `make aot`"
    return known


@pytest.mark.parametrize("arch", [80, 90])
def test_every_kernel_fits_the_device(arch: int, kernels: set[str], usages: dict[str, Usage]) -> None:
    on_it = [usage for usage in usages.values() if usage.arch == arch]
    assert [usage for usage in on_it if not usage.fits] == []
    assert {usage.kernel for usage in on_it} == {name for name in kernels if arch == 90 or "_hopper." not in name}


@pytest.fixture(scope="module")
def compiled(usages: dict[str, Usage], pool: ProcessPoolExecutor) -> dict[str, Usage]:
    """Compiled kernels: launches of the lowest keys, and of a group of 128 heads.

    Keys are hashes: the lowest are others whenever kernels change.
    """
    from nsa_core.kernels.aot import __main__ as aot

    given = aot.wanted([aot.CompileCase(90, 128, 1, 128, 128, "bf16")], pool, "_selected_backward")
    for key in sorted(usages)[:4]:
        given[key] = aot.CompileCase(*astuple(usages[key])[:6])
    return dict(aot.compiled(given, pool))


def test_the_table_has_what_the_compiler_says(usages: dict[str, Usage], compiled: dict[str, Usage]) -> None:
    assert {key: compiled.get(key) for key in sorted(usages)[:4]} == {key: usages[key] for key in sorted(usages)[:4]}


def test_its_command_runs(
    pool: ProcessPoolExecutor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from nsa_core.kernels.aot import __main__ as aot

    monkeypatch.setattr(aot, "ProcessPoolExecutor", lambda **_: nullcontext(pool))  # its own would import Triton anew
    options = ["--heads", "12/2", "--dim", "64", "--arch", "80", "--kernel", "none"]
    monkeypatch.setattr(sys, "argv", ["aot", *options])
    assert aot.main() == 0
    assert capsys.readouterr().out.startswith("0 kernels, 0 that do not fit")


def test_a_key_is_of_what_is_compiled_and_of_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of a constant that a called function names changes it; a comment, a docstring or a line do not."""
    from nsa_core.kernels.aot import resources
    from nsa_core.kernels.shared import hopper
    from nsa_core.kernels.span import spans_hopper

    def text() -> str:
        resources._sources.cache_clear()
        return str(resources._sources(spans_hopper._all_spans_forward))

    before = text()
    source = resources.inspect.getsource
    monkeypatch.setattr(resources.inspect, "getsource", lambda x: "\n\n" + source(x) + "    # more\n")
    assert text() == before
    monkeypatch.setattr(hopper, "ROWS", 128)
    assert text() != before
    resources._sources.cache_clear()  # of what no other test may find


def test_keys_stay_in_registers_on_hopper(usages: dict[str, Usage]) -> None:
    """At head dim 128 k·q reads its keys from registers, as dv and dk read p and ds; else a fifth of products would."""
    found = [one for one in usages.values() if (one.arch, one.heads, one.kv_heads) == (90, 32, 8)]
    shares = [one.held / one.products for one in found if one.kernel.endswith("._span_backward_kv")]
    assert shares
    assert min(shares) >= 0.5


def test_a_group_of_128_heads_fits_a_block_of_hopper(compiled: dict[str, Usage]) -> None:
    """A tile holds a whole group: with as many stages as smaller groups have, it took 314,368 bytes."""
    from nsa_core.kernels.aot.resources import SHARED

    shared = [one.shared for one in compiled.values() if (one.heads, one.kv_heads) == (128, 1)]
    assert shared
    assert max(shared) <= SHARED[90]
