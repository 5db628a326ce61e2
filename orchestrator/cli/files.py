"""Files that come with the package and that users need at hand: the ready specs, and results."""

from __future__ import annotations

import os
from pathlib import Path

from orchestrator.errors import UserError
from orchestrator.settings import SOURCES
from orchestrator.store.journal import COMPRESSED

RAYIGNORE = ".rayignore"
_SPECS = SOURCES / "jobs" / "configs"
_REFERENCE = SOURCES / "orchestrator" / "reference_data"
_JOURNALS = _REFERENCE / "journals"  # in a checkout a link to docs/results/data


def write_specs(folder: Path) -> tuple[list[str], list[str]]:
    """Copy the ready specs to `folder`, which is made. Returns the names of those written, and of files kept there.

    Raises:
        UserError: the folder or a file cannot be written.
    """
    written, kept = [], []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for spec in sorted(_SPECS.glob("*.yaml")):
            try:
                with (folder / spec.name).open("xb") as file:  # fails where there is a file, or a link to one
                    file.write(spec.read_bytes())
                written.append(spec.name)
            except FileExistsError:
                kept.append(spec.name)
    except OSError as err:
        raise UserError(f"FOLDER: {str(folder)!r}: cannot be written ({err.strerror}); name another") from None
    return written, kept


def ignore_env(folder: Path) -> str | None:
    """Have Ray leave .env, which may hold secrets, out of what it sends of `folder`: by a line of its .rayignore.

    Returns:
        What was done to the file; None if it has the line.

    Raises:
        UserError: the file cannot be read or written.
    """
    path = folder / RAYIGNORE
    try:
        if not os.path.lexists(path):
            path.write_text("# Not sent by `ray job submit --working-dir`: secrets stay here.\n.env\n")
            return "written"
        text = path.read_bytes()
        if {b".env", b"/.env"} & {line.rstrip() for line in text.splitlines()}:
            return None
        with path.open("ab") as file:
            file.write(b".env\n" if not text or text.endswith(b"\n") else b"\n.env\n")
    except OSError as err:
        raise UserError(f"{RAYIGNORE}: cannot be written ({err.strerror}); add the line .env to it") from None
    return "now has the line .env, and is else as it was"


def check_spec_exists(spec: Path) -> None:
    """Raise UserError if there is no such file, but a ready spec of this name: `nsa init` writes it."""
    if not spec.exists() and (_SPECS / spec.name).is_file():
        raise UserError(
            f"spec: {str(spec)!r}: there is no such file here; write the ready specs with `nsa init`, then give "
            f"specs/{spec.name}"
        )


def reference_data() -> list[Path]:
    """Results that come with the package, as `nsa import` reads them: tables of others' figures, our own journals."""
    return [*sorted(_REFERENCE.glob("*.csv")), *sorted(_JOURNALS.glob(f"*{COMPRESSED}"))]
