"""Errors that a user can act on."""


class InputError(ValueError):
    """An unusable value. Its text is "field: value: fix", on one line.

    Attributes:
        field: the argument or configuration field.
        value: the value given, as text.
        fix: how to correct it.
    """

    def __init__(self, field: str, value: object, fix: str) -> None:
        super().__init__(field, str(value), fix)
        self.field, self.value, self.fix = field, str(value), fix

    def __str__(self) -> str:
        return f"{self.field}: {self.value}: {self.fix}"


class BackendError(InputError):
    """A backend that is unknown, or cannot run on this device and dtype."""
