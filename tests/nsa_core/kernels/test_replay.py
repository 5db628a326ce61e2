"""Replayed steps do the same as the function: with other values, in new memory, freed at the same point."""

import weakref
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_core import NSAConfig
from nsa_core.kernels.call import Call
from nsa_core.kernels.runtime import replay
from nsa_core.kernels.runtime.launch import launch, observe, record
from nsa_core.kernels.runtime.tiles import Tile
from nsa_core.kernels.runtime.tma import Tiled

CALL = Call(NSAConfig(), ("win",), 0, 1.0)


class Counted:
    """A function of tensors that counts how often its Python runs."""

    def __init__(self, function: Callable[..., list[Tensor]]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, call: Call, *tensors: Tensor) -> list[Tensor]:
        self.calls += 1
        return self.function(*tensors)


class Add:
    """Stand-in for a Triton kernel, OUT = X + number, and for its compiled form, which takes addresses."""

    __name__ = "add"
    arg_names = ("X", "OUT", "number")

    def __init__(self) -> None:
        self.addresses: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*values: Any, stream: int | None = None, **arguments: Any) -> Add:
            if not arguments:
                self.addresses.append(values[:2])
            return self

        return run


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    replay.kept.cache_clear()
    yield
    replay.kept.cache_clear()


def captured(function: Callable[..., list[Tensor]], *tensors: Tensor) -> Counted:
    """The function after two calls, of which the second was captured."""
    counted = Counted(function)
    for _ in range(2):
        replay.run(counted, CALL, tensors)
    assert counted.calls == 2
    return counted


def of(seed: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or (6, 4)), generator=torch.Generator().manual_seed(seed))


def test_operators_on_parts_of_tensors_are_done_again_with_other_values() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        total = torch.empty_like(x)
        total.copy_(x)
        total[1:, :2] += y[:5, 2:]
        ordered, order = total.t().sort(stable=True)
        return [total[2], ordered, order.int().cumsum(0), total]

    counted = Counted(function)
    for seed in range(4):
        x, y = of(seed), of(seed + 10)
        kept = x.clone(), y.clone()
        for got, want in zip(replay.run(counted, CALL, (x, y)), function(x, y), strict=True):
            assert torch.equal(got, want)
            assert got.stride() == want.stride()
        assert torch.equal(x, kept[0])
        assert torch.equal(y, kept[1])
    assert counted.calls == 2


def test_results_stay_when_it_runs_again() -> None:
    counted = Counted(lambda x: [torch.empty_like(x).copy_(x)])
    results = [replay.run(counted, CALL, (of(seed),))[0] for seed in range(4)]
    assert all(torch.equal(result, of(seed)) for seed, result in enumerate(results))


def test_tensors_that_were_one_may_be_two_later_also_within_one_memory() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        return [x * 2, y * 3, x[1:] - y[1:]]

    x, memory = of(0), of(0, 20, 4)
    counted = captured(function, x, x)
    for given in ((of(0), of(1)), (memory[4:10], memory[8:14])):
        assert all(map(torch.equal, replay.run(counted, CALL, given), function(*given)))
    assert counted.calls == 2


@pytest.mark.parametrize("other", [
    (of(0, 6, 5), CALL), (of(0).double(), CALL), (of(0, 25)[1:].view(6, 4), CALL),
    (of(0), Call(NSAConfig(window=3), ("win",), 0, 1.0)),
], ids=["shape", "dtype", "alignment", "call"])  # fmt: skip
def test_each_value_that_the_function_may_read_has_its_capture(other: tuple[Tensor, Call]) -> None:
    counted, (x, call) = captured(lambda x: [x + 1], of(0)), other
    assert torch.equal(replay.run(counted, call, (x,))[0], x + 1)
    assert counted.calls == 3


