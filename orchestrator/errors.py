"""The base of every error that is the user's to mend."""


class UserError(ValueError):
    """Shown as it is, without a traceback, exit code 2: each line names the field, the value and the fix."""
