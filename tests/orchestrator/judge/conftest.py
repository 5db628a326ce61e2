"""The commits of made-up runs are in the history, but for one that is not."""

import pytest

from orchestrator.judge import evidence


@pytest.fixture(autouse=True)
def _made_up_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "in_history", lambda all: {each for each in all if not each.startswith("ffff")})