def test_no_tensor_is_kept_longer_than_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor) -> list[Tensor]:
        for _ in range(5):
            part = torch.empty(6, 4)
            part.copy_(x)
            x = torch.empty_like(part).copy_(part[:])
        return [x]

    alive: list[weakref.ref[Tensor]] = []
    most, empty = [0], torch.empty_strided

    def allocate(*args: Any, **options: Any) -> Tensor:
        made = empty(*args, **options)
        alive.append(weakref.ref(made))
        most[0] = max(most[0], sum(x() is not None for x in alive))
        return made

    counted = captured(function, of(0))
    monkeypatch.setattr(torch, "empty_strided", allocate)
    assert torch.equal(replay.run(counted, CALL, (of(0),))[0], of(0))
    assert len(alive) == 10
    assert most[0] == 2


def test_a_compiled_kernel_gets_the_addresses_of_this_time() -> None:
    kernel = Add()

    def function(x: Tensor) -> list[Tensor]:
        out = torch.empty(4, 4)
        launch(kernel, (1,), {"X": x[2:], "OUT": out[1:], "number": 3}, {}, Tile(), stage="add")
        return [out]

    counted, tensors = Counted(function), [of(seed) for seed in range(4)]
    outs = [replay.run(counted, CALL, (x,))[0] for x in tensors]
    assert counted.calls == 2
    wanted = [(x.data_ptr() + 2 * 16, out.data_ptr() + 16) for x, out in zip(tensors, outs, strict=True)]
    assert kernel.addresses == wanted[1:]  # the first launch compiles


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_a_tensor_read_by_tiles_is_described_where_it_lies_and_lives_until_then() -> None:
    """And no longer. Memory of a tensor freed too early would be given to the next one."""
    kernel, seen = Add(), []

    def function(x: Tensor) -> list[Tensor]:
        y = torch.empty(2, 5, 1, 128, dtype=torch.float16).copy_(x)
        seen.append(weakref.ref(y))
        more = torch.empty(2, 5, 1, 128, dtype=torch.float16)
        launch(kernel, (1,), {"X": Tiled(x[1:], 64), "OUT": Tiled(y[1:], 64), "number": 3}, {}, Tile(), stage="add")
        return [more]

    counted = Counted(function)
    tensors = [torch.zeros(2, 5, 1, 128, dtype=torch.float16) for _ in range(5)]
    for x in tensors[:2]:
        replay.run(counted, CALL, (x,))
    kernel.addresses.clear()  # the stand-in keeps what it was given
    assert all(one() is None for one in seen)  # the capture does not
    results = [replay.run(counted, CALL, (x,)) for x in tensors[2:]]
    assert counted.calls == 2
    for (of_x, of_y), x, (more,) in zip(kernel.addresses, tensors[2:], results, strict=True):
        assert of_x.base.data_ptr() == x[1:].data_ptr()
        assert tuple(of_x.shape) == (1, 5, 1, 128)
        assert not 0 <= of_y.base.data_ptr() - more.data_ptr() < more.nbytes


@pytest.mark.parametrize("watching", [record, observe])
def test_the_function_itself_runs_while_launches_are_watched(watching: Callable[[], Any]) -> None:
    counted = captured(lambda x: [x + 1], of(0))
    with watching():
        replay.run(counted, CALL, (of(0),))
    assert counted.calls == 3


@pytest.mark.parametrize("failing", [1, 2])
def test_a_call_that_fails_leaves_no_capture(failing: int) -> None:
    def function(x: Tensor) -> list[Tensor]:
        if counted.calls == failing:
            raise torch.OutOfMemoryError
        return [x + 1]

    counted = Counted(function)
    for call in range(1, 6):
        if call == failing:
            with pytest.raises(torch.OutOfMemoryError):
                replay.run(counted, CALL, (of(0),))
        else:
            assert torch.equal(replay.run(counted, CALL, (of(0),))[0], of(0) + 1)
    assert counted.calls == 3


def test_no_gradient_flows_through_any_call() -> None:
    counted = Counted(lambda x: [x * 2])
    calls = [replay.run(counted, CALL, (of(0).requires_grad_(),))[0] for _ in range(4)]
    assert not any(x.requires_grad for x in calls)
