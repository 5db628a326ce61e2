"""Text made of packages: which files become documents, and a dataset and tokenizer that a training can read."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from jobs.training.data import debian
from jobs.training.data.spec import DataSpec

WORDS = "a line of words that is long enough to be kept\n" * 40


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """An unpacked package."""
    folder = tmp_path / "package"
    (folder / "_sources").mkdir(parents=True)
    page = f"<html><head><title>no</title></head><script>no()</script><p>{WORDS}</p><footer>no</footer></html>"
    (folder / "page.html").write_text(page)
    (folder / "notes.txt.gz").write_bytes(gzip.compress(f"notes\n{WORDS}".encode()))
    (folder / "code.c").write_text(f"code\n{WORDS}")
    (folder / "_sources" / "page.rst").write_text(f"again\n{WORDS}")
    (folder / "short.md").write_text("a stub")
    (folder / "latin.txt").write_bytes(b"\xe9" * 2_000)
    (folder / "image.png").write_text(WORDS)
    (folder / "link.txt").symlink_to("code.c")
    return folder


def test_pages_notes_and_sources_become_a_dataset_that_a_training_reads(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sorted(text.split("\n")[0] for text in debian.documents(package)) == [
        "a line of words that is long enough to be kept",
        "code",
        "notes",
    ]
    assert not any("no" in text.split() for text in debian.documents(package))
    monkeypatch.setattr(debian, "VOCABULARY", 300)
    for out in (tmp_path / "one", tmp_path / "two"):
        debian.write([*debian.documents(package)], out)
    assert [path.read_bytes() for path in sorted((tmp_path / "one").rglob("*.*"))] == [
        path.read_bytes() for path in sorted((tmp_path / "two").rglob("*.*"))
    ]
    spec = DataSpec(path=tmp_path / "one" / "text", tokenizer_path=tmp_path / "one" / "tokenizer.json")
    assert spec.vocabulary() == 320  # 300 up to a multiple of 64
