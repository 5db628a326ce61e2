"""A kernel is started on its tensors' device, seen, and compiled once for all launches that it cannot tell apart.

So the operator compiles next to nothing for a length that is new to it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from threading import Thread
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from nsa_core import NSAConfig
from nsa_core.cache import DenseCache, NSACache
from nsa_core.errors import BackendError
from nsa_core.kernels.runtime.launch import Started, launch, observe, record
from nsa_core.kernels.runtime.tiles import Tile
from nsa_core.kernels.runtime.tma import Tiled


class Kernel:
    """Stand-in for a Triton kernel: records each start as (what it was compiled for, grid, arguments, device)."""

    __name__ = "kernel"
    arg_names = ("X", "size", "D")

    def __init__(self) -> None:
        self.compiled = 0
        self.started: list[tuple[Any, ...]] = []
        self.tensors: list[Any] = []  # or their addresses

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_run(X: Any, size: int, D: int, **options: Any) -> Compiled:  # noqa: N803
            self.compiled += 1
            made = Compiled(self, self.compiled)
            made[grid](X, size, D)
            return made

        return compile_and_run


class Compiled:
    """Stand-in for a kernel compiled by Triton."""

    def __init__(self, kernel: Kernel, number: int) -> None:
        self.kernel, self.number = kernel, number

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*values: Any) -> None:
            self.kernel.tensors.append(values[0])
            self.kernel.started.append((self.number, grid, values[1:], torch.cuda.current_device()))

        return run


class OfDevice:
    """Stand-in for a tensor on a GPU."""

    is_meta = False

    def __init__(self, index: int) -> None:
        self.index = index

    def get_device(self) -> int:
        return self.index


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextmanager
    def device(index: int) -> Iterator[None]:
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)


def test_a_kernel_starts_on_the_device_of_its_tensors() -> None:
    kernel = Kernel()
    for index in (0, 1, 1, 0):
        launch(kernel, (3, 2), {"X": OfDevice(index), "size": 32}, {"D": 64}, Tile(), stage="s")
    assert [start[-1] for start in kernel.started] == [0, 1, 1, 0]
    assert [start[0] for start in kernel.started] == [1, 2, 2, 1], "what was compiled for one is not run on the other"
    assert torch.cuda.current_device() == 0


def _launch(kernel: Kernel, grid: tuple[int, ...] = (1,)) -> None:
    launch(kernel, grid, {"X": torch.zeros(1), "size": 1}, {"D": 3}, Tile(), stage="merge")


def test_launches_are_made_and_seen_from_every_thread_while_somebody_asks() -> None:
    kernel = Kernel()
    _launch(kernel)
    with observe() as seen:
        _launch(kernel)
        thread = Thread(target=_launch, args=(kernel,))
        thread.start()
        thread.join()
        _launch(kernel, (0,))  # an empty grid runs nothing
    _launch(kernel)
    assert seen == [Started("kernel", "merge", {"D": 3})] * 2
    assert len(kernel.started) == 4


def test_a_range_of_a_stage_is_an_operation_as_a_kernel_on_a_gpu_needs_it() -> None:
    """The profiler gives a kernel to the innermost operation: an annotation in autograd's function would get none."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as watch:
        _launch(Kernel())
    (found,) = [event for event in watch.events() or () if event.name == "nsa_core.merge"]
    assert not found.is_user_annotation


