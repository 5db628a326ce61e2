"""Where Ray's token comes from, who can read it, and which cluster of a host is this user's."""

import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.errors import UserError
from orchestrator.execute import ray_access
from orchestrator.settings import Settings

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The token's default place in a home of the test's own; there is none yet."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # so that what the test sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".ray" / "auth_token"


def test_a_first_cluster_makes_a_token_that_the_next_one_keeps(token: Path) -> None:
    ray_access.send_token()
    assert "RAY_AUTH_MODE" not in os.environ  # there is nothing to send
    expected = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    assert ray_access.environment_of_a_cluster() == expected
    made = token.read_text()
    assert len(made) == 64
    assert ray_access.environment_of_a_cluster() == expected
    assert token.read_text() == made
    assert os.listdir(token.parent) == ["auth_token"]
    ray_access.send_token()
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_a_users_own_token_is_kept_and_taken_from_others_reach(token: Path) -> None:
    token.parent.mkdir()
    token.write_text("mine\n")
    token.chmod(0o644)
    assert ray_access.token_problem() == f"{token}: other users can read this token"
    ray_access.environment_of_a_cluster()
    assert (token.read_text(), stat.S_IMODE(token.stat().st_mode)) == ("mine\n", 0o600)
    assert ray_access.token_problem() is None


def test_variables_of_ray_decide(token: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "elsewhere"))
    assert ray_access.environment_of_a_cluster()["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / "elsewhere")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 64)
    assert ray_access.environment_of_a_cluster() == {"RAY_AUTH_MODE": "token"}
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert ray_access.environment_of_a_cluster() == {}
    ray_access.send_token()
    assert os.environ["RAY_AUTH_MODE"] == "disabled"
    assert not token.exists()


def _empty(path: Path) -> None:
    path.write_text("\n")


def _given_away(path: Path) -> None:
    path.write_text("known to another")
    os.chown(path, 65534, 65534)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_empty, "is empty; remove it"),
        (Path.mkdir, "cannot be made or read"),
        pytest.param(os.mkfifo, "cannot be made or read", marks=pytest.mark.timeout(20)),
        pytest.param(_given_away, "another user owns this token", marks=as_root),
    ],
)
def test_a_token_of_no_use_is_named(token: Path, spoil: Callable[[Path], None], said: str) -> None:
    token.parent.mkdir()
    spoil(token)
    with pytest.raises(UserError, match=rf"^RAY_AUTH_TOKEN_PATH: '{token}': {said}"):
        ray_access.environment_of_a_cluster()


@as_root
def test_a_folder_that_another_user_put_there_is_neither_used_nor_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    settings = Settings(home=tmp_path / "home")
    inside = ray_access.folder_of_a_new_cluster(settings)
    inside.mkdir()
    with listening() as address:
        (inside / "ray_current_cluster").write_text(address)
        assert ray_access.local_address(settings) == address
        os.chown(inside.parent, 65534, 65534)
        assert ray_access.local_address(settings) is None
    with pytest.raises(UserError, match=r"^RAY_TMPDIR: '.*': belongs to another user"):
        ray_access.folder_of_a_new_cluster(settings)


@contextmanager
def listening(host: str = "127.0.0.1") -> Iterator[str]:
    """A listening socket; its address on loopback."""
    with socket.create_server((host, 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"
