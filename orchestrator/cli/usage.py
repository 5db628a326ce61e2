"""Usage of the command line: arguments of several commands, and mistakes in one line each: field, value, fix."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from jobs.schema.plain_text import in_a_line, shown

UsageError: Any = typer.BadParameter.__base__
"""An option or argument that is unknown, missing or wrong: click's class, of which newer versions of Typer have a copy
without a public name."""

_VALUE = 200  # characters

Run = Annotated[
    str, typer.Argument(metavar="RUN", help="run id, a unique beginning of one, its Ray job's id, or 'last'")
]
Runs = Annotated[list[str] | None, typer.Argument(metavar="RUN", help="run ids, or 'last'; none: all measured runs")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a key of the spec")]
Rules = Annotated[Path | None, typer.Option(help="YAML of rules; default: NSA_GATES, else the project's own")]


class Format(StrEnum):
    """The formats of a report."""

    MD = "md"
    HTML = "html"
    CSV = "csv"
    JSON = "json"


def in_words(err: Any) -> str:
    """A UsageError as one line."""
    command = err.ctx.command_path if err.ctx else "nsa"
    help_ = f"see `{command} --help`"
    message = str(err.message).removesuffix(".")
    if type(err).__name__ == "NoSuchOption":
        fix = f"use {' or '.join(sorted(err.possibilities))}" if err.possibilities else help_
        return f"{_short(err.option_name)}: is no option of `{command}`; {fix}"
    if (param := getattr(err, "param", None)) is not None:
        field = max(param.opts, key=len) if param.param_type_name == "option" else param.metavar or param.name.upper()
        if type(err).__name__ == "MissingParameter":
            return f"{field}: is missing; give it, {help_}"
        if isinstance(cause := err.__cause__, ValidationError):  # of newer versions of Typer
            details = cause.errors(include_url=False)[0]
            rule = details["msg"].removeprefix("Value error, ").removeprefix(f"{details['input']!r} ").removesuffix(".")
            return f"{field}: {shown(details['input'], _VALUE)}: {rule}; give another, {help_}"
        value, is_not, rest = message.partition(" is not ")
        wrong = f"{_short(value)}: is not {in_a_line(rest)}" if is_not else in_a_line(value)
        return f"{field}: {wrong}; give another, {help_}"
    if option := getattr(err, "option_name", None):
        return f"{_short(option)}: {_short(message.replace(f'Option {option!r} ', ''))}; {help_}"
    for beginning, mistake in (
        ("No such command ", "is no command of"),
        ("Got unexpected extra argument", "is too much for"),
    ):
        if message.startswith(beginning):
            argument = message.removeprefix(beginning).removeprefix("(s)").strip(" ()'")
            return f"{_short(argument)}: {mistake} `{command}`; {help_}"
    return f"{command}: {_short(message)}; {help_}"


def _short(text: str) -> str:
    return in_a_line(text, _VALUE)
