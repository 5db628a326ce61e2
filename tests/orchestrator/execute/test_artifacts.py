"""Files of points: the store's URL, names, copying, stores that fail or hang; and what an upload of a job holds."""

import dataclasses
import hashlib
import os
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from ftp_server import FtpServer, ftp_server

from jobs.schema.files import File
from jobs.specs.load import load_spec
from jobs.specs.spec import Deadlines
from orchestrator.cli import doctor
from orchestrator.errors import UserError
from orchestrator.execute import artifacts, upload
from orchestrator.execute.artifacts import ArtifactError, ArtifactStore
from orchestrator.execute.supervisor import Assignment, Conditions, supervise
from orchestrator.execute.upload import collect
from orchestrator.provenance import code_hash
from orchestrator.settings import Settings, SettingsError, load_settings
from orchestrator.store.records import STORED_BYTES, ArtifactData, ArtifactRecord, EventRecord, OutcomeRecord, Progress

BIG = 20 << 20  # several parts of an upload


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FtpServer]:
    with ftp_server(tmp_path / "ftp") as found:
        yield found


@pytest.fixture(params=["file", "ftp"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/a store" if request.param == "file" else request.getfixturevalue("server").url


def content(store: ArtifactStore, file: ArtifactData, path: str | None = None) -> bytes:
    return b"".join(store.pieces(file.path if path is None else path, file.size, file.sha256))


# The URL


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data/nsa", "is not absolute; write an absolute path"),
        ("file://data/nsa", "with three slashes"),
        ("odd://bucket/nsa", "unknown scheme 'odd'"),
        ("memory://nsa", "keeps nothing that another process can read"),
        ("simplecache::s3://bucket", "unknown scheme"),
        ("ftp://bench:secret@host/nsa", "give credentials in the environment"),
        ("ftp://host/nsa?key=secret", "give credentials in the environment"),
        ("s3://bucket/nsa#secret", "give credentials in the environment"),
        ("ftp:///nsa", "names no bucket or host"),
        ("ftp://host:port/nsa", "write an absolute path"),
        ("/etc/hostname/nsa", "'/etc/hostname' is not a folder"),
    ],
)
def test_a_url_that_cannot_be_used_says_so_when_settings_load(url: str, message: str, monkeypatch) -> None:
    monkeypatch.setenv("NSA_ARTIFACT_STORE", url)
    with pytest.raises(SettingsError) as error:
        load_settings()
    [line] = str(error.value).splitlines()
    assert line.startswith("NSA_ARTIFACT_STORE: ")
    assert message in line
    assert "secret" not in line


# In and out


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/b", "a\\b", "a\0b", "a\nb", "ü.txt", "\udcff", "x" * 101]
)
def test_a_name_that_is_no_plain_file_name_is_refused(name: str) -> None:
    with pytest.raises(ArtifactError, match="is no plain file name") as error:
        ArtifactStore("file:///nowhere").put(File(name, text="text"), f"r/0000/1/{name}")
    assert str(error.value).isascii()
    assert "\n" not in str(error.value)


def test_a_file_comes_back_as_it_was(url: str, tmp_path: Path) -> None:
    (tmp_path / "big.bin").write_bytes(os.urandom(BIG + 1))
    store = ArtifactStore(url)
    file = store.put(File("big.bin", str(tmp_path / "big.bin")), "r/0003/2/big.bin")
    assert (file.path, file.size, file.content, file.truncated) == ("r/0003/2/big.bin", BIG + 1, None, False)
    assert file.sha256 == hashlib.sha256((tmp_path / "big.bin").read_bytes()).hexdigest()
    assert content(ArtifactStore(url), file) == (tmp_path / "big.bin").read_bytes()


def test_the_end_of_a_text_is_kept_beside_it(url: str) -> None:
    store, text = ArtifactStore(url), "begin\n" + "é\0" * STORED_BYTES + "end"
    file = store.put(File("log.txt", text=text), "r/0000/1/log.txt")
    assert file.truncated
    assert str(file.content).endswith("é\\0end")
    assert len(str(file.content).replace("\\0", "\0").encode()) <= STORED_BYTES + 3
    assert content(store, file) == text.encode()
    empty = store.put(File("none.log", text=""), "r/0000/1/none.log")
    assert (empty.size, empty.content, content(store, empty)) == (0, "", b"")


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../secret", "r/../../secret", "http://host/x", "r//x", "", ".", "r\\x", "a::b", "r/\0"]
)
def test_a_hostile_path_is_not_opened(path: str, url: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    with pytest.raises(ArtifactError, match="is no path below the artifact store"):
        list(ArtifactStore(url).pieces(path, 6, hashlib.sha256(b"secret").hexdigest()))


def test_a_link_out_of_the_store_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "store" / "r").mkdir(parents=True)
    (tmp_path / "store" / "r" / "x").symlink_to(tmp_path / "secret")
    with pytest.raises(ArtifactError, match="outside the artifact store"):
        list(ArtifactStore(f"file://{tmp_path / 'store'}").pieces("r/x", 6, hashlib.sha256(b"secret").hexdigest()))


