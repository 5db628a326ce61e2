"""Text to learn from, made of Debian's packages: `python -m jobs.training.data.debian FOLDER`, on a Debian 12.

Some 250 MB of documentation and sources in English, as documents in JSON lines, and a byte-level BPE tokenizer trained
on them (Sennrich et al., arXiv 1508.07909). The same packages give the same files; SOURCES.txt lists their versions.
"""

import gzip
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path

DOCUMENTATION = (
    *("apache2-doc", "cmake-doc", "erlang-doc", "libboost1.74-doc", "libreoffice-help-en-us", "linux-doc-6.1"),
    *("perl-doc", "postgresql-doc-15", "python-django-doc", "python-sqlalchemy-doc", "python3.11-doc", "sqlite3-doc"),
)
SOURCES = ("golang-1.19-src", "linux-source-6.1", "mercurial-common", "rust-src")
MOST = 32 * 2**20  # bytes of text from one package, so that none is most of the whole
SHORTEST, LONGEST = 1_000, 2**20  # characters of a document: no stubs, no tables of data
SHARDS = 32  # files; their order is what a training's seed shuffles
VOCABULARY = 32_000
END = "<|endoftext|>"
_HTML = (".html", ".htm", ".xhtml")
_PLAIN = (".txt", ".rst", ".md", ".pod", ".c", ".h", ".go", ".rs", ".py", ".adoc")


class _Text(HTMLParser):
    """The text of a page, without scripts, styles and navigation."""

    _SKIPPED = ("script", "style", "nav", "head", "footer")

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._inside = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._inside += tag in self._SKIPPED

    def handle_endtag(self, tag: str) -> None:
        self._inside -= tag in self._SKIPPED and self._inside > 0

    def handle_data(self, data: str) -> None:
        if not self._inside:
            self.parts.append(data)


def text_of(path: Path) -> str | None:
    """The text of a file; None if it holds no text in UTF-8."""
    packed = path.suffix == ".gz"
    suffix = path.with_suffix("").suffix if packed else path.suffix
    if suffix not in _HTML + _PLAIN:
        return None
    try:
        text = (gzip.decompress(path.read_bytes()) if packed else path.read_bytes()).decode()
    except (OSError, UnicodeDecodeError):
        return None
    if suffix in _HTML:
        page = _Text()
        page.feed(text)
        text = "\n".join(line for line in "".join(page.parts).splitlines() if line.strip())
    return text


def documents(folder: Path) -> Iterator[str]:
    """Documents of an unpacked package, up to MOST bytes: a sample that depends on the files' names alone."""
    paths = {hashlib.sha256(str(path.relative_to(folder)).encode()).digest(): path for path in folder.rglob("*")}
    size = 0
    for _, path in sorted(paths.items()):
        if size >= MOST:
            return
        if path.is_symlink() or not path.is_file() or "_sources" in path.parts:  # of pages that are there as HTML
            continue
        text = text_of(path)
        if text is not None and SHORTEST <= len(text) <= LONGEST:
            size += len(text.encode())
            yield text


def _unpack(package: str, folder: Path) -> str:
    """Download and unpack a package, and the archives in it; its version."""
    subprocess.run(["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", package], cwd=folder, check=True)
    (archive,) = folder.glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", archive.name, "."], cwd=folder, check=True)
    for inner in folder.rglob("*.tar.xz"):
        subprocess.run(["tar", "-xf", inner, "-C", inner.parent, "--wildcards", "*.rst", "*.c", "*.h"], check=True)
    return archive.stem.split("_")[1]


def write(texts: Sequence[str], out: Path) -> None:
    """Write documents, all different, and a tokenizer trained on all of them, into a new folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    (out / "text").mkdir(parents=True)  # apart: a folder of documents has nothing else
    by_digest = {hashlib.sha256(text.encode()).hexdigest(): text for text in texts}
    for shard in range(SHARDS):
        mine = [by_digest[digest] for digest in sorted(by_digest) if int(digest[-4:], 16) % SHARDS == shard]
        lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in mine)
        (out / "text" / f"{shard:02}.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(out / "tokenizer.json"))


def main(out: Path) -> None:
    texts: dict[str, None] = {}  # all different, in order
    versions = []
    for package in DOCUMENTATION + SOURCES:
        with tempfile.TemporaryDirectory() as folder:
            version = _unpack(package, Path(folder))
            found = dict.fromkeys(documents(Path(folder)))
        size = sum(len(text.encode()) for text in found)
        versions.append(f"{package} {version}: {len(found)} documents, {size / 1e6:.1f} MB")
        print(versions[-1], flush=True)
        texts |= found
    write([*texts], out)
    (out / "SOURCES.txt").write_text("\n".join(versions) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
