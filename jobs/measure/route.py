"""Kernels that really ran, by branch."""

from __future__ import annotations

from collections.abc import Callable

from nsa_core.routes import capture


def route_of(call: Callable[[], object]) -> dict[str, str]:
    """Run `call` once; returns the kernel of every executed branch, several kernels of a branch joined by "+"."""
    with capture() as runs:
        call()
    route: dict[str, list[str]] = {}
    for run in runs:
        kernels = route.setdefault(run.branch, [])
        if run.kernel not in kernels:
            kernels.append(run.kernel)
    return {branch: "+".join(kernels) for branch, kernels in route.items()}
