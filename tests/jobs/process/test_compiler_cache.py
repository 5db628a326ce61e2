"""Compilers' caches: on a local disk, this user's alone."""

import errno
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from jobs.process import compiler_cache
from jobs.process.child import failure
from jobs.schema.states import PointState
from orchestrator.cli import doctor
from orchestrator.run.driver import database_problem
from orchestrator.settings import Settings


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, and no variable of the compilers."""
    for name in compiler_cache.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "local"))
    return tmp_path / "home"


def mount(monkeypatch: pytest.MonkeyPatch, folder: Path, system: str) -> None:
    mounts = [SimpleNamespace(mountpoint="/", fstype="ext4"), SimpleNamespace(mountpoint=str(folder), fstype=system)]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)


def caches(tmp_path: Path) -> set[Path]:
    return {Path(folder).parent for folder in compiler_cache.folders(tmp_path / "point").values()}


def test_a_relative_cache_of_the_user_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert caches(tmp_path) == {tmp_path / ".cache" / "nsa-bench"}


def test_caches_are_in_the_users_home_where_no_other_user_can_write(home: Path, tmp_path: Path) -> None:
    assert caches(tmp_path) == {home / "nsa-bench"}
    assert (home / "nsa-bench").stat().st_mode & 0o777 == 0o700
    (home / "nsa-bench").chmod(0o777)  # anyone may have put code there
    [elsewhere] = caches(tmp_path)
    assert elsewhere.parent == tmp_path / "local"
    elsewhere.chmod(0o777)
    assert caches(tmp_path) == {tmp_path / "point"}


def test_a_home_on_a_network_file_system_keeps_no_cache(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount(monkeypatch, home, "nfs4")
    [elsewhere] = caches(tmp_path)
    assert elsewhere.parent == tmp_path / "local"
    mount(monkeypatch, tmp_path, "nfs4")  # the folder of temporary files, too
    assert caches(tmp_path) == {tmp_path / "point"}
    mount(monkeypatch, home, "nfs4")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(home / "chosen"))
    monkeypatch.setenv("NSA_DATABASE_URL", f"sqlite:///{home / 'nsa.db'}")
    details = {finding.name: finding.detail for finding in doctor.findings(Settings())}
    assert details["compiler caches"].endswith("on nfs4")
    assert "lies on nfs4, where SQLite may lose or damage it; use Postgres" in str(database_problem(Settings()))


def raised_by(module: str, code: str) -> Exception:
    """The exception that a module's code raises, as the cause of another."""
    try:
        exec(code, {"__name__": module})
    except OSError as err:
        try:
            raise RuntimeError("backend failed") from err
        except RuntimeError as outer:
            return outer
    raise AssertionError(code)


@pytest.mark.parametrize(
    ("module", "where", "cache"),
    [
        ("plugin", "home/triton/ab/kernel.json", True),
        ("triton.runtime.cache", "", True),  # of a file that is open
        ("torch._inductor.codecache", "", True),
        ("plugin", "", False),
        ("plugin", "data/shard", False),
        ("triton.runtime.cache", "home/triton-2/kernel", False),
    ],
)
def test_a_file_lost_in_a_compilers_cache_alone_names_the_caches_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, where: str, cache: bool
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "home" / "triton"))
    path = f", {str(tmp_path / where)!r}" if where else ""
    found = failure(raised_by(module, f"raise OSError({errno.ESTALE}, 'Stale file handle'{path})"))
    assert found.state is (PointState.LOST if cache else PointState.ERROR)
    assert ("TRITON_CACHE_DIR=" in found.reason) is cache
    assert "Stale" in found.reason if cache else found.reason == "RuntimeError: backend failed"
