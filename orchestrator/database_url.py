"""Validation of the database's URL. Needs no database driver, so that a dry run can check it anywhere."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

from orchestrator.errors import UserError

SETTING = "NSA_DATABASE_URL"
_FORMS = "sqlite:///PATH or postgresql+psycopg://USER@HOST/NAME"


class StoreError(UserError):
    """The database cannot be used as requested; one line: field, value, fix."""


class StoreUnavailable(StoreError):  # noqa: N818  (a temporary condition, not a mistake)
    """The database is unavailable (unreachable, locked, shut down); the same call may succeed later."""


class BrokenStoreError(StoreError):
    """The database takes no record, whichever it is: a table or a right is gone, a file is damaged."""


class RunMissingError(StoreError):
    """A record's run is not in the database."""


def check_url(url: str) -> str:
    """The URL with its driver named, after validation. Raises StoreError."""
    mistake = f"{SETTING}: {hide_password(url)!r}:"
    scheme, _, rest = url.partition("://")
    if scheme.lower() == "sqlite":
        if not rest.startswith("/") or rest == "/" or ":memory:" in rest:
            raise StoreError(f"{mistake} names no file; use sqlite:///PATH (four slashes if absolute)")
        if "?" in rest:
            raise StoreError(f"{mistake} a file takes no options; leave out '?', or write %3F in a path")
        if "\0" in unquote(rest):
            raise StoreError(f"{mistake} holds a NUL character, which no path may; remove it")
        return f"sqlite://{rest}"
    if scheme.lower() not in ("postgresql", "postgresql+psycopg"):
        raise StoreError(f"{mistake} unknown kind of database; use {_FORMS}")
    try:
        from sqlalchemy import make_url
        from sqlalchemy.exc import ArgumentError
    except ModuleNotFoundError:  # a run then writes its journal alone
        return url
    try:
        parsed = make_url(f"postgresql+psycopg://{rest}")
    except (ArgumentError, ValueError):  # its text may hold a part of the password
        raise StoreError(f"{mistake} its host or port cannot be read; use {_FORMS}") from None
    if "@" in (parsed.host or ""):
        raise StoreError(f"{mistake} has an @ in its password; write %40 for it")
    if not parsed.database or not (parsed.host or "host" in parsed.query):
        raise StoreError(f"{mistake} lacks a host or a database name; use {_FORMS}")
    return f"postgresql+psycopg://{rest}"


def sqlite_url(path: Path) -> str:
    """The URL of a SQLite file, whatever characters its path has."""
    return f"sqlite:///{path}".replace("%", "%25").replace("?", "%3F")


def sqlite_path(url: str) -> Path | None:
    """The file of a SQLite URL; None for another database."""
    scheme, _, path = url.partition(":///")
    return Path(unquote(path)) if scheme.lower() == "sqlite" else None


def hide_password(text: str) -> str:
    """The text with passwords in URLs replaced by ***."""
    # Up to the last @ of the line, and of an option up to the next: a password may hold an unescaped @, / or space.
    text = re.sub(r"(://[^:/@\s]*):.*@", r"\1:***@", text)
    return re.sub(r"(password=)[^&'\")]+", r"\1***", text)
