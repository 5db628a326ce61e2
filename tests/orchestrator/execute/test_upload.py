"""The upload of a job: what is in it, what is refused, and the same bytes for the same files."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.specs.load import load_spec
from orchestrator.cli import doctor
from orchestrator.errors import UserError
from orchestrator.execute import upload
from orchestrator.execute.upload import collect
from orchestrator.provenance import code_hash
from orchestrator.settings import Settings

TRAIN = "kind: train\nname: small\nseq_len: 16\nsteps: 20\n"
Train = Callable[[str], upload.Upload]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a corpus and a spec."""
    folder = tmp_path / "here"
    (folder / "corpus" / "deep").mkdir(parents=True)
    (folder / "corpus" / "a.txt").write_text("a" * 1000)
    (folder / "corpus" / "deep" / "b.txt").write_text("b" * 1000)
    (folder / "corpus" / ".gitignore").write_text("*.txt\n")
    (folder / "notes.txt").write_text("not named by any spec")
    (folder / "my.yaml").write_text(TRAIN)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def train(here: Path) -> Train:
    """The upload of a training on the data at a path."""

    def of(path: str) -> upload.Upload:
        return collect(load_spec(Path("my.yaml")).model_copy(update={"data": _data(path)}), Path("my.yaml"))

    return of


def _data(path: str):
    from jobs.train import DataSpec

    return DataSpec().model_copy(update={"path": Path(path)})  # as a spec that names it, wherever that is checked


def _beside_the_sources(found: upload.Upload) -> set[str]:
    return set(found.files) - {name for name, _ in upload.sources()}


def test_the_spec_and_the_files_that_it_names_are_sent_and_no_others(train: Train) -> None:
    found = train("corpus")
    assert found.spec == "my.yaml"
    assert _beside_the_sources(found) == {"my.yaml", "corpus/a.txt", "corpus/deep/b.txt", "corpus/.gitignore"}


def test_from_a_checkout_the_sources_are_sent_with_their_data_and_give_the_same_code_hash(
    train: Train, tmp_path: Path
) -> None:
    found = train("corpus/a.txt")
    assert found.write(tmp_path / "upload.zip") == (tmp_path / "upload.zip").stat().st_size < 5 * 2**20
    with zipfile.ZipFile(tmp_path / "upload.zip") as archive:
        archive.extractall(tmp_path / "unpacked")
    assert code_hash(tmp_path / "unpacked") == code_hash()
    assert (tmp_path / "unpacked" / "orchestrator" / "judge" / "gates.yaml").is_file()
    assert {path.name for path in (tmp_path / "unpacked").iterdir()} == {*upload.PACKAGES, "corpus", "my.yaml"}
    assert not list((tmp_path / "unpacked").rglob("*.pyc"))


def test_equal_files_are_one_package_to_ray(train: Train, here: Path) -> None:
    found = train("corpus")
    found.write(here / "first.zip")
    os.utime(here / "corpus" / "a.txt", (1e9, 1e9))
    found.write(here / "second.zip")
    assert (here / "first.zip").read_bytes() == (here / "second.zip").read_bytes()


@pytest.mark.parametrize(
    ("spec", "name"),
    [("sub/one.yaml", "sub/one.yaml"), ("../other/two.yaml", "two.yaml"), ("{absolute}/other/two.yaml", "two.yaml")],
)
def test_a_spec_may_lie_anywhere(here: Path, spec: str, name: str) -> None:
    path = Path(spec.format(absolute=here.parent))
    (here / path).parent.mkdir()
    (here / path).write_text(TRAIN)
    found = collect(load_spec(path), path)
    assert found.spec == name
    assert found.files[name].read_text() == TRAIN


def _link(here: Path, target: str) -> None:
    (here / "corpus" / "link").symlink_to(target)


@pytest.mark.parametrize(
    ("prepare", "path", "message"),
    [
        (None, "../corpus", "data.path: '../corpus': leads out of the folder that is sent; put it on storage"),
        (None, "corpus/../corpus", "leads out of"),
        (None, "nowhere", r"data.path: 'nowhere': there is no such file in .*/here; correct it, or put it on storage"),
        (lambda here: _link(here, "/usr"), "corpus", "'corpus/link': is a link to /usr, out of the folder"),
        (lambda here: _link(here, "/etc/hostname"), "corpus/link", "is a link to /etc/hostname, out of the folder"),
        (
            lambda here: _link(here, "."),
            "corpus",
            "'corpus/link': is a link to a folder; remove the link",
        ),
        (lambda here: (here / "empty").mkdir(), "empty", "'empty': holds no files"),
    ],
)
def test_paths_that_cannot_be_sent_are_refused_by_name(train: Train, here: Path, prepare, path, message) -> None:
    if prepare is not None:
        prepare(here)
    with pytest.raises(UserError, match=message):
        train(path)


def test_what_ray_cannot_send_is_left_out_and_named_also_by_doctor(
    train: Train, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not [finding for finding in doctor.findings(Settings()) if finding.name == "working dir"]
    sent = train("corpus").files.keys()
    _link(here, "gone")
    os.mkfifo(here / "corpus" / "pipe")
    Path(os.fsdecode(b"corpus/\xff")).touch()
    assert train("corpus").files.keys() == sent
    warned = capsys.readouterr().err
    assert "data.path: 'corpus/link': is neither a file nor a folder; it is left out" in warned
    assert "data.path: 'corpus/pipe': is neither a file nor a folder; it is left out" in warned
    assert "data.path: 'corpus/\\udcff': its name is not UTF-8; it is left out" in warned
    found = [finding.detail for finding in doctor.findings(Settings()) if finding.name == "working dir"]
    assert len(found) == 3
    assert all("`ray job submit` cannot send this folder" in detail for detail in found)


def test_an_upload_beyond_the_limit_names_the_largest_file_and_the_fix(train: Train, here: Path) -> None:
    with (here / "corpus" / "large.bin").open("wb") as file:
        file.truncate(upload.LIMIT)
    with pytest.raises(UserError, match=r"the largest 'corpus/large.bin': at most 100 MiB .* absolute path in the s"):
        train("corpus")
