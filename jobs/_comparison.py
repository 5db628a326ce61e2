"""Comparison of a pass under two toolchains: outputs, time, memory, kernels and packages; in numbers and words.

A toolchain's findings are those of `jobs.toolchain.try_pass`: JSON, from the process that ran the pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from jobs.hardware.stats import summarize
from jobs.process.trial import Toolchain
from jobs.schema.point import Metric
from jobs.schema.quantities import PEAK_EXTRA_MEMORY, TIME, Better, Quantity, Role
from jobs.specs.environments import env_text

DIFFERENCES = Quantity(
    "differences", "1", "Differences beyond their tolerance", "differences", Better.LOWER, Role.HEADLINE
)
OUTPUT_DIFFERENCE = Quantity(
    "output_difference", "1", "Largest difference of an output", "output difference", Better.LOWER, Role.HEADLINE
)
TENSORS_EQUAL = Quantity("tensors_equal", "%", "Outputs equal bit for bit", better=Better.HIGHER)
TIME_CHANGE = Quantity("time_change", "%", "Time against the first toolchain's", "time change", role=Role.HEADLINE)
MEMORY_CHANGE = Quantity(
    "memory_change", "%", "Memory against the first toolchain's", "memory change", role=Role.HEADLINE
)
FIRST_TIME = Quantity("first_time", "ms", "Time under the first toolchain", better=Better.LOWER)
FIRST_MEMORY = Quantity("first_memory", "MiB", "Peak memory beyond inputs under the first", better=Better.LOWER)
COMPARISON = (DIFFERENCES, OUTPUT_DIFFERENCE, TENSORS_EQUAL, TIME_CHANGE, MEMORY_CHANGE, FIRST_TIME, FIRST_MEMORY)


@dataclass(frozen=True)
class Outputs:
    """Comparison of the loss and the gradients.

    Attributes:
        differences: of each tensor, relative to its norm under the first toolchain.
        equal: number of tensors that are equal bit for bit.
    """

    differences: Mapping[str, float]
    equal: int

    @property
    def largest(self) -> float:
        return max(self.differences.values())


def compare_outputs(first: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Outputs:
    """Differences of tensors by name. One that is not finite, or that only one side has, differs infinitely."""
    found, equal = {}, 0
    for name in dict.fromkeys([*first, *other]):
        if name not in first or name not in other or first[name].shape != other[name].shape:
            found[name] = float("inf")
            continue
        equal += torch.equal(first[name], other[name])
        norm = first[name].double().norm().item()
        difference = (other[name].double() - first[name].double()).norm().item()
        relative = difference / norm if norm > 0 else difference
        found[name] = relative if relative == relative else float("inf")
    return Outputs(found, equal)


def differences(
    values: Mapping[str, float], tolerance: Mapping[str, float], first: Mapping[str, str], other: Mapping[str, str]
) -> list[str]:
    """Changes of time and memory beyond their tolerance, and other routes: a phrase each."""
    found = []
    for name, word in (("time", "time"), ("memory", "peak memory")):
        change, allowed = values[f"{name}_change"], tolerance[f"{name}_percent"]
        if abs(change) > allowed:
            found.append(f"{word} {change:+.1f} %, beyond {allowed:g} %")
    for branch in dict.fromkeys([*first, *other]):
        kernels = first.get(branch, "nothing"), other.get(branch, "nothing")
        if kernels[0] != kernels[1]:
            found.append(f"branch {branch} ran {kernels[1]}, not {kernels[0]}")
    return found


def comparison_metrics(first: Mapping[str, Any], other: Mapping[str, Any], outputs: Outputs) -> list[Metric]:
    """Metrics of the second toolchain, its changes against the first, and the first's time and memory."""
    kept = [Metric(**{**metric, "samples": tuple(metric["samples"])}) for metric in other["metrics"]]
    time, before = (summarize(TIME, run["samples_ms"], run["method"]) for run in (other, first))
    memory = next(metric for metric in kept if metric.name == PEAK_EXTRA_MEMORY.name)
    held = next(metric for metric in first["metrics"] if metric["name"] == PEAK_EXTRA_MEMORY.name)
    method = "relative to the first toolchain's, on the same device in the same point"
    norms = "largest norm of a difference relative to the norm, of the loss and all gradients of the first run"
    share = 100 * outputs.equal / len(outputs.differences)
    return [
        time,
        replace(before, name=FIRST_TIME.name),
        Metric.of(TIME_CHANGE, 100 * (time.value / before.value - 1), method=f"medians; {method}"),
        *kept,
        Metric.of(FIRST_MEMORY, held["value"], method=held["method"]),
        Metric.of(MEMORY_CHANGE, 100 * (memory.value / held["value"] - 1), method=method),
        Metric.of(OUTPUT_DIFFERENCE, outputs.largest, method=norms),
        Metric.of(TENSORS_EQUAL, share, method=f"{outputs.equal} of {len(outputs.differences)} tensors"),
    ]


def toolchain_name(config: Mapping[str, Any], number: int) -> str:
    """The first (1) or second (2) toolchain of a point in words."""
    toolchain = Toolchain(**config["toolchains"][number - 1])
    words = [toolchain.python or "", env_text(toolchain.env) or ""]
    return f"toolchain {number} ({' '.join(filter(None, words)) or 'as it is'})"


def lock_file(config: Mapping[str, Any], number: int, run: Mapping[str, Any]) -> str:
    """Text with interpreter, driver, variables and exact versions of all packages of a toolchain; pip reads it."""
    there = run["environment"]
    head = [toolchain_name(config, number), f"Python {there['python']}, {there['interpreter']}", there["platform"]]
    if "cuda" in there:
        head.append(f"CUDA {there['cuda']}, cuDNN {there['cudnn']}, driver {there['gpu'].get('driver', 'unknown')}")
    head += [f"{name} in effect: {value}" for name, value in there["settings"].items()]
    lines = [f"{name}=={version}" for name, version in run["packages"].items()]
    return "\n".join([*(f"# {line}" for line in head), *lines, ""])


def comparison_table(
    config: Mapping[str, Any],
    first: Mapping[str, Any],
    other: Mapping[str, Any],
    values: Mapping[str, float],
    found: Sequence[str],
) -> str:
    """Text of the comparison; `values` are its metrics by name, `found` the phrases of `differences`."""
    rows = [
        f"1: {toolchain_name(config, 1)}",
        f"2: {toolchain_name(config, 2)}",
        "",
        f"time         {values['first_time']:12.3f} {values['time']:12.3f} ms   {values['time_change']:+7.1f} %",
        f"peak memory  {values['first_memory']:12.3f} {values[PEAK_EXTRA_MEMORY.name]:12.3f} MiB  "
        f"{values['memory_change']:+7.1f} %",
        f"outputs      {values['output_difference']:.2e} at most, {values['tensors_equal']:.1f} % equal bit for bit",
        "",
        *(found or ["no difference beyond the tolerance"]),
        "",
        "packages that differ:",
    ]
    versions = first["packages"], other["packages"]
    for name in sorted({*versions[0], *versions[1]}, key=str.lower):
        before, after = (each.get(name, "none") for each in versions)
        if before != after:
            rows.append(f"  {name}: {before}, {after}")
    return "\n".join([*rows, ""])
