"""The base class of errors that the user can fix."""


class UserError(ValueError):
    """An error shown without a traceback, with exit code 2. Each line names the field, the value and the fix."""
