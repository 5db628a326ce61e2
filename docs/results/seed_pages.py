"""The pages of the seeds' reports, docs/results/seeds: headings and questions are text, answers generated blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import seed_fitness
import seed_memory
import seed_parts
import seed_speed
from seed_evidence import VARIANTS, Evidence, Spec
from tables import fill, table

from orchestrator.store import Store

__all__ = ["PAGES", "VARIANTS", "seed_pages"]


class Page(NamedTuple):
    """A page's blocks by name, and the specs that they rest on."""

    blocks: Callable[[Evidence], dict[str, str]]
    specs: Iterable[Spec]


PAGES = {
    "which-part-hangs.md": Page(seed_parts.blocks, seed_parts.SPECS),
    "fit-for-production.md": Page(seed_fitness.blocks, seed_fitness.SPECS),
    "training-speed.md": Page(seed_speed.blocks, seed_speed.SPECS),
    "training-memory.md": Page(seed_memory.blocks, seed_memory.SPECS),
}


def seed_pages(store: Store, runs: Sequence[dict[str, Any]], texts: Mapping[str, str]) -> dict[str, str]:
    """The pages by name, filled.

    Args:
        runs: our runs, oldest first.
        texts: the pages as they stand, by name.
    """
    evidence = Evidence(store, runs)
    return {name: fill(texts[name], _blocks(page, evidence)) for name, page in PAGES.items()}


def _blocks(page: Page, evidence: Evidence) -> dict[str, str]:
    columns = ["command", "newest run", "device", "points", "commit"]
    return {**page.blocks(evidence), "sources": table(columns, evidence.sources(page.specs))}
