"""Recognise out-of-memory exceptions; without PyTorch, so that a process without it can ask."""

from __future__ import annotations

_TEXTS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "DefaultCPUAllocator: not enough memory",
    "allocate memory",  # of PyTorch's allocator on a CPU
    "CUBLAS_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)


def ran_out_of_memory(err: BaseException) -> bool:
    """Whether an exception, or one in its chain of causes, means that memory ran out."""
    cause: BaseException | None = err
    while cause is not None:
        if isinstance(cause, MemoryError) or type(cause).__name__ == "OutOfMemoryError":  # PyTorch's on a GPU
            return True
        if isinstance(cause, RuntimeError) and any(text in exception_text(cause) for text in _TEXTS):
            return True
        cause = cause.__cause__
    return False


def exception_text(err: BaseException) -> str:
    """An exception's text; "" if its __str__ fails."""
    try:
        return str(err)
    except Exception:
        return ""
