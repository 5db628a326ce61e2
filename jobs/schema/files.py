"""A file of a point, as it goes from the work to the artifact store."""

from dataclasses import dataclass


@dataclass(frozen=True)
class File:
    """A file of the work, to be kept by the parent."""

    name: str  # its name as an artifact, as the work chose it: anything
    path: str = ""  # where it is; "": it has the text
    problem: str = ""  # why there is nothing to keep
    start: int = 0  # the first byte to keep
    stop: int | None = None  # the one after the last; None: up to the end that it has when it is opened
    text: str = ""
