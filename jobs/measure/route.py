"""What really ran, per branch."""

from __future__ import annotations

from collections.abc import Callable

from nsa_core.routes import capture


def route_of(call: Callable[[], object]) -> dict[str, str]:
    """Run `call` once: the kernel of every branch that it executed; several of one branch are joined by "+"."""
    with capture() as runs:
        call()
    route: dict[str, list[str]] = {}
    for run in runs:
        kernels = route.setdefault(run.branch, [])
        if run.kernel not in kernels:
            kernels.append(run.kernel)
    return {branch: "+".join(kernels) for branch, kernels in route.items()}
