"""The database's URL, and the errors of a database that cannot be used. Needs no SQLAlchemy, whose import is slow."""

import re
from pathlib import Path
from urllib.parse import unquote

from orchestrator.errors import UserError

SETTING = "NSA_DATABASE_URL"


class StoreError(UserError):
    """The database cannot be used as requested; one line: field, value, fix."""


class StoreUnavailable(StoreError):  # noqa: N818  (a temporary condition, not a mistake)
    """The database is unavailable (unreachable, locked, shut down); the same call may succeed later."""


class RunMissingError(StoreError):
    """A record's run is not in the database."""


def sqlite_url(path: Path) -> str:
    """The URL of a SQLite file, whatever characters its path has."""
    return f"sqlite:///{path}".replace("%", "%25").replace("?", "%3F")


def sqlite_path(url: str) -> Path | None:
    """The file of a SQLite URL; None for another database."""
    scheme, _, path = url.partition(":///")
    return Path(unquote(path)) if scheme.lower() == "sqlite" else None


def hide_password(text: str) -> str:
    """The text with passwords in URLs replaced by ***, also in mistyped ones."""
    # Up to the last @ of the line, and of an option up to the next: a password may hold an unescaped @, / or space.
    text = re.sub(r"(://[^:/@\s]*):.*@", r"\1:***@", text)
    text = re.sub(r"^(?!.*://)\S*:\S*@", "***@", text)
    text = re.sub(r"(://[^:/@\s\[]+):(?!\d+\b|\*)[^\s'\"]*", r"\1:***", text)  # no port, so one without its @
    return re.sub(r"(password=)[^&'\")]+", r"\1***", text)
