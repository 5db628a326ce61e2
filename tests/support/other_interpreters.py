"""Interpreters beside the one that runs the tests, each in an environment of its own."""

import subprocess
import sys
from pathlib import Path


def make_interpreter(folder: Path, *search: str | Path) -> str:
    """Path of the interpreter of a new environment in `folder`, which finds packages in `search`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (folder / "lib" / version / "site-packages" / "others.pth").write_text("".join(f"{path}\n" for path in search))
    return str(folder / "bin" / "python")


def own_packages() -> list[str]:
    """Folders of the packages of the interpreter that runs the tests."""
    return [path for path in sys.path if path.endswith("site-packages")]
