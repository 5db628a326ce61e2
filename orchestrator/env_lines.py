"""Mistakes in a `.env`: python-dotenv leaves out what it cannot read, and a setting would silently be its default."""

from __future__ import annotations

import io
import re
from pathlib import Path

from dotenv.parser import Binding, parse_stream

from jobs.specs.user_files import NotAFileError, open_regular

_MOST = 1 << 20  # characters
_NAME = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)")
_OURS = re.compile(r"^\s*(?:export\s+)?(NSA_\w+)\s*=", re.IGNORECASE | re.MULTILINE)


def mistakes(path: Path) -> list[str]:
    """One line for each mistake in a `.env`, without the values, which may be secret; none for one that is missing.

    A folder that is a virtual environment is none of ours.
    """
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8") as file:
            text = file.read(_MOST + 1)
    except UnicodeDecodeError:
        return [f".env: '{path}': is not UTF-8; save it as UTF-8 text"]
    except NotAFileError:
        if (path / "pyvenv.cfg").exists():
            return []
        return [f".env: '{path}': is not a regular file; write NAME=VALUE lines to a file of that name, or remove it"]
    except FileNotFoundError:
        return [f".env: '{path}': is a link to nothing; mend or remove it"] if path.is_symlink() else []
    except OSError as err:
        return [f".env: '{path}': cannot be read ({err.strerror}); make it readable"]
    if len(text) > _MOST:
        return [f".env: '{path}': has more than {_MOST:,} characters; keep NAME=VALUE lines alone in it"]
    found = ((_line(binding), _mistake(binding)) for binding in parse_stream(io.StringIO(text)))
    return [f".env: '{path}': line {line}: {mistake}" for line, mistake in found if mistake]


def names(path: Path) -> list[str]:
    """The variables that a `.env` names; none if it cannot be read, which is one of the `mistakes`."""
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8") as file:
            return [binding.key for binding in parse_stream(io.StringIO(file.read(_MOST))) if binding.key]
    except (OSError, UnicodeDecodeError):
        return []


def _line(binding: Binding) -> int:
    """The line of a binding, which begins with the empty lines before it."""
    whole = binding.original.string
    return binding.original.line + whole[: len(whole) - len(whole.lstrip())].count("\n")


def _mistake(binding: Binding) -> str | None:
    text = binding.original.string.strip()
    first, _, later = text.partition("\n")
    named = _NAME.match(first)
    if named is None or (binding.key and binding.key != named[1]):
        nothing = binding.error or (binding.key and binding.value is None)
        return "is not NAME=VALUE; correct it, or begin it with #" if nothing else None
    name = named[1]
    if binding.error and "=" in first:
        return f"{name} has a quote that does not end, or text after it; write {name}='VALUE', or no quotes"
    ours = name.upper().startswith("NSA_")
    if binding.error or (ours and binding.value is None):
        return f"{name} has no '='; write {name}=VALUE, or begin the line with #"
    if later and (lost := [name] if ours else _OURS.findall(later)):
        return f"{name} has a quote that ends in a later line, so that {lost[0]} is not read as meant; close it before"
    return None
