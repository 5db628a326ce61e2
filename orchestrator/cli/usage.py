"""Usage of the command line: arguments of several commands, and mistakes in one line each: field, value, fix."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

from jobs.schema.plain_text import in_a_line, shown
from orchestrator.errors import UserError

_UsageError: Any = typer.BadParameter.__mro__[1]  # of click, which newer versions of Typer have a copy of
_VALUE = 200  # characters

Run = Annotated[
    str, typer.Argument(metavar="RUN", help="run id, a unique beginning of one, its Ray job's id, or 'last'")
]
Runs = Annotated[list[str] | None, typer.Argument(metavar="RUN", help="run ids, or 'last'; none: all measured runs")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a key of the spec")]


class Format(StrEnum):
    """The formats of a report."""

    MD = "md"
    HTML = "html"
    CSV = "csv"
    JSON = "json"


class CommandLineError(UserError):
    """An option or argument that is unknown, missing or wrong."""


class Commands(TyperGroup):
    """A group of commands whose mistakes of usage are CommandLineErrors."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        try:
            return super().make_context(*args, **options)
        except _UsageError as err:
            raise _in_words(err) from None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except _UsageError as err:
            raise _in_words(err) from None


def _in_words(err: Any) -> Exception:
    """The error as one line; that no command was given, which shows the help, stays as it is."""
    if type(err).__name__ == "NoArgsIsHelpError":
        return err
    command = err.ctx.command_path if err.ctx else "nsa"
    help_ = f"see `{command} --help`"
    message = str(err.message).removesuffix(".")
    if type(err).__name__ == "NoSuchOption":
        fix = " or ".join(sorted(err.possibilities or ()))
        return CommandLineError(
            f"{_short(err.option_name)}: is no option of `{command}`; {f'use {fix}' if fix else help_}"
        )
    if (param := getattr(err, "param", None)) is not None:
        field = max(param.opts, key=len) if param.param_type_name == "option" else param.metavar or param.name.upper()
        if type(err).__name__ == "MissingParameter":
            return CommandLineError(f"{field}: is missing; give it, {help_}")
        return CommandLineError(f"{field}: {_wrong(err)}; give another, {help_}")
    if option := getattr(err, "option_name", None):
        said = message.replace(f"Option {option!r} ", "")
        return CommandLineError(f"{_short(option)}: {_short(said)}; {help_}")
    words = {"No such command ": "is no command of", "Got unexpected extra argument": "is too much for"}
    for beginning, said in words.items():
        if message.startswith(beginning):
            given = message.removeprefix(beginning).removeprefix("(s)").strip(" ()'")
            return CommandLineError(f"{_short(given)}: {said} `{command}`; {help_}")
    return CommandLineError(f"{command}: {_short(message)}; {help_}")


def _wrong(err: Any) -> str:
    """The value and what is wrong with it."""
    if isinstance(cause := err.__cause__, ValidationError):  # of newer versions of Typer
        details = cause.errors(include_url=False)[0]
        said = details["msg"].removeprefix("Value error, ").removeprefix(f"{details['input']!r} ").removesuffix(".")
        return f"{shown(details['input'], _VALUE)}: {said}"
    value, found, rest = str(err.message).removesuffix(".").partition(" is not ")
    return f"{_short(value)}: is not {in_a_line(rest)}" if found else in_a_line(value)


def _short(text: str) -> str:
    return in_a_line(text, _VALUE)
