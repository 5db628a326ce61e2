"""Files that users name: nothing is waited for, and what cannot be read or written is an OSError with its reason."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from jobs.specs.load import load_spec
from jobs.specs.spec import SpecError
from jobs.specs.user_files import NotAFileError, open_regular, write_output
from jobs.training.data.spec import DataSpec

pytestmark = pytest.mark.timeout(20)
KINDS = [os.mkfifo, partial(os.symlink, "/dev/zero"), Path.mkdir]


@pytest.mark.parametrize("make", KINDS, ids=["pipe", "device", "folder"])
def test_only_regular_files_are_opened(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "x")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NotAFileError, match="is not a regular file"):
        open_regular(tmp_path / "x")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_name_that_no_file_has_is_an_error_of_the_system() -> None:
    with pytest.raises(OSError, match="is no file's name"):
        open_regular(Path("a\0b"))


@pytest.mark.parametrize("make", KINDS, ids=["pipe", "device", "folder"])
def test_a_spec_that_is_no_file_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "x.yaml")
    with pytest.raises(SpecError, match=r"^spec: '.*x\.yaml' is no file; give the path of a YAML file$"):
        load_spec(tmp_path / "x.yaml")


def test_a_tokenizer_that_is_a_pipe_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.training.data.spec._PACKAGES", ())
    os.mkfifo(tmp_path / "tokenizer.json")
    spec = DataSpec(path=tmp_path, tokenizer_path=tmp_path / "tokenizer.json")
    with pytest.raises(SpecError, match=r"tokenizer\.json cannot be read here \(is not a regular file\)"):
        spec.vocabulary()


def test_a_pipe_that_nobody_reads_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    with pytest.raises(OSError, match="is a pipe that nobody reads"):
        write_output(tmp_path / "x", "text")


def test_a_pipe_with_a_reader_gets_all(tmp_path: Path) -> None:
    """Much more than a pipe holds, so that the writer must wait for the reader."""
    os.mkfifo(tmp_path / "x")
    text, read = "é\r\n" * 200_000, []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "x").read_bytes()), daemon=True)
    reader.start()
    while not read:
        try:
            write_output(tmp_path / "x", text)
            break
        except OSError:  # the reader has not opened it yet
            continue
    reader.join()
    assert read == [text.encode()]


def test_a_file_is_replaced_whole_and_its_folder_made(tmp_path: Path) -> None:
    for content in ("longer text", b"short"):
        write_output(tmp_path / "a" / "b" / "x", content)
    assert (tmp_path / "a" / "b" / "x").read_bytes() == b"short"
