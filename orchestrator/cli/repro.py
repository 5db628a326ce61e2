"""One point again: as a new run, or as a script with its command, environment and commit."""

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from jobs.schema.plain_text import in_a_line
from orchestrator.errors import UserError

_PACKAGES = ("torch", "triton")
# Variables that the orchestrator sets again, that were withheld, and names that are none: a journal may hold any.
_OURS = re.compile(r"NSA_|OMP_NUM|MKL_NUM|CUDA_VISIBLE|CUDA_DEVICE_ORDER|\w+_CACHE_DIR=|\w+=\(set, |\w*[^\w=]")


def spec_of(run: Mapping[str, Any], point: Mapping[str, Any]) -> str:
    """The spec of a run, for one of its points alone, as JSON, which is YAML. Raises UserError if it has none."""
    if not run["spec"].get("name"):
        raise UserError(f"POINT: {point['point_id']!r}: its run has no spec to measure; name a point that was measured")
    return json.dumps({**run["spec"], "only": [point["label"]]}, indent=1)


def script(run: Mapping[str, Any], point: Mapping[str, Any]) -> str:
    """A shell script that measures a point again, at its commit, with the versions and variables that it had."""
    content, environment, commit = spec_of(run, point), point["environment"], run["git_commit"]
    packages = environment.get("packages") or {}
    about = [f"{point['point_id']}, {point['label']}: {point['state']}", f"measured on {point['node'] or run['host']}"]
    known = dict(environment)
    if isinstance(card := known.get("gpu"), dict):
        known |= {"gpu": card.get("name"), "driver": card.get("driver")}
    about += [f"{name} {known[name]}" for name in ("gpu", "driver", "cuda", "cpu", "python") if known.get(name)]
    about += [f"packages: {', '.join(f'{name} {version}' for name, version in packages.items())}"]
    if run["git_dirty"]:
        about.append("the sources had changes that the commit does not hold")
    if "only" not in run["spec"]:  # of an older version
        about.append("its commit cannot measure one point of a spec, so this measures all of them")
        content = json.dumps(run["spec"], indent=1)
    pinned = [f"{name}=={packages[name].partition('+')[0]}" for name in _PACKAGES if name in packages]
    variables = {
        name: value
        for name, value in (environment.get("variables") or {}).items()
        if not _OURS.match(f"{name}={value}")
    }
    lines = ["#!/bin/sh", *(f"# {in_a_line(each)}" for each in about), "set -eu"]
    if commit:  # in a checkout of nsa-bench
        lines += ["tree=$(mktemp -d)/nsa-bench", f'git worktree add --detach "$tree" {shlex.quote(commit)}']
        lines += ['cd "$tree"']
    lines += ["python3 -m venv .venv", shlex.join([".venv/bin/pip", "install", "--editable", ".", *pinned])]
    lines += [f"export {name}={shlex.quote(str(value))}" for name, value in variables.items()]
    lines += ["cat > repro.yaml <<'SPEC'", content, "SPEC", "exec .venv/bin/python -m jobs repro.yaml --local"]
    return "\n".join(lines)
