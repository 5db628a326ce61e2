"""Fixtures: the text of small trainings, ranks that serve several of them or one, temporary files, distributions."""

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest
from processes import descendants
from trainings import write_text
from warm_ranks import WarmRanks

from jobs.adapters import offered_peers
from jobs.measure import check
from nsa_core.backends import offered


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of forty small files."""
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def two_warm_ranks() -> Iterator[WarmRanks]:
    """A launcher of two ranks, whose processes are the same in all tests."""
    launcher = WarmRanks(2)
    yield launcher
    launcher.close()


@pytest.fixture
def started_ranks() -> Callable[[], list[psutil.Process]]:
    """Looks up the processes of the ranks that the test has started, the oldest first: warm ones were there before."""
    before = descendants(psutil.Process(), "spawn_main")
    return lambda: [process for process in descendants(psutil.Process(), "spawn_main") if process not in before]


@pytest.fixture
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder for temporary files, as a point's process has one: others empty that of the host beside this test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Install a distribution with its modules below `package`, and its entry points by group."""
    packages: list[str] = []

    def installed(package: str, modules: Mapping[str, str], version: str = "1.2", **groups: Mapping[str, str]) -> Path:
        site = tmp_path / f"site-{package}"
        for name, text in {"__init__": "", **modules}.items():
            (site / package).mkdir(parents=True, exist_ok=True)
            (site / package / f"{name}.py").write_text(text)
        info = site / f"{package}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        lines = []
        for group, entries in groups.items():
            lines += [f"[nsa_bench.{group}]", *(f"{name} = {value}" for name, value in entries.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        monkeypatch.syspath_prepend(str(site))
        packages.append(package)
        for known in caches:
            known.cache_clear()
        return site / package

    caches = offered, offered_peers, check.check_attention
    yield installed
    for known in caches:
        known.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]
