"""Blocks of seeds/fit-for-production.md: the final report on toolchain, backends, soak and estimator (002)."""

from __future__ import annotations

from collections import Counter

from seed_backward import smallest
from seed_evidence import (
    ANY,
    BRANCHES,
    CAPACITY,
    ESTIMATE,
    EXTRA,
    MATRIX,
    PEAK,
    RESERVED,
    SCALING,
    SEARCH,
    SOAK,
    THROUGHPUT,
    TIME,
    TRAIN,
    WAYS,
    Evidence,
    Spec,
    shown,
    tally,
    together,
)
from seed_parts import BACKENDS, OF_ALL, backends
from tables import table

from orchestrator.gates.verdicts import evaluate, load_gates
from orchestrator.settings import load_settings
from orchestrator.states import Result

TOOLCHAIN = Spec("toolchain_m7c.yaml")
_CHANGES = (("output_difference", "1"), ("time_change", "%"), ("memory_change", "%"))
SPECS = (MATRIX, TOOLCHAIN, SEARCH, BRANCHES, SOAK, ESTIMATE, CAPACITY, SCALING, TRAIN)

_BOTH = "forward+backward"
_LENGTHS = (128, 512, 1024, 2048)
_TARGET = "m7c-125m-training"


def blocks(e: Evidence) -> dict[str, str]:
    return {
        "summary": _summary(e),
        "toolchain": _toolchain(e),
        "versions": _versions(e),
        "selection": _then_and_now(e, "slc", "sel", OF_ALL),
        "selection-now": backends(e, "slc", OF_ALL),
        "sliding": _then_and_now(e, "win", "win", ("naive", "flash", "triton")),
        "soak": _soak(e),
        "estimator": _estimator(e),
        "viability": _viability(e),
        "findings": _findings(e),
        "scaling": _scaling(e),
        "statistics": _statistics(e),
        "verdict": verdict(e),
    }


def _summary(e: Evidence) -> str:
    points = e.points(MATRIX, env=ANY)
    hung = sum(row["state"] == "hang" for row in points)
    hangs = f"{hung or 'none'} of {len(points)} points" if points else MATRIX.not_measured
    memory = e.growth(SCALING, EXTRA[0], "triton", _BOTH)
    return f"Hangs: {hangs}. Memory of the kernels, forward+backward: {memory}."


def _toolchain(e: Evidence) -> str:
    rows = []
    for row in e.points(TOOLCHAIN, env=ANY, python=ANY):
        at = {axis: row[axis] for axis in ("implementation", "seq_len", "env", "python") if row[axis] == row[axis]}
        figures = [e.cell(TOOLCHAIN, figure, **at) for figure in _CHANGES]
        rows.append([str(row["label"]), str(row["state"]), *figures])
    size = "forward+backward 5 layers dim 768 S={} (torch {}"
    sizes = [(seq_len, version) for seq_len in (512, 1024) for version in ("2.5.1", "2.3.1")]
    equal = all(e.seed_point("002", size.format(*each)) for each in sizes)
    then = f"The report, 5 layers at S=512 and 1,024, torch 2.5.1 and 2.3.1: {'equal' if equal else 'not told'}.\n\n"
    titles = ["a model's pass, under what", "state", "largest difference of an output", "time", "memory"]
    return then + table(titles, rows or [[TOOLCHAIN.not_measured, "", "", "", ""]])


def _versions(e: Evidence) -> str:
    """Versions of the newest run of each spec."""
    rows = []
    for spec in (MATRIX, BRANCHES, ESTIMATE, SCALING, TRAIN):
        found = e.environment(spec)
        packages, gpu = found.get("packages", {}), found.get("gpu", {})
        told = [str(packages.get("torch", "")), str(packages.get("triton", "")), str(found.get("cuda", ""))]
        told += [str(gpu.get("driver", "")), str(gpu.get("name", ""))]
        rows.append([f"`{spec.file}`", *(told if found else [spec.not_measured, "", "", "", ""])])
    return table(["spec", "PyTorch", "Triton", "CUDA", "driver", "GPU"], rows)


def _then_and_now(e: Evidence, branch: str, then: str, names: tuple[str, ...]) -> str:
    """The report's five layers beside one layer's attention, forward+backward, at 2,048 tokens."""
    rows = []
    for name in names:
        size = f"{_BOTH} 5 layers dim 768 S=2048"
        told = [e.seed("002", figure, size, f"{then}, {BACKENDS[name]}") for figure in (PEAK, TIME)]
        at = {"branch": branch, "implementation": name, "batch": 1, "seq_len": 2048, "pass_": _BOTH}
        rows.append([BACKENDS[name], ", ".join(filter(None, told)), e.cell(BRANCHES, EXTRA, TIME, **at)])
    return table(["backend", "the report: five layers of the model", "here: the branch of one layer"], rows)


def _soak(e: Evidence) -> str:
    figures = [
        ("state", e.states(SOAK)),
        ("training", e.cell(SOAK, ("soak_time", "h"))),
        ("processes, one after the other", e.cell(SOAK, ("pieces", "1"))),
        ("memory held, at most", e.cell(SOAK, ("memory_held", "MiB"))),
        ("growth of memory", e.cell(SOAK, ("memory_growth", "%/1000 steps"))),
        ("drift of the throughput", e.cell(SOAK, ("throughput_drift", "%/h"))),
        ("throughput", e.cell(SOAK, THROUGHPUT)),
    ]
    return table(["soak: 12 layers, dim 768, S=2,048", "here"], figures)


