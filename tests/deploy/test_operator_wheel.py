"""The operator as a distribution of its own: its wheel runs the pages' examples where only torch is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import nsa_core

ROOT = Path(__file__).resolve().parents[2]
ALONE = """
import sys

class OnlyTorch:
    def find_spec(self, name, path=None, target=None):
        if name in {"jobs", "orchestrator", "pandas", "pydantic", "ray", "rich", "sqlalchemy", "streamlit"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, OnlyTorch())
"""


def test_the_wheel_of_the_operator_runs_the_examples(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "nsa_core", tmp_path / "nsa_core", ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path / "dist"]
    subprocess.run([*build, tmp_path / "nsa_core"], check=True, timeout=200)
    [wheel] = (tmp_path / "dist").iterdir()
    assert wheel.name == f"nsa_core-{nsa_core.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        folders = {name.split("/")[0] for name in archive.namelist()}
        assert folders == {"nsa_core", f"nsa_core-{nsa_core.__version__}.dist-info"}
        assert "nsa_core/py.typed" in archive.namelist()
        archive.extractall(tmp_path / "installed")
    pages = "".join((ROOT / name).read_text() for name in ("docs/operator.md", "README.md"))
    examples = re.findall(r"```python\n(import torch\n.*?)```", pages, re.DOTALL)
    assert len(examples) == 5
    with_transformers = [each for each in examples if "transformers" in each]
    programs = [[ALONE, *(each for each in examples if each not in with_transformers)]]
    programs += [with_transformers] if find_spec("transformers") else []
    env = os.environ | {"PYTHONPATH": str(tmp_path / "installed"), "PYTHONSAFEPATH": "1"}
    for program in programs:
        text = "\n".join([*program, "import nsa_core", "print(nsa_core.__file__)"])
        done = subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True, timeout=200)
        assert done.stdout.splitlines()[-1:] == [f"{tmp_path}/installed/nsa_core/__init__.py"], done.stderr
