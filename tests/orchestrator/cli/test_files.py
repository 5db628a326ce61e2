"""`nsa init`, `import --reference` and `artifacts`: what is written, and what a hostile database cannot reach."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from nsa_command import Nsa
from ray._private.runtime_env.packaging import get_uri_for_directory

from jobs.schema.files import File
from orchestrator.execute.artifacts import ArtifactStore
from orchestrator.run import driver
from orchestrator.store import Store
from orchestrator.store.records import ArtifactData, ArtifactRecord

RUN = "20261120-120000-demo-abcd"
READY = Path(__file__).resolve().parents[3] / "jobs" / "configs"


def test_artifacts_lists_and_copies_what_is_there_and_names_where_the_rest_is(
    nsa: Nsa, home: Path, sweep: Callable[..., list]
) -> None:
    record = stored_file(home, sweep, "note.txt", "whole text\n")
    code, out, err = nsa("artifacts", RUN, "--point", "1")
    assert code == 0
    assert "note.txt" in out
    assert record.sha256 in out.replace("\n", "")
    code, out, err = nsa("artifacts", RUN, "--out", str(home / "copies"))
    assert code == 1
    assert (home / "copies" / "0001" / "1" / "note.txt").read_text() == "whole text\n"
    assert "copied 1 of 9 files" in out  # the sweep's own files are on another host
    missing = err.splitlines()
    assert len(missing) == 8
    assert all("is not in the artifact store" in line and "(host bench1)" in line for line in missing)


@pytest.mark.parametrize(
    ("name", "path", "why"),
    [
        *(
            ("note.txt", path, "is no path below the artifact store; it was not opened")
            for path in ("../secret", "http://127.0.0.1:1/x")
        ),
        ("../../escaped.txt", "r/0001/1/note.txt", "is no plain file name"),
    ],
)
def test_a_hostile_path_or_name_in_the_database_is_not_opened_or_written(
    nsa: Nsa, home: Path, sweep: Callable[..., list], name: str, path: str, why: str
) -> None:
    (home / "secret").write_text("whole text\n")
    stored_file(home, sweep, name, "whole text\n", path=path)
    code, _out, err = nsa("artifacts", RUN, "--point", "1", "--out", str(home / "a" / "b" / "copies"))
    assert code == 1
    assert why in err
    assert not list((home / "a").rglob("note.txt"))
    assert not list(home.rglob("escaped.txt"))


def stored_file(home: Path, sweep: Callable[..., list], name: str, text: str, path: str | None = None) -> ArtifactData:
    """A file of the second point of a stored sweep, whose row may be hostile."""
    store = ArtifactStore(f"file://{home / 'artifacts'}")
    file = store.put(File("note.txt", text=text), "r/0001/1/note.txt")
    file = file.model_copy(update={"name": name, "path": path or file.path})
    with Store.open(f"sqlite:///{home / 'nsa.db'}") as opened:
        opened.apply_many(sweep(RUN))
        opened.apply_many([ArtifactRecord(run_id=RUN, point_id=f"{RUN}/1", attempt=1, artifact=file)])
    return file


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_init_writes_every_ready_spec_to_be_run_from_there(here: Path, nsa: Nsa) -> None:
    code, out, _ = nsa("init")
    assert code == 0
    written = sorted(path.name for path in (here / "specs").iterdir())
    assert written == sorted(path.name for path in READY.glob("*.yaml"))
    assert f"wrote {len(written)} specs to specs/" in out
    for spec in re.findall(r"nsa submit (\S+)", out):
        assert (here / spec).is_file()
    assert driver.main(["specs/demo.yaml", "--dry-run"]) == 0


def test_init_never_overwrites(here: Path, nsa: Nsa) -> None:
    (here / "mine").mkdir()
    (here / "mine" / "demo.yaml").write_text("# my own")
    (here / "mine" / "drill.yaml").symlink_to(here / "gone")
    assert "kept your own: demo.yaml, drill.yaml" in nsa("init", "mine").out
    assert (here / "mine" / "demo.yaml").read_text() == "# my own"
    assert not (here / "gone").exists()
    assert (here / "mine" / "bench.yaml").read_bytes() == (READY / "bench.yaml").read_bytes()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, b"# Not sent by `ray job submit --working-dir`: secrets stay here.\n.env\n"),
        (b"*.log", b"*.log\n.env\n"),
        (b".envrc\n.env ", b".envrc\n.env "),
        (b"/.env\r\n*.log\r\n", b"/.env\r\n*.log\r\n"),
    ],
)
def test_init_keeps_env_out_of_what_ray_sends(here: Path, nsa: Nsa, before: bytes | None, after: bytes) -> None:
    ignored = here / ".rayignore"
    if before is not None:
        ignored.write_bytes(before)
    assert (".rayignore: " in nsa("init").out) == (before != after)
    assert ignored.read_bytes() == after
    (here / ".env").write_text("RAY_AUTH_TOKEN=a")
    uri = get_uri_for_directory(str(here), include_gitignore=False)
    (here / ".env").write_text("RAY_AUTH_TOKEN=another")
    assert get_uri_for_directory(str(here), include_gitignore=False) == uri


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (["init", "file"], "error: FOLDER: 'file': cannot be written"),
        (["import"], "error: FILE: is missing; name a journal or a CSV, or give --reference"),
        (
            ["submit", "jobs/configs/demo.yaml"],
            "error: spec: 'jobs/configs/demo.yaml': there is no such file here; wri",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_the_way_out(
    here: Path, nsa: Nsa, command: list[str], error: str
) -> None:
    (here / "file").touch()
    assert nsa(*command).err.startswith(error)
