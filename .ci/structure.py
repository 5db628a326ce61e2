"""Holds the structure of the code to its bounds (docs/architecture.md): part of `make lint`.

Tests count only for the size of folders: they reach into what they test.
"""

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

OURS = ("nsa_core", "jobs", "orchestrator", "dashboard")
MOST_FILES = 20  # Python files of a folder
MOST_LINES = 5  # of a short function, its signature and docstring included
MOST_SHORT = 33.0  # percent of all functions
MOST_ALONE = 50  # modules with one importer


def main() -> int:
    listed = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True).stdout
    paths = [Path(name) for name in listed.split() if Path(name).exists()]
    names = {path: ".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths}
    trees = {names[path]: ast.parse(path.read_text()) for path in paths if path.parts[0] != "tests"}
    folders = Counter(path.parent for path in paths)
    problems = [
        f"{folder}: {count} files; {MOST_FILES} at most" for folder, count in folders.items() if count > MOST_FILES
    ]
    importers: dict[str, set[str]] = defaultdict(set)
    for module, tree in trees.items():
        for source, name in _imports(module, tree):
            ours = source.partition(".")[0] in OURS
            if ours and name.startswith("_") and not name.startswith("__") and not _same_package(module, source):
                problems.append(f"{module}: imports the private name {name} of {source}")
            importers[f"{source}.{name}" if f"{source}.{name}" in trees else source].add(module)
    functions = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    lines = [(function.end_lineno or function.lineno) - function.lineno + 1 for function in functions]
    short = 100 * sum(count <= MOST_LINES for count in lines) / len(functions)
    alone = sum(len(importers[module]) == 1 for module in trees)
    print(f"functions of {MOST_LINES} lines or fewer: {short:.1f} %; modules with one importer: {alone}")
    if short > MOST_SHORT:
        problems.append(f"functions of {MOST_LINES} lines or fewer: {short:.1f} %; {MOST_SHORT} % at most")
    if alone > MOST_ALONE:
        problems.append(f"modules with one importer: {alone}; {MOST_ALONE} at most")
    print(*problems, sep="\n", end="\n" if problems else "")
    return bool(problems)


def _imports(module: str, tree: ast.Module) -> list[tuple[str, str]]:
    """Module and name of each `from ... import`."""
    package = module if _is_package(module) else module.rpartition(".")[0]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - node.level + 1]
            source = ".".join([*up, *filter(None, [node.module])]) if node.level else node.module or ""
            found += [(source, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
    return found


def _is_package(module: str) -> bool:
    return Path(*module.split("."), "__init__.py").exists()


def _same_package(module: str, source: str) -> bool:
    """Whether a name of `source` is private to the package that `module` is in, or to one above it."""
    home = source if _is_package(source) else source.rpartition(".")[0]
    return module == home or module.startswith(f"{home}.")


if __name__ == "__main__":
    sys.exit(main())
