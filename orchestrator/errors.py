"""Errors that end a command or a run in a line."""


class UserError(ValueError):
    """An error shown without a traceback, with exit code 2. Each line names the field, the value and the fix."""


class ExecutorGone(RuntimeError):  # noqa: N818  (an event, as in "gone away")
    """The cluster went away; the rest of the run cannot be measured now."""
