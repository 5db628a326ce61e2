"""Another interpreter: the search path on which it finds our sources and nothing of this interpreter's packages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path


def variables_for_another(variables: Mapping[str, str], packages: Iterable[Path], folder: Path) -> dict[str, str]:
    """Environment variables in which another interpreter imports our sources but none of this one's packages.

    Our sources may lie in this interpreter's site-packages, so a folder of links to them alone is its search path,
    without the working directory (PYTHONSAFEPATH), where other sources may lie.

    Args:
        variables: of this process.
        packages: folders of the packages to import.
        folder: path of the folder of links; made here.
    """
    folder.mkdir()
    for package in packages:
        (folder / package.name).symlink_to(package.resolve())
    kept = {name: value for name, value in variables.items() if name not in ("PYTHONHOME", "PYTHONPATH")}
    return kept | {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