def _estimator(e: Evidence) -> str:
    """The report's estimate for five layers beside ours of the whole model, both passes apart."""
    rows = []
    for seq_len in _LENGTHS:
        then = e.seed_point("002", f"{_BOTH} 5 layers dim 768 S={seq_len}")
        observed = e.seed("002", PEAK, f"{_BOTH} 5 layers dim 768 S={seq_len}")
        error = ""
        if then is not None and then["estimate_bytes"] == then["estimate_bytes"]:
            measured = float(observed.removesuffix(" MiB").replace(",", ""))
            error = f" ({100 * (then['estimate_bytes'] / 2**20 / measured - 1):+.1f} %)"
        cells = [
            e.cell(ESTIMATE, ("estimate_error", "%"), PEAK, implementation=way, pass_=pass_, seq_len=seq_len)
            for way in ("triton", "dense")
            for pass_ in ("forward", _BOTH)
        ]
        rows.append([f"{seq_len:,}", f"{observed}{error}", *cells])
    columns = [f"{way}, {pass_}" for way in ("our kernels", "dense") for pass_ in ("forward", _BOTH)]
    return table(["S", "the report", *columns], rows) + f"\n\n{_worst(e)}"


def _worst(e: Evidence) -> str:
    """The largest error from 512 tokens on."""
    errors = {
        f"{row['label']}": value
        for row in e.points(ESTIMATE)
        if row["seq_len"] >= 512 and (value := e.value(ESTIMATE, "estimate_error", label=row["label"])) is not None
    }
    if not errors:
        return f"Largest error from 512 tokens on: {ESTIMATE.not_measured}."
    label = max(errors, key=lambda name: abs(errors[name]))
    return f"Largest error from 512 tokens on, of {len(errors)} points: {shown(errors[label], '%')} ({label})."


def _viability(e: Evidence) -> str:
    at = {"implementation": "triton", "layers": 12, "seq_len": 2048}
    rows = [
        ["forward", e.cell(ESTIMATE, PEAK, **at, pass_="forward")],
        ["forward+backward", e.cell(ESTIMATE, PEAK, **at, pass_=_BOTH)],
        ["training step, no checkpointing, batch 1", e.cell(ESTIMATE, PEAK, **at, pass_="train")],
        ["training with checkpointing, batch 2", e.cell(TRAIN, PEAK, RESERVED, **at, batch=2)],
    ]
    return table(["12 layers, dim 768, S=2,048", "memory"], rows)


def _findings(e: Evidence) -> str:
    growths = {title: e.growth(SCALING, EXTRA[0], way, _BOTH) for way, title in WAYS.items()}
    at = {"branch": "slc", "seq_len": 2048, "pass_": _BOTH}
    memory = {BACKENDS[name]: e.cell(BRANCHES, EXTRA, **at, implementation=name) for name in OF_ALL}
    longest = e.cell(CAPACITY, ("longest", "token"), implementation="triton", batch=1, checkpointing="off")
    rows = [
        ["no hang reproduced", f"{e.states(MATRIX, env=ANY)}; smallest failing size: {smallest(e)}"],
        ["versions make no difference", "see [phase 1](#phase-1-toolchain-parity-testing)"],
        ["memory grows as S²", together(growths)],
        ["backends use equal memory", together(memory)],
        ["12 layers at 2,048 need checkpointing", f"longest sequence without it: {longest}"],
    ]
    return table(["the report found", "here"], rows)


def _scaling(e: Evidence) -> str:
    rows = []
    for seq_len in (128, 256, 512, 1024, 2048):
        then = e.seed("002", PEAK, f"{_BOTH} 5 layers dim 768 S={seq_len}")
        at = {"layers": 12, "seq_len": seq_len, "implementation": "triton"}
        rows.append(
            [f"{seq_len:,}", then, *(e.cell(ESTIMATE, PEAK, **at, pass_=pass_) for pass_ in ("forward", _BOTH))]
        )
    return table(["S", "the report, 5 layers", "12 layers, forward", "12 layers, forward+backward"], rows)


def _statistics(e: Evidence) -> str:
    rows = []
    for spec in SPECS:
        points = e.points(spec, env=ANY, python=ANY)
        longest = max((row["seq_len"] for row in points if row["seq_len"] == row["seq_len"]), default=None)
        names = Counter(str(row["implementation"]) for row in points)
        told = [tally(points), ", ".join(names), f"{longest:,.0f}" if longest else ""]
        rows.append([f"`{spec.file}`", *(told if points else [spec.not_measured, "", ""])])
    return table(["spec", "points", "implementations", "longest S"], rows)


def verdict(e: Evidence) -> str:
    """The gates' answer to whether the model is fit for its long training, on each hardware."""
    found = evaluate(e.store, load_gates(load_settings().gates), [run["run_id"] for run in e.runs])
    rows = []
    for target in found:
        if target.decision == _TARGET:
            missing = ", ".join(rule.rule for rule in target.rules if rule.result is not Result.GO)
            rows.append([target.name, target.result.value, missing])
    return table(["decision", "verdict", "rules that do not hold or lack evidence"], rows)
