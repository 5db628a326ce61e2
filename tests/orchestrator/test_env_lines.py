"""A `.env` that cannot be read as it was meant: each mistake in a line, and no setting that is silently its default."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from orchestrator import settings
from orchestrator.settings import SettingsError, load_settings

URL = "NSA_DATABASE_URL"
QUOTE = "has a quote that does not end, or text after it; write "


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The `.env` that is read; nothing is there."""
    monkeypatch.setattr(settings, "env_file", lambda: tmp_path / ".env")
    monkeypatch.delenv("NSA_DATABASE_URL", raising=False)
    monkeypatch.setenv("NSA_HOME", str(tmp_path))
    return tmp_path / ".env"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f'{URL}="sqlite:///secret.db\n', f"line 1: {URL} {QUOTE}{URL}='VALUE', or no quotes"),
        (f"# ours\n\n\nexport {URL}='sqlite:///secret.db' x\n", f"line 4: {URL} {QUOTE}{URL}='VALUE', or no quotes"),
        (f"{URL} sqlite:///secret.db\n", f"line 1: {URL} has no '='; write {URL}=VALUE, or begin the line with #"),
        (f"\r\n{URL}\r\n", f"line 2: {URL} has no '='; write {URL}=VALUE, or begin the line with #"),
        (f"{URL}=\nsqlite:///secret.db\n", "line 2: is not NAME=VALUE; correct it, or begin it with #"),
        ("= secret\n", "line 1: is not NAME=VALUE; correct it, or begin it with #"),
        (
            f'KEY="secret\n{URL}=sqlite:///secret.db\nMORE=x"\n',
            f"line 1: KEY has a quote that ends in a later line, so that {URL} is not read as meant; close it before",
        ),
        (
            f'{URL}="sqlite:///secret.db\nMORE=x"\n',
            f"line 1: {URL} has a quote that ends in a later line, so that {URL} is not read as meant; close it before",
        ),
    ],
)
def test_a_line_that_hides_a_setting_is_named_without_its_value(file: Path, text: str, told: str) -> None:
    file.write_bytes(text.encode())
    with pytest.raises(SettingsError) as refused:
        load_settings()
    assert str(refused.value) == f".env: '{file}': {told}"


def test_all_wrong_lines_are_told_at_once(file: Path) -> None:
    file.write_text("NSA_HOME /x\nNSA_GATES=/x\nNSA_ARTIFACTS '/y'\n")
    with pytest.raises(SettingsError) as refused:
        load_settings()
    assert [line.split(": ")[2] for line in str(refused.value).splitlines()] == ["line 1", "line 3"]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (os.mkfifo, "is not a regular file; write NAME=VALUE lines to a file of that name, or remove it"),
        (Path.mkdir, "is not a regular file; write NAME=VALUE lines to a file of that name, or remove it"),
        (
            partial(os.symlink, "/dev/zero"),
            "is not a regular file; write NAME=VALUE lines to a file of that name, or remove it",
        ),
        (partial(os.symlink, "gone"), "is a link to nothing; mend or remove it"),
        (partial(os.symlink, ".env"), "cannot be read (Too many levels of symbolic links); make it readable"),
        (lambda path: path.write_bytes(b"NSA_HOME=/caf\xe9\n"), "is not UTF-8; save it as UTF-8 text"),
        (
            lambda path: path.write_text("#" * (1 << 20) + "\n"),
            "has more than 1,048,576 characters; keep NAME=VALUE lines alone in it",
        ),
    ],
    ids=["pipe", "folder", "device", "gone", "circle", "latin", "large"],
)
def test_what_is_no_text_file_is_refused_in_a_line(file: Path, make: Callable[[Path], None], told: str) -> None:
    make(file)
    with pytest.raises(SettingsError) as refused:
        load_settings()
    assert str(refused.value) == f".env: '{file}': {told}"


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff# ours\nexport NSA_DATABASE_URL=sqlite:////tmp/x.db\n",
        "FOO\nexport BAR\nfoo-bar.baz=1\nNSA_DATABASE_URL = 'sqlite:////tmp/x.db' # ours\n",
        'KEY="-----BEGIN\nabc\n-----END"\nNSA_DATABASE_URL="sqlite:////tmp/x.db"\nNSA_GATES=\n',
    ],
)
def test_what_other_tools_write_beside_ours_is_taken(file: Path, text: str) -> None:
    file.write_text(text)
    assert load_settings().database == "sqlite:////tmp/x.db"


def test_a_virtual_environment_of_that_name_is_no_file_of_ours(file: Path) -> None:
    file.mkdir()
    (file / "pyvenv.cfg").touch()
    assert load_settings().database_url is None


def test_the_example_is_taken(file: Path) -> None:
    file.write_bytes((Path(__file__).parents[2] / ".env.example").read_bytes())
    assert load_settings().database_url is None
