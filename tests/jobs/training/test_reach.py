"""Ranks on several hosts notice a folder of checkpoints that is not the same one on all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.training.checkpoints import exchange
from jobs.training.checkpoints.folder import CheckpointError


class TwoRanks:
    """The exchange of one of two ranks; the first one's answer is `first`."""

    ranks = 2

    def __init__(self, rank: int, first: Any = None, blind: tuple[str | None, ...] = ()) -> None:
        self.rank = rank
        self.first = first
        self._blind = blind

    def from_first(self, make: Callable[[], Any]) -> Any:
        self.first = make() if self.rank == 0 else self.first
        return self.first

    def gathered(self, value: Any) -> list[Any]:
        return [*self._blind, value]


def _check(folder: Path, ranks: Any) -> None:
    exchange.check_reach(f"file://{folder}", ranks)


def test_a_file_of_the_first_rank_that_another_does_not_see_is_an_error_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "_PATIENCE_S", 0.0)
    message = r"NSA_ARTIFACT_STORE: .* does not see what node a writes there; name a store that all nodes reach"
    with pytest.raises(CheckpointError, match=message):
        _check(tmp_path, TwoRanks(1, (f"{tmp_path}/.reach-1", "a"), blind=(None,)))
    with pytest.raises(CheckpointError, match=r"node b does not see"):
        _check(tmp_path, TwoRanks(0, blind=("b",)))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_all_ranks_see_is_removed_and_one_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    first = TwoRanks(0)
    _check(tmp_path / "new", first)
    mark, _ = first.first
    assert Path(mark).parent == tmp_path / "new"
    assert list((tmp_path / "new").iterdir()) == []
    Path(mark).touch()
    _check(tmp_path / "new", TwoRanks(1, (mark, "a")))
    (tmp_path / "file").touch()
    unwritable = TwoRanks(0)
    _check(tmp_path / "file", unwritable)
    assert unwritable.first[0] is None
    _check(tmp_path / "file", TwoRanks(1, (None, "a")))
