"""Validation of the database's URL. Needs no database driver, so that a dry run can check it anywhere."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from orchestrator.errors import UserError

SETTING = "NSA_DATABASE_URL"
_FORMS = "sqlite:///PATH or postgresql+psycopg://USER@HOST/NAME"
_SCHEMES = ("sqlite", "postgresql", "postgresql+psycopg")
# Options that a Postgres URL may have: where and as whom to connect. SQLAlchemy and psycopg would take more, which
# changes what their calls do, and so what is stored.
_OPTIONS = re.compile(
    "host|hostaddr|port|user|password|passfile|application_name|options|target_session_attrs|load_balance_hosts"
    "|channel_binding|require_auth|requirepeer|krbsrvname|gssencmode|ssl_?[a-z_]+"
    "|connect_timeout|keepalives(_idle|_interval|_count)?|tcp_user_timeout"
)


class StoreError(UserError):
    """The database cannot be used as requested; one line: field, value, fix."""


class StoreUnavailable(StoreError):  # noqa: N818  (a temporary condition, not a mistake)
    """The database is unavailable (unreachable, locked, shut down); the same call may succeed later."""


class BrokenStoreError(StoreError):
    """The database takes no record, whichever it is: a table or a right is gone, a file is damaged."""


class RunMissingError(StoreError):
    """A record's run is not in the database."""


def check_url(url: str) -> str:
    """The URL with its driver named, after validation.

    Raises:
        StoreError: not a URL, an unknown scheme, a SQLite URL without a file, a Postgres URL without a host or name, or
            with an option that is not about the connection.
    """
    shown = hide_password(url)
    parts = _split(url)
    scheme, rest = url[: len(parts.scheme)].lower(), url[len(parts.scheme) :]
    if scheme not in _SCHEMES or "://" not in url:
        raise StoreError(f"{SETTING}: {shown!r}: unknown kind of database; use {_FORMS}")
    if parts.scheme == "sqlite":
        if parts.netloc or parts.path in ("", "/") or ":memory:" in url:
            raise StoreError(f"{SETTING}: {shown!r}: names no file; use sqlite:///PATH (four slashes if absolute)")
        if "?" in url:
            raise StoreError(f"{SETTING}: {shown!r}: a file takes no options; leave out '?', or write %3F in a path")
        return scheme + rest
    host = parts.hostname or ""
    if "@" in parts.netloc.rpartition("@")[0] or " " in parts.netloc:
        raise StoreError(f"{SETTING}: {shown!r}: has an @ or a space in its password; write %40 or %20 for it")
    if parts.netloc.endswith(":"):
        raise StoreError(f"{SETTING}: {shown!r}: has no port behind the ':'; write one, or leave the ':' out")
    if any(len(label) > 63 for label in host.split(".")):
        raise StoreError(f"{SETTING}: {shown!r}: its host is no name; use {_FORMS}")
    if len(parts.path) < 2 or not (parts.hostname or "host=" in parts.query):
        raise StoreError(f"{SETTING}: {shown!r}: lacks a host or a database name; use {_FORMS}")
    _check_options(parts.query, shown)
    return f"postgresql+psycopg{rest}"


def _check_options(query: str, url: str) -> None:
    names = [name for name, _ in parse_qsl(query, keep_blank_values=True)]
    for name in names:
        if not _OPTIONS.fullmatch(name):
            raise StoreError(f"{SETTING}: {url!r}: the option {name!r} is not one of the connection; remove it")
        if names.count(name) > 1 and name != "host":
            raise StoreError(f"{SETTING}: {url!r}: the option {name!r} is there twice; remove one")


def with_absolute_path(url: str) -> str:
    """The URL, a SQLite file's path made absolute: the same database from any folder."""
    path = sqlite_path(url)
    if path is None or not path.name or path.is_absolute() or str(path).startswith("file:"):
        return url
    return sqlite_url(Path.cwd() / path)


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


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # its text may hold a part of the password
        raise StoreError(
            f"{SETTING}: {hide_password(url)!r}: its host or port cannot be read; use {_FORMS}, and in a password "
            "%2F for /, %23 for #, %3F for ?"
        ) from None
    return parts
