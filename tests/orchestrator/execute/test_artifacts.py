"""Files of points: the store's URL, names, copying into a store and out of it, stores that fail."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from ftp_server import FtpServer, ftp_server

from orchestrator.execute.artifacts import ArtifactError, ArtifactStore, Source
from orchestrator.settings import SettingsError, load_settings
from orchestrator.store.records import STORED_BYTES, ArtifactData

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
        ArtifactStore("file:///nowhere").put(Source(name, "text"), f"r/0000/1/{name}")
    assert str(error.value).isascii()
    assert "\n" not in str(error.value)


def test_a_file_comes_back_as_it_was(url: str, tmp_path: Path) -> None:
    (tmp_path / "big.bin").write_bytes(os.urandom(BIG + 1))
    store = ArtifactStore(url)
    file = store.put(Source("big.bin", tmp_path / "big.bin"), "r/0003/2/big.bin")
    assert (file.path, file.size, file.content, file.truncated) == ("r/0003/2/big.bin", BIG + 1, None, False)
    assert file.sha256 == hashlib.sha256((tmp_path / "big.bin").read_bytes()).hexdigest()
    assert content(ArtifactStore(url), file) == (tmp_path / "big.bin").read_bytes()


def test_the_end_of_a_text_is_kept_beside_it(url: str) -> None:
    store, text = ArtifactStore(url), "begin\n" + "é\0" * STORED_BYTES + "end"
    file = store.put(Source("log.txt", text), "r/0000/1/log.txt")
    assert file.truncated
    assert str(file.content).endswith("é\\0end")
    assert len(str(file.content).replace("\\0", "\0").encode()) <= STORED_BYTES + 3
    assert content(store, file) == text.encode()
    empty = store.put(Source("none.log", ""), "r/0000/1/none.log")
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
    file = store.put(Source("a.txt", "before"), "r/a.txt")
    for changed in ("after!", "longer than before", "short"):
        store.put(Source("a.txt", changed), "r/a.txt")
        with pytest.raises(ArtifactError, match="differs from the file that was kept"):
            content(store, file)


# Failures


def test_a_file_that_shrinks_while_it_is_copied_is_not_kept(url: str, tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(b"x" * BIG)
    store = ArtifactStore(url)
    with pytest.raises(ArtifactError, match=f"'log.txt': its file shrank from {BIG:,} bytes while it was copied"):
        store.put(Source("log.txt", path), "r/log.txt", lambda: os.truncate(path, 1 << 20))
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
        ArtifactStore(url).put(Source("a.txt", "x" * BIG), "r/a.txt", sign)
    served = tmp_path / ("a store" if url.startswith("file") else "ftp/store")
    assert [path for path in served.rglob("*") if path.is_file()] == []
