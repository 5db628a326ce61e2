"""The documents keep up with the files: links resolve, and the commands, files and names that they mention exist."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from orchestrator.cli.commands import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += [*(ROOT / "docs").rglob("*.md"), *(ROOT / ".github").glob("*.md")]


def _anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, by GitHub's rules."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        words = re.sub(r"\[([^]]*)]\([^)]*\)", r"\1", heading).lower()
        anchor = "".join(c for c in words if c.isalnum() or c in " -_").replace(" ", "-")
        found.add(anchor if anchor not in found else f"{anchor}-1")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r'\]\(([^)\s]+)\)|src="([^"]+)"', page.read_text()):
        path, _, anchor = "".join(link).partition("#")
        if path.startswith("http"):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not anchor or anchor in _anchors(target), f"{path}#{anchor}"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/gpu-host.md", "docs/deployment.md"])
def test_make_targets_and_specs_exist(name: str) -> None:
    text, makefile = (ROOT / name).read_text(), (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)`", text, re.MULTILINE):
        assert re.search(rf"^{''.join(target)}:", makefile, re.MULTILINE), target
    for spec in re.findall(r"jobs/configs/\w+\.yaml", text):
        assert (ROOT / spec).exists(), spec


def _names() -> Iterator[tuple[str, str]]:
    """Yield each name with its file, from "`name`, `name` in `path`" in CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for names, path in re.findall(r"((?:`[\w()]+`(?:, | and )?)+) in `([\w/]+\.py)`", text):
        for name in re.findall(r"\w+", names.replace(" and ", " ")):
            yield name, path


@pytest.mark.parametrize(("name", "path"), list(_names()))
def test_what_to_use_is_where_contributing_says(name: str, path: str) -> None:
    assert re.search(rf"^(?:def|class) {name}\b", (ROOT / path).read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md", "docs/kernel-log.md"])
def test_files_that_are_named_exist(page: str) -> None:
    """The end of a path is enough: some tables leave out the folder that they are about."""
    packages = ("nsa_core", "jobs", "orchestrator", "dashboard", "tests")
    files = [path.relative_to(ROOT).as_posix() for name in packages for path in (ROOT / name).rglob("*.py")]
    for named in re.findall(r"`([\w/]+\.py)`", (ROOT / page).read_text()):
        assert any(f"/{file}".endswith(f"/{named}") for file in files), named


def test_every_room_is_on_the_map() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for package in ("nsa_core", "jobs", "orchestrator", "dashboard"):
        for init in (ROOT / package).glob("*/__init__.py"):
            assert f"`{init.parent.relative_to(ROOT).as_posix()}/`" in text


@cache
def _nsa() -> Any:
    return typer.main.get_command(app)


@pytest.mark.parametrize("page", PAGES[:2] + PAGES[3:], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_have_the_options_that_are_named(page: Path) -> None:
    """The changelog tells of commands of its time. A command that is only mentioned has no arguments."""
    for line in re.findall(r"^(?:\$ )?(nsa .+)$|`(nsa \w+ [^`]+)`", page.read_text(), re.MULTILINE):
        words = shlex.split("".join(line), comments=True)
        if any(word.startswith("[") or ";" in word for word in words):  # a synopsis; more than one command
            continue
        command, name = _nsa(), words.pop(0)
        while words and words[0] in getattr(command, "commands", ()):
            name = words.pop(0)
            command = command.commands[name]
        command.make_context(name, words)