def test_it_is_compiled_anew_only_for_what_it_is_compiled_for() -> None:
    """Whole numbers count by needing 64 bits; tensors by dtype and alignment to 16 bytes."""
    kernel, x = Kernel(), torch.zeros(8)
    launches = [
        (x, 32, 64, 1),
        (x[4:], 48, 64, 1),
        (x, 33, 64, 1),
        (x, 1, 64, 1),
        (x, 1 << 40, 64, 2),
        (x[1:], 32, 64, 3),
        (x[2:], 35, 64, 3),
        (x.half(), 32, 64, 4),
        (x, 32, 128, 5),
        (x, 64, 64, 1),
    ]
    for tensor, size, dim, _ in launches:
        launch(kernel, (5,), {"X": tensor, "size": size}, {"D": dim}, Tile(), stage="s")
    for tile in (Tile(warps=8), Tile(stages=2), Tile(registers=64)):
        launch(kernel, (5,), {"X": x, "size": 32}, {"D": 64}, tile, stage="s")
    assert [start[0] for start in kernel.started] == [*(compiled for *_, compiled in launches), 6, 7, 8]
    assert [kernel.tensors[i] for i in (1, 3, 9)] == [x[4:].data_ptr(), x.data_ptr(), x.data_ptr()]
    assert [start[2] for start in kernel.started[:3]] == [(32, 64), (48, 64), (33, 64)]


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_a_tensor_by_tiles_is_one_of_what_it_is_compiled_for() -> None:
    """Dtype, head dim and the tile's rows and heads count; the tensor's sizes and address do not."""
    kernel, x = Kernel(), torch.zeros(2, 64, 8, 128, dtype=torch.bfloat16)
    launches = [
        (Tiled(x, 16, 4), 1),
        (Tiled(x[1:, 5:, :4], 16, 4), 1),
        (Tiled(x, 32, 4), 2),
        (Tiled(x, 16, 8), 3),
        (Tiled(x.half(), 16, 4), 4),
        (Tiled(x.view(2, 64, 16, 64), 16, 4), 5),
        (Tiled(x[:1], 16, 4), 1),
    ]
    for tiled, _ in launches:
        launch(kernel, (5,), {"X": tiled, "size": 32}, {"D": 64}, Tile(), stage="s")
    assert [start[0] for start in kernel.started] == [compiled for _, compiled in launches]
    assert [described.block_shape for described in kernel.tensors[:3]] == [[1, 16, 4, 128]] * 2 + [[1, 32, 4, 128]]


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_a_tile_that_exceeds_the_gpu_is_told_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that were not compiled ahead of time: the user reads what to do, not that stages may be fewer."""
    from triton import OutOfResources

    def exceed(kernel: Kernel, grid: tuple[int, ...]) -> Any:
        def compile_and_run(**given: Any) -> None:
            raise OutOfResources(196_608, 166_912, "shared memory")

        return compile_and_run

    monkeypatch.setattr(Kernel, "__getitem__", exceed)
    said = r"^backend: 'triton': kernel takes more shared memory than this GPU has \(196608, at most 166912\); use "
    with pytest.raises(BackendError, match=said + 'backend="chunked"'):
        launch(Kernel(), (3, 2), {"X": torch.zeros(8), "size": 32}, {"D": 64}, Tile(), stage="s")


def compiled_for(batch: int, seq_len: int) -> set[tuple[str, str, Tile, str]]:
    """Kernels, with constants and types, of forward and backward of bfloat16 attention, 12 query heads to 2."""
    from nsa_core.kernels import operators

    config, options = NSAConfig(), {"dtype": torch.bfloat16, "device": "meta", "requires_grad": True}
    q, k, v, gates = (torch.empty(batch, seq_len, *tail, **options) for tail in ((12, 64), (2, 64), (2, 64), (12, 3)))
    call = operators.Call(config, ("cmp", "slc", "win"), 0, 0.125)
    with record() as seen:
        out = operators.attend(q, gates, None, [operators.compress(k, v, config), (k, v), (k, v)], call)
        torch.autograd.grad(out, [q, k, v, gates], torch.empty_like(out))
    types = [str([x.dtype for x in one.arguments.values() if isinstance(x, torch.Tensor)]) for one in seen]
    return {(one.kernel.__name__, str(one.constants), one.tile, of) for one, of in zip(seen, types, strict=True)}


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_fifty_shapes_compile_what_three_lengths_do() -> None:
    known = compiled_for(1, 512) | compiled_for(1, 2048) | compiled_for(1, 65_536)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        batch, seq_len = (int(torch.randint(1, most, (), generator=generator)) for most in (8, 40_000))
        assert not compiled_for(batch, seq_len) - known, (batch, seq_len)
    assert len(known) > 15


def step_compiled_for(capacity: int) -> set[tuple[str, str, Tile]]:
    """Kernels, with their constants, of decoding steps of 2 sequences over caches with this capacity."""
    from nsa_core.kernels.decode import step

    config, meta = NSAConfig(), {"dtype": torch.bfloat16, "device": "meta"}
    q, k, gates = (torch.empty(2, *tail, **meta) for tail in ((12, 64), (3, 2, 64), (12, 3)))
    sparse, dense = NSACache(config, capacity), DenseCache(capacity)
    first = torch.empty(2, 1, 2, 64, **meta)
    sparse.take((first, first, first), (first, first, first))
    sparse.add_compressed(first[:, :0], first[:, :0])
    dense.take(first, first)
    sparse.frequencies = dense.frequencies = torch.empty(32, device="meta")
    with record() as seen:
        step.attend(step.take(q, k, k, sparse), gates, sparse)
        step.attend_dense(step.take_dense(q, k[:, 0], k[:, 0], dense), dense)
    return {(one.kernel.__name__, str(one.constants), one.tile) for one in seen}


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("capacities", [(5_000, 7_000), (70_000, 100_000)])
def test_a_somewhat_larger_cache_compiles_nothing(capacities: tuple[int, int]) -> None:
    before, after = (step_compiled_for(capacity) for capacity in capacities)
    assert after == before
    assert len(before) == 8


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "free"), [(32, 32, 128, 13), (64, 64, 64, 13), (64, 4, 128, 1), (32, 8, 256, 3)]
)
def test_the_rows_of_a_chunk_are_counted_in_32_bits(heads: int, kv_heads: int, dim: int, free: int) -> None:
    """All heads lie between two rows of a group, and a chunk with few slots a row has very many rows."""
    inverse = pytest.importorskip("nsa_core.kernels.selected.inverse")
    q = torch.empty(1, 1 << 20, heads, dim, dtype=torch.bfloat16, device="meta")
    rows = inverse.slot_rows(q, kv_heads, dim, free)
    assert 0 < rows * heads * dim < 1 << 31
