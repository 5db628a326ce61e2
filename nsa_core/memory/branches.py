"""Common accounts of backends that compute branch by branch (functional._attend)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..config import NSAConfig
from ..routes import Branch
from .ledger import Ledger
from .sizes import Sizes


def branches_forward(
    ledger: Ledger,
    sizes: Sizes,
    config: NSAConfig,
    compresses: bool,
    grad: bool,
    run: Mapping[Branch, Callable[[], None]],
    select: Callable[[Ledger], None],
) -> None:
    """Account for functional._attend: branch after branch, each added to the first one's output."""
    compressed = sizes.compressed(config) if compresses else 0
    ledger.hold("activations", 2 * compressed)
    run["cmp"]()
    ledger.hold("activations", sizes.q - (0 if grad else 2 * compressed))
    ledger.hold("workspace", compressed)  # select compresses for itself
    select(ledger)
    ledger.release("workspace", compressed)
    ledger.hold("activations", sizes.blocks(config))
    run["slc"]()
    ledger.release("activations", 0 if grad else sizes.blocks(config))
    ledger.hold("workspace", sizes.q)  # the selected branch's output, until the window's takes its name
    run["win"]()
    ledger.release("workspace", sizes.q)


def kept(sizes: Sizes, config: NSAConfig, compresses: bool) -> int:
    """Bytes that the backward needs beside the operator's own tensors: compressed keys and values, the selection."""
    return (2 * sizes.compressed(config) if compresses else 0) + sizes.blocks(config)


def key_gradients(sizes: Sizes, config: NSAConfig, branch: Branch, compresses: bool) -> int:
    """Bytes of the gradients of keys and values that stay after a branch: one pair for all branches, or one each."""
    if compresses:
        return 2 * sizes.kv if branch == "win" else 0
    return 2 * sizes.compressed(config) if branch == "cmp" else 2 * sizes.kv