def test_a_changed_file_is_not_handed_out_whole(url: str) -> None:
    store = ArtifactStore(url)
    file = store.put(File("a.txt", text="before"), "r/a.txt")
    for changed in ("after!", "longer than before", "short"):
        store.put(File("a.txt", text=changed), "r/a.txt")
        with pytest.raises(ArtifactError, match="differs from the file that was kept"):
            content(store, file)


# Failures


def test_a_file_that_shrinks_while_it_is_copied_is_not_kept(url: str, tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(b"x" * BIG)
    store = ArtifactStore(url)
    with pytest.raises(ArtifactError, match=f"'log.txt': its file shrank from {BIG:,} bytes while it was copied"):
        store.put(File("log.txt", str(path)), "r/log.txt", lambda: os.truncate(path, 1 << 20))
    with pytest.raises(ArtifactError, match="is not in the artifact store"):
        list(store.pieces("r/log.txt", BIG, ""))


def test_a_copy_that_is_given_up_leaves_nothing(url: str, tmp_path: Path, request) -> None:
    class Stop(Exception):  # noqa: N818
        """As when the run is cancelled."""

    signs = iter(range(15))

    def sign() -> None:
        if next(signs, None) is None:
            raise Stop

    with pytest.raises(Stop):
        ArtifactStore(url).put(File("a.txt", text="x" * BIG), "r/a.txt", sign)
    served = tmp_path / ("a store" if url.startswith("file") else "ftp/store")
    assert [path for path in served.rglob("*") if path.is_file()] == []


CONDITIONS = Conditions("cpu", Deadlines(startup_s=60, heartbeat_s=60, point_s=120))
TASK = Assignment("r", "r/7", 1, None)  # type: ignore[arg-type]  # its point is not looked at


@pytest.fixture
def measure(snippet_kind, tmp_path: Path) -> Callable[..., list]:
    """Runs pieces of code as points that keep their files in `tmp_path`/store, and returns all updates."""

    def run(*codes: str, **changes: Any) -> list:
        conditions = dataclasses.replace(CONDITIONS, **{"store": f"file://{tmp_path / 'store'}", **changes})
        assignments = [Assignment("r", f"r/{i}", 1, snippet_kind.point(code, i)) for i, code in enumerate(codes)]
        return list(supervise(assignments, conditions))

    return run


def texts(updates: list) -> dict[str, str]:
    """Point and name -> text in the database."""
    files = [update for update in updates if isinstance(update, ArtifactRecord)]
    return {f"{file.point_id[-1]} {file.artifact.name}": str(file.artifact.content) for file in files}


def warnings(updates: list) -> list[str]:
    return [f"{u.point_id[-1]} {u.message}" for u in updates if isinstance(u, EventRecord) and u.point_id]


def states(updates: list) -> list[str]:
    return [str(update.state) for update in updates if isinstance(update, OutcomeRecord)]


def test_a_file_that_cannot_be_kept_costs_only_itself(measure) -> None:
    code = """import pathlib
files = {'..': 'up', 'a/b': 'aside', '': 'none', 'stdout.txt': 'mine', 'gone.bin': pathlib.Path('/nowhere/gone.bin'),
         'zero\\0.txt': 'nul', 'last.txt': 'kept'}
print('said')"""
    updates = measure(code, "files = {'other.txt': 'kept'}")
    assert states(updates) == ["ok", "ok"]
    assert texts(updates) == {"0 stdout.txt": "said\n", "0 last.txt": "kept", "1 other.txt": "kept"}
    messages = warnings(updates)
    assert len(messages) == 6
    assert all(message.startswith("0 file not kept: ") for message in messages)
    for part in ("'..': is no plain", "'a/b': is no plain", "'': is no plain", r"'zero\x00.txt': is no plain"):
        assert sum(part in message for message in messages) == 1
    assert sum("'stdout.txt': another file of this attempt has this name" in message for message in messages) == 1
    assert sum("'gone.bin': its file cannot be read: FileNotFoundError" in message for message in messages) == 1


def test_a_store_that_goes_away_in_mid_run_costs_files_and_no_point(measure, tmp_path) -> None:
    with ftp_server(tmp_path / "ftp") as server:
        kill = f"import signal\nos.kill({server.process.pid}, signal.SIGKILL)\nfiles = {{'a.txt': 'lost'}}"
        updates = measure("files = {'a.txt': 'kept'}", kill, "value = 2.0", store=server.url)
    assert states(updates) == ["ok", "ok", "ok"]
    assert texts(updates) == {"0 a.txt": "kept"}
    [warning] = warnings(updates)
    assert warning.startswith("1 file not kept: the artifact store ftp://")


class Hanging(MemoryFileSystem):
    """A store that never answers a write."""

    protocol = "hanging"
    asked = threading.Event()

    def _open(self, *_: Any, **__: Any) -> Any:
        self.asked.set()
        time.sleep(600)


@pytest.fixture
def hanging() -> str:
    fsspec.register_implementation("hanging", Hanging, clobber=True)
    Hanging.asked.clear()
    return "hanging://place"


def rest(store: str, *sources: File, stopped: Callable[[], bool] = lambda: False) -> list:
    """The records of the files of an attempt's end."""
    with artifacts.ArtifactCopies(TASK.ids, store) as copies:
        return list(copies.rest(sources, stopped))


def test_a_store_that_hangs_holds_up_no_deadline_and_no_live_series(hanging: str, snippet_kind, monkeypatch) -> None:
    monkeypatch.setattr(artifacts, "STALL_S", 3600.0)
    code = """import time
beat.keep('rank0.json', '{}')
for step in range(40):
    beat('train', step, 40)
    beat.sample(step, {'time': 1.0})
    time.sleep(0.1)
time.sleep(600)"""
    deadlines = Deadlines(startup_s=60, heartbeat_s=3, point_s=120)
    conditions = dataclasses.replace(CONDITIONS, deadlines=deadlines, store=hanging)
    seen: list = []
    for update in supervise([Assignment("r", "r/0", 1, snippet_kind.point(code))], conditions):
        seen.append(update)
        if isinstance(update, OutcomeRecord):
            break
    assert states(seen) == ["hang"]
    assert len([update for update in seen if isinstance(update, Progress) and update.phase == "train"]) > 2
    assert [update for update in seen[:-2] if isinstance(update, tuple)], "before the end"


def test_files_of_a_store_that_hangs_are_given_up_with_a_warning_each(hanging: str, monkeypatch) -> None:
    monkeypatch.setattr(artifacts, "STALL_S", 1.0)
    message = "the artifact store hanging://place did not answer for 1 s"
    records = rest(hanging, File("a.txt", text="a"), File("b.txt", text="b"))
    assert warnings(records) == [f"7 file not kept: {name!r}: {message}" for name in ("a.txt", "b.txt")]


def test_a_stop_does_not_wait_for_a_store_that_hangs(hanging: str) -> None:
    assert rest(hanging, File("a.txt", text="a"), stopped=Hanging.asked.is_set) == []


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
        (lambda here: _link(here, "."), "corpus", "'corpus/link': is a link to a folder; remove the link"),
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
    for folder in (".vscode", ".git"):  # the second is one of those that Ray leaves out
        (here / folder).mkdir()
        os.mkfifo(here / folder / "pipe")
    assert train("corpus").files.keys() == sent
    warned = capsys.readouterr().err
    assert "data.path: 'corpus/link': is neither a file nor a folder; it is left out" in warned
    assert "data.path: 'corpus/pipe': is neither a file nor a folder; it is left out" in warned
    assert "data.path: 'corpus/\\udcff': its name is not UTF-8; it is left out" in warned
    found = [finding.detail for finding in doctor.findings(Settings()) if finding.name == "working dir"]
    assert len(found) == 4
    assert all("`ray job submit` cannot send this folder" in detail for detail in found)


def test_an_upload_beyond_the_limit_names_the_largest_file_and_the_fix(train: Train, here: Path) -> None:
    with (here / "corpus" / "large.bin").open("wb") as file:
        file.truncate(upload.LIMIT)
    with pytest.raises(UserError, match=r"the largest 'corpus/large.bin': at most 100 MiB .* absolute path in the s"):
        train("corpus")
