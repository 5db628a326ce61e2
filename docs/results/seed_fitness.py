"""Blocks of seeds/fit-for-production.md: the final report on toolchain, backends, soak and estimator (002)."""

from __future__ import annotations

from collections import Counter

from seed_backward import search_note, smallest
from seed_evidence import (
    ANY,
    BRANCHES,
    CAPACITY,
    ESTIMATE,
    EXTRA,
    MATRIX,
    PEAK,
    PROFILE,
    RESERVED,
    SCALING,
    SEARCH,
    SOAK,
    SOAK_2GPU,
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
from tables import noted, number, table

from jobs.schema.plain_text import for_file
from jobs.schema.states import Result
from orchestrator.judge.verdicts import evaluate, load_gates
from orchestrator.settings import load_settings

TOOLCHAIN = Spec("toolchain_m7c.yaml")
_CHANGES = (("output_difference", "1"), ("time_change", "%"), ("memory_change", "%"), ("differences", "1"))
_NOISE = {"implementation": "triton", "seq_len": 2048}  # points whose step the host sets the pace of
SPECS = (MATRIX, TOOLCHAIN, PROFILE, SEARCH, BRANCHES, SOAK, SOAK_2GPU, ESTIMATE, CAPACITY, SCALING, TRAIN)

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
    points = e.points(TOOLCHAIN, env=ANY, python=ANY)
    for row in points:
        at = {axis: row[axis] for axis in ("implementation", "seq_len", "env", "python") if row[axis] == row[axis]}
        figures = [e.cell(TOOLCHAIN, figure, **at) for figure in _CHANGES]
        rows.append([str(row["label"]), str(row["state"]), *figures])
    titles = ["a model's pass, under what", "state", "largest difference of an output", "time", "memory"]
    titles.append("changes beyond their tolerance")
    told = table(titles, rows or [[TOOLCHAIN.not_measured, "", "", "", "", ""]])
    return noted(_two_versions(e), told, _noise(e))


def _two_versions(e: Evidence) -> str:
    """The report's comparison, and whether ours has two interpreters."""
    size = "forward+backward 5 layers dim 768 S={} (torch {}"
    sizes = [(seq_len, version) for seq_len in (512, 1024) for version in ("2.5.1", "2.3.1")]
    equal = all(e.seed_point("002", size.format(*each)) for each in sizes)
    then = f"The report, 5 layers at S=512 and 1,024, torch 2.5.1 and 2.3.1: {'equal' if equal else 'not told'}."
    layers = sorted({int(row["layers"]) for row in e.points(MATRIX, env=ANY, seq_len=2048)})
    ten = f"here {' and '.join(map(str, layers)) or 'no'} layers ran there" + ("" if 10 in layers else ", 10 did not")
    started = f"Its 10 layers at 2,048 tokens were started, without a result; {ten}."
    return f"{then} Here: {_versions_compared(e)}. {started}"


def _versions_compared(e: Evidence) -> str:
    others = {row["python"] for row in e.points(TOOLCHAIN, env=ANY, python=ANY) if isinstance(row["python"], str)}
    return f"{len(others) + 1} interpreters" if others else "not measured with two versions"


def _noise(e: Evidence) -> str:
    """How much the first toolchain's own time varies where the host sets the pace."""
    first, changed = [], []
    for row in e.points(TOOLCHAIN, env=ANY, python=ANY, **_NOISE):
        at = {**_NOISE, "env": row["env"], "python": ANY}
        values = [e.value(TOOLCHAIN, name, **at) for name in ("first_time", "time_change", "tensors_equal")]
        if values[0] is not None:
            first.append(values[0])
        if values[1] is not None and values[2] is not None:
            changed.append((values[1], values[2]))
    busy = e.cell(PROFILE, ("busy_time", "ms"), **_NOISE, batch=2, pass_="train")
    whole = e.cell(PROFILE, TIME, **_NOISE, batch=2, pass_="train")
    if len(first) < 2 or not changed:
        return ""
    most, equal = max(changed, key=lambda each: abs(each[0]))
    told = (
        f"At 2,048 tokens the host sets the pace of our kernels' eager step (the device computes {busy} of a step's "
        f"{whole} in `profile_m7c.yaml`): the first toolchain alone took {number(min(first))} and {number(max(first))} "
        "ms in two points."
    )
    if abs(most) > 150 * (max(first) / min(first) - 1):  # beyond one and a half times that spread
        return told
    bits = "all" if equal == 100 else shown(equal, "%")
    return f"{told} The {shown(most, '%')} there are of that size: noise of the host, {bits} outputs equal bit for bit."


def _versions(e: Evidence) -> str:
    """Versions of the newest run of each spec."""
    rows = []
    for spec in (MATRIX, TOOLCHAIN, BRANCHES, ESTIMATE, SCALING, TRAIN):
        found = e.environment(spec, env=ANY, python=ANY)
        packages, gpu = found.get("packages", {}), found.get("gpu", {})
        told = [str(packages.get("torch", "")), str(packages.get("triton", "")), str(found.get("cuda", ""))]
        told += [str(gpu.get("driver", "")), str(gpu.get("name", ""))]
        rows.append([f"`{spec.title}`", *(told if found else [spec.not_measured, "", "", "", ""])])
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
    told = [_soaked(e, spec) for spec in (SOAK, SOAK_2GPU)]
    held = "memory held by a rank, at most"
    report = {"state": "timed out", "gradient checkpointing": "on", held: "60 to 70 GB expected"}
    rows = [[title, report.get(title, ""), *(each[title] for each in told)] for title in told[0]]
    return table(["soak: 12 layers, dim 768, S=2,048", "the report", "here, one GPU", "here, two GPUs"], rows)


def _soaked(e: Evidence, spec: Spec) -> dict[str, str]:
    """A soak's figures by title."""
    config = e.config(spec)
    return {
        "state": e.states(spec),
        "card, mode": e.mode(spec),
        "gradient checkpointing": ("on" if config["model"]["checkpointing"] else "off") if config else "",
        "training": e.cell(spec, ("soak_time", "h")),
        "pieces, each in a fresh process": e.cell(spec, ("pieces", "1")),
        "warnings": for_file("; ".join(e.warnings(spec))),
        "memory held by a rank, at most": e.cell(spec, ("memory_held", "MiB")),
        "growth of memory": e.cell(spec, ("memory_growth", "%/1000 steps")),
        "growth of the host's memory": e.cell(spec, ("host_memory_slope", "MiB/h")),
        "drift of the throughput": e.cell(spec, ("throughput_drift", "%/h")),
        "throughput": e.cell(spec, THROUGHPUT),
    }


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
    cases = (
        ("forward", "50.48 GB", ESTIMATE, (PEAK,), {"pass_": "forward"}),
        ("forward+backward", "151.23 GB", ESTIMATE, (PEAK,), {"pass_": _BOTH}),
        ("training step, no checkpointing, batch 1", "", ESTIMATE, (PEAK,), {"pass_": "train"}),
        ("training with checkpointing, batch 2", "60 to 70 GB", TRAIN, (PEAK, RESERVED), {"batch": 2}),
    )
    rows = [
        [title, then, e.cell(spec, *figures, **at, **more), e.mode(spec, **at, **more)]
        for title, then, spec, figures, more in cases
    ]
    return table(["12 layers, dim 768, S=2,048", "the report expected", "allocated, reserved", "card, mode"], rows)


def _findings(e: Evidence) -> str:
    growths = {title: e.growth(SCALING, EXTRA[0], way, _BOTH) for way, title in WAYS.items()}
    at = {"branch": "slc", "seq_len": 2048, "pass_": _BOTH}
    memory = {BACKENDS[name]: e.cell(BRANCHES, EXTRA, **at, implementation=name) for name in OF_ALL}
    longest = e.cell(CAPACITY, ("longest", "token"), implementation="triton", batch=1, checkpointing="off")
    rows = [
        ["no hang reproduced", f"{e.states(MATRIX, env=ANY)}; smallest failing size: {smallest(e)}"],
        ["versions make no difference", f"{_versions_compared(e)}: [phase 1](#phase-1-toolchain-parity-testing)"],
        ["memory grows as S²", together(growths)],
        ["backends use equal memory", together(memory)],
        ["12 layers at 2,048 need checkpointing", f"longest sequence without it: {longest}"],
    ]
    return noted(table(["the report found", "here"], rows), search_note(e))


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
    rows, counts = [], Counter()
    for spec in SPECS:
        points = e.points(spec, env=ANY, python=ANY)
        longest = max((row["seq_len"] for row in points if row["seq_len"] == row["seq_len"]), default=None)
        names = Counter(str(row["implementation"]) for row in points)
        counts += Counter(str(row["state"]) for row in points)
        told = [tally(points), ", ".join(names), f"{longest:,.0f}" if longest else ""]
        rows.append([f"`{spec.title}`", *(told if points else [spec.not_measured, "", ""])])
    then = "The report: 27 of 27 configurations passed, none hung; at most 2,048 tokens and 10 layers, 12 in the soak."
    now = f"Here: {counts['ok']} of {counts.total()} points of these specs are ok, {counts['hang'] or 'none'} hung."
    return f"{then} {now}\n\n" + table(["spec", "points", "implementations", "longest S"], rows)


def verdict(e: Evidence) -> str:
    """The gates' answer to whether the model is fit for its long training, on each hardware."""
    found = evaluate(e.store, load_gates(load_settings().gates), [run["run_id"] for run in e.runs])
    rows = []
    for target in found:
        if target.decision == _TARGET:
            missing = ", ".join(rule.rule for rule in target.rules if rule.result is not Result.GO)
            rows.append([target.name, target.result.value, missing])
    return table(["decision", "verdict", "rules that do not hold or lack evidence"], rows)
