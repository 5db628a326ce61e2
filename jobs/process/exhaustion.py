"""Memory that ran out, told by the exception; without PyTorch, so that a process without it can ask."""

from __future__ import annotations


def ran_out_of_memory(err: BaseException) -> bool:
    """Whether an exception, or one in its chain of causes, means that memory ran out."""
    cause: BaseException | None = err
    while cause is not None:
        if isinstance(cause, MemoryError) or type(cause).__name__ == "OutOfMemoryError":  # PyTorch's on a GPU
            return True
        if isinstance(cause, RuntimeError) and "allocate memory" in str(cause):  # of its allocator on a CPU
            return True
        cause = cause.__cause__
    return False
