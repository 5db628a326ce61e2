"""`nsa init` and `nsa import --reference`: files that come with the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ray._private.runtime_env.packaging import get_uri_for_directory

from orchestrator.cli import commands
from orchestrator.run import driver
from orchestrator.store import Store, importer, queries

OUR_RUNS = Path(__file__).resolve().parents[3] / "docs" / "results" / "data"
READY = Path(__file__).resolve().parents[3] / "jobs" / "configs"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NSA_HOME", str(tmp_path / "home"))
    return tmp_path


def nsa(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr("sys.argv", ["nsa", *args])
    with pytest.raises(SystemExit) as ended:
        commands.main()
    return int(ended.value.code or 0)


def test_init_writes_every_ready_spec_and_each_can_be_run(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nsa(monkeypatch, "init") == 0
    out = capsys.readouterr().out
    written = sorted(path.name for path in (here / "specs").iterdir())
    assert written == sorted(path.name for path in READY.glob("*.yaml"))
    assert f"wrote {len(written)} specs to specs/" in out
    for spec in re.findall(r"nsa submit (\S+)", out):
        assert (here / spec).is_file()
    for name in written:
        assert driver.main([f"specs/{name}", "--dry-run"]) == 0, name


def test_init_never_overwrites(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine").mkdir()
    (here / "mine" / "demo.yaml").write_text("# my own")
    (here / "mine" / "drill.yaml").symlink_to(here / "gone")
    assert nsa(monkeypatch, "init", "mine") == 0
    assert "kept your own: demo.yaml, drill.yaml" in capsys.readouterr().out
    assert (here / "mine" / "demo.yaml").read_text() == "# my own"
    assert not (here / "gone").exists()
    assert (here / "mine" / "bench.yaml").read_bytes() == (READY / "bench.yaml").read_bytes()


def test_init_into_a_file_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "specs").write_text("a file")
    assert nsa(monkeypatch, "init") == 2
    assert capsys.readouterr().err.startswith("error: FOLDER: 'specs': cannot be written")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, b"# Not sent by `ray job submit --working-dir`: secrets stay here.\n.env\n"),
        (b"", b".env\n"),
        (b"*.log", b"*.log\n.env\n"),
        (b" .env\r\n", b" .env\r\n.env\n"),
        (b".envrc\n.env ", b".envrc\n.env "),
        (b"/.env\r\n*.log\r\n", b"/.env\r\n*.log\r\n"),
    ],
)
def test_init_keeps_env_out_of_what_ray_sends(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    before: bytes | None,
    after: bytes,
) -> None:
    ignored = here / ".rayignore"
    if before is not None:
        ignored.write_bytes(before)
    assert nsa(monkeypatch, "init") == 0
    assert ignored.read_bytes() == after
    assert (".rayignore: " in capsys.readouterr().out) == (before != after)
    (here / ".env").write_text("RAY_AUTH_TOKEN=a")
    uri = get_uri_for_directory(str(here), include_gitignore=False)
    (here / ".env").write_text("RAY_AUTH_TOKEN=another")
    assert get_uri_for_directory(str(here), include_gitignore=False) == uri


def test_init_warns_where_it_cannot_keep_env_from_ray(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / ".rayignore").symlink_to(here / "gone")
    assert nsa(monkeypatch, "init") == 0
    assert "warning: .rayignore: cannot be written (No such file or directory); add the l" in capsys.readouterr().err
    assert not (here / "gone").exists()


def test_a_ready_spec_that_is_not_there_yet_leads_to_init(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nsa(monkeypatch, "submit", "jobs/configs/demo.yaml") == 2
    assert "write the ready specs with `nsa init`, then give specs/demo.yaml" in capsys.readouterr().err


def test_reference_data_is_imported_from_the_package(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Store small journals alone: tests/deploy/test_results.py stores all."""
    given, store_file = list[str](), importer.import_file

    def import_small(store: Store, path: Path) -> importer.ImportSummary | None:
        given.append(path.name)
        return store_file(store, path) if path.suffix == ".csv" or path.stat().st_size < 7000 else None

    monkeypatch.setattr(importer, "import_file", import_small)
    assert nsa(monkeypatch, "import", "--reference") == 0
    with Store.open(f"sqlite:///{here / 'home' / 'nsa.db'}", readonly=True) as store:
        assert len(queries.runs(store, origin="reported", limit=None)) >= 3
        ours = queries.runs(store, origin="measured", limit=None)
    journals = {path.name: path.stat().st_size for path in OUR_RUNS.glob("*.jsonl.gz")}
    assert {name for name in given if name.endswith(".jsonl.gz")} == set(journals)
    assert set(ours["run_id"]) == {name.removesuffix(".jsonl.gz") for name, size in journals.items() if size < 7000}
    assert "NVIDIA H200" in set(ours["gpu"])


def test_import_without_a_file_names_both_ways(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nsa(monkeypatch, "import") == 2
    assert "error: FILE: is missing; name a journal or a CSV, or give --reference" in capsys.readouterr().err
