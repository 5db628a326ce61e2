"""Blocks of seeds/training-memory.md: the memory diagnostic of a running training (004)."""

from __future__ import annotations

from seed_evidence import (
    CAPACITY,
    DIAGNOSE,
    DRIVER,
    ESTIMATE,
    EXTRA,
    PEAK,
    SCALING,
    SOAK,
    THROUGHPUT,
    TIME,
    TRAIN,
    TRAIN_2GPU,
    Evidence,
    Spec,
    shown,
)
from tables import commits, noted, table

from jobs.schema.plain_text import for_file
from jobs.training.case import Layout

SPECS = (DIAGNOSE, TRAIN, TRAIN_2GPU, ESTIMATE, CAPACITY, SOAK, SCALING)

_NSA = {"implementation": "triton"}
_PHASES = {"boot": "boot", "loader": "after the loader", "step_1": "step 1", "now": "at the end"}
_REPORTED = {  # by phase
    "boot": "604 MB, 1.3 GB",
    "loader": "604 MB, 1.3 GB",
    "step_1": "1.3 GB, 57.9 GB",
    "now": "59.6 GB in use",
}
_PARTS = ("parameters", "optimizer", "gradients", "activations", "workspace", "inputs")
_SIZE = "train 12 layers dim 768 S=1024"


def blocks(e: Evidence) -> dict[str, str]:
    return {
        "summary": _summary(e),
        "commit": _commit(e),
        "load": _load(e),
        "snapshots": _snapshots(e),
        "variables": _environment(e, "variables"),
        "versions": _versions(e),
        "parameters": _parameters(e),
        "configuration": _configuration(e, ("nsa",)),
        "training": _training(e),
        "routes": _routes(e),
        "parts": _parts(e),
        "lengths": _lengths(e),
        "progress": _progress(e),
        "balance": _balance(e),
        "topology": _topology(e),
        "distributed": _distributed(e),
        "advice": _advice(e),
        "comparison": _comparison(e),
        "stability": _stability(e),
        "conclusion": _summary(e),
    }


def _summary(e: Evidence) -> str:
    at = {**_NSA, "pass_": "train", "layers": 12, "seq_len": 1024}
    return (
        f"A training step of the report's length, 1,024 tokens, takes {e.cell(ESTIMATE, PEAK, **at)} with our kernels "
        f"at a batch of 1; the training of 2 x 2,048 tokens takes {e.cell(TRAIN, DRIVER, **_NSA)} on the card, at "
        f"{e.cell(TRAIN, THROUGHPUT, **_NSA)} ({e.mode(TRAIN, **_NSA)}). The report: {_then(e)[0]} and {_then(e)[1]} "
        f"on its two GPUs, at {e.seed('004', THROUGHPUT, _SIZE)}."
    )


def _then(e: Evidence) -> list[str]:
    """Memory of the report's two GPUs."""
    labels = [f"{_SIZE} (torch 2.5.1+cu121, GPU {number} of 2)" for number in (0, 1)]
    return [e.seed("004", DRIVER, label) for label in labels]


def _commit(e: Evidence) -> str:
    rows = []
    for spec in (DIAGNOSE, TRAIN):
        for run in e.of(spec)[:1]:
            told = [commits([dict(run)]), run["git_branch"] or "", f"{run['spec']['seed']}"]
            rows.append([f"`{spec.file}`", *told, str(e.environment(spec).get("training", {}).get("launcher", "none"))])
        if not e.of(spec):
            rows.append([f"`{spec.file}`", spec.not_measured, "", "", ""])
    return table(["spec", "commit", "branch", "seed", "launcher"], rows)


def _load(e: Evidence) -> str:
    rows = [["the report", "2", "4", "2", "2", "1,024", "4,096"]]
    for spec in (DIAGNOSE, TRAIN, TRAIN_2GPU):
        config = e.config(spec, **_NSA)
        if not config:
            rows.append([f"`{spec.file}`", spec.not_measured, "", "", "", "", ""])
            continue
        layout = Layout(**config.get("ranks", {"micro_batch": config["batch"]}))
        batch, length = config["batch"], config["seq_len"]
        told = [f"{size}" for size in (layout.ranks, batch, layout.micro_batch, layout.accumulation)]
        rows.append([f"`{spec.file}`", *told, f"{length:,}", f"{batch * length:,}"])
    columns = ["spec", "GPUs", "batch of all", "micro-batch of a GPU", "accumulation", "S", "tokens a step"]
    return table(columns, rows)


def _snapshots(e: Evidence) -> str:
    rows = [
        [
            title,
            _REPORTED[phase],
            *(e.cell(DIAGNOSE, (f"{phase}_{size}", "MiB"), **_NSA) for size in ("allocated", "reserved", "resident")),
        ]
        for phase, title in _PHASES.items()
    ]
    then = ", ".join(_then(e))
    columns = ["phase, highest of the ranks", "the report: allocated, reserved", "allocated", "reserved", "on the host"]
    return table(columns, rows) + (
        "\n\nHere boot and loader come before the model is made, and allocated is the most so far."
        f" In use on the report's cards: {then}; in `train_m7c.yaml`: {e.cell(TRAIN, DRIVER, **_NSA)}."
    )


def _source(e: Evidence) -> Spec:
    """The diagnosis, or until it is there the training."""
    return DIAGNOSE if e.points(DIAGNOSE, **_NSA) else TRAIN


def _environment(e: Evidence, section: str) -> str:
    spec = _source(e)
    found = e.environment(spec, **_NSA).get(section, {})
    rows = [[f"`{name}`", f"`{value}`"] for name, value in sorted(found.items())]
    return table([f"of `{spec.file}`", "value"], rows or [["all", DIAGNOSE.not_measured]])


def _versions(e: Evidence) -> str:
    spec = _source(e)
    found = e.environment(spec, **_NSA)
    told = {
        **found.get("packages", {}),
        **{name: found[name] for name in ("cuda", "python", "platform") if name in found},
    }
    rows = [[name, str(value)] for name, value in told.items()]
    return table([f"of `{spec.file}`", "version"], rows or [["all", DIAGNOSE.not_measured]])


def _parameters(e: Evidence) -> str:
    at = {**_NSA, "pass_": "train", "layers": 12, "seq_len": 1024}
    count = e.environment(_source(e), **_NSA).get("training", {}).get("parameters")
    rows = [
        ["parameters", f"{count:,}" if count else DIAGNOSE.not_measured],
        ["weights, float32", e.cell(ESTIMATE, ("allocated_parameters", "MiB"), **at)],
        ["the optimizer's state", e.cell(ESTIMATE, ("allocated_optimizer", "MiB"), **at)],
    ]
    return table(["what", "size"], rows)


def _configuration(e: Evidence, sections: tuple[str, ...]) -> str:
    spec = _source(e)
    model = e.config(spec, **_NSA).get("model", {})
    rows = [[f"`{name}`", f"{value}"] for section in sections for name, value in model.get(section, {}).items()]
    return table([f"of `{spec.file}`", "value"], rows or [["all", DIAGNOSE.not_measured]])


def _training(e: Evidence) -> str:
    spec = _source(e)
    config = e.config(spec, **_NSA)
    if not config:
        return f"Settings: {DIAGNOSE.not_measured}."
    told = {name: config[name] for name in ("steps", "seq_len", "batch", "precision")}
    rows = [[f"`{name}`", f"{value}"] for name, value in {**told, **config["optimizer"]}.items()]
    return table([f"of `{spec.file}`", "value"], rows)


def _routes(e: Evidence) -> str:
    spec = _source(e)
    rows = [[branch, f"`{kernel}`"] for branch, kernel in sorted(e.route(spec, **_NSA).items())]
    return table(["branch", f"kernel that ran in `{spec.file}`"], rows or [["all", DIAGNOSE.not_measured]])


def _parts(e: Evidence) -> str:
    """Table of a training step's memory by its parts, as the allocator counts it and as predicted."""
    lengths = (1024, 2048, 4096)
    rows = []
    for part in _PARTS:
        cells = []
        for length in lengths:
            place = {**_NSA, "pass_": "train", "layers": 12, "seq_len": length}
            predicted = e.value(ESTIMATE, f"predicted_{part}", **place)
            beside = "" if predicted is None else f" ({shown(predicted, 'MiB').removesuffix(' MiB')})"
            cells.append(e.cell(ESTIMATE, (f"allocated_{part}", "MiB"), **place) + beside)
        rows.append([part, *cells])
    columns = [f"{length:,} tokens" for length in lengths]
    return table(["part of a training step, batch 1: allocated (predicted)", *columns], rows)


def _lengths(e: Evidence) -> str:
    rows = []
    for length in (1024, 2048, 4096, 65536):
        at = {"pass_": "train", "layers": 12, "seq_len": length}
        rows.append([f"{length:,}", *(e.cell(ESTIMATE, PEAK, **at, implementation=way) for way in ("triton", "dense"))])
    longest = e.cell(CAPACITY, ("longest", "token"), **_NSA, batch=1, checkpointing="off")
    return table(["S, a training step", "our kernels", "dense"], rows) + f"\n\nLongest that fits: {longest}."


def _progress(e: Evidence) -> str:
    rows = [
        [f"`{spec.file}`", e.cell(spec, THROUGHPUT, **_NSA), e.cell(spec, TIME, **_NSA), e.mode(spec, **_NSA)]
        for spec in (DIAGNOSE, TRAIN, TRAIN_2GPU)
    ]
    speed = e.seed("004", THROUGHPUT, f"{_SIZE} (torch 2.5.1+cu121, 2 GPUs)")
    then = ["the report", speed, "about 3 minutes", "2 × A100"]
    return table(["training", "throughput", "time of a step", "card, mode"], [then, *rows])


def _balance(e: Evidence) -> str:
    labels = [f"{_SIZE} (torch 2.5.1+cu121, GPU {number} of 2)" for number in (0, 1)]
    then = " and ".join(e.seed("004", ("gpu_utilization", "%"), label) for label in labels)
    rows = [["utilisation by GPU", then, *(_by_gpu(e, spec) for spec in (DIAGNOSE, TRAIN_2GPU))]]
    for title, figure in (
        ("imbalance of the ranks", ("rank_imbalance", "%")),
        ("warnings", ("warnings", "1")),
    ):
        found = "" if title == "warnings" else e.cell(TRAIN_2GPU, figure, **_NSA)
        rows.append([title, "", e.cell(DIAGNOSE, figure, **_NSA), found])
    return table(["what", "the report", f"`{DIAGNOSE.file}`", f"`{TRAIN_2GPU.file}`"], rows)


def _by_gpu(e: Evidence, spec: Spec) -> str:
    """The utilisation of each rank's GPU; where no samples are kept, that of the least busy."""
    each = e.samples(spec, "rank_utilization", **_NSA)
    least = e.cell(spec, ("rank_utilization", "%"), **_NSA)
    return " and ".join(shown(share, "%") for share in each) if each else f"least busy: {least}"


def _topology(e: Evidence) -> str:
    """The card, and of runs since 2026-11-26 the links and NUMA nodes of each host."""
    environment = e.environment(_source(e), **_NSA)
    gpu = environment.get("gpu", {})
    card = f"{gpu['name']}, {gpu['memory_mib']} MiB, driver {gpu['driver']}" if gpu else DIAGNOSE.not_measured
    rows = [["card", card]]
    for host in environment.get("hosts", ()):
        links = [f"GPU {pair}: {way}" for pair, way in host["links"].items()]
        nodes = [f"NUMA node {node}: cores {cores}" for node, cores in host["numa"].items()]
        rows.append(["links, NUMA nodes", for_file("; ".join([*links, *nodes]))])
    if len(rows) == 1:
        unknown = "not measured: the journal of this run has none (newer runs keep them as `hosts`)"
        rows.append(["links, NUMA nodes", unknown if gpu else DIAGNOSE.not_measured])
    return table(["what", "here"], rows)


def _distributed(e: Evidence) -> str:
    config = e.config(DIAGNOSE, **_NSA)
    told = e.environment(DIAGNOSE, **_NSA).get("training", {})
    if not config:
        return f"Ranks: {DIAGNOSE.not_measured}."
    layout = Layout(**config.get("ranks", {"micro_batch": config["batch"]}))
    rows = [["ranks", f"{layout.ranks}"], ["parallel", layout.parallel if layout.ranks > 1 else "none: one rank"]]
    return table(["what", "here"], [*rows, ["launcher", f"{told.get('launcher', 'none')}"]])


def _advice(e: Evidence) -> str:
    found = e.warnings(DIAGNOSE)
    count = e.cell(DIAGNOSE, ("warnings", "1"), **_NSA)
    if not found:
        return f"Warnings of the diagnosis: {count}."
    source = "A share of time in them is the median of the samples whose mean is [above](#performance-issues)."
    return "\n".join([f"Warnings of the diagnosis: {count}. {source}", "", *(f"- {for_file(text)}" for text in found)])


def _comparison(e: Evidence) -> str:
    at = {"pass_": "train", "layers": 12, "seq_len": 1024}
    ways = ("dense", "triton")
    peaks = {way: e.value(ESTIMATE, PEAK[0], **at, implementation=way) for way in ways}
    ratio = ESTIMATE.not_measured
    if peaks["dense"] is not None and peaks["triton"] is not None:
        ratio = f"{peaks['triton'] / peaks['dense']:.2f}"
    grows = {
        f"{what} of attention grows as": [e.growth(SCALING, figure[0], way, "forward+backward") for way in ways]
        for what, figure in (("memory", EXTRA), ("time", TIME))
    }
    sizes = [e.cell(ESTIMATE, PEAK, **at, implementation=way) for way in ways]
    speeds = [e.cell(TRAIN, THROUGHPUT, implementation=way) for way in ways]
    rows = [
        ["memory of a step at 1,024", "~8, ~60, ~30 GB", *sizes, ratio],
        ["throughput at 2,048 (the report: 1,024)", "~200, ~24, ~100 tok/s", *speeds, _faster(e)],
        *([title, "S², S²/l'² and more, the same", *told, ""] for title, told in grows.items()),
    ]
    mode = e.mode(TRAIN, **_NSA)
    columns = ["what", "the report: standard, NSA, its target", "standard attention", "NSA", "NSA / standard"]
    return noted(table(columns, rows), f"Throughput: {mode}." if mode else "")


def _faster(e: Evidence) -> str:
    nsa, dense = (e.value(TRAIN, THROUGHPUT[0], implementation=way) for way in ("triton", "dense"))
    return TRAIN.not_measured if nsa is None or dense is None else f"{nsa / dense:.2f}"


def _stability(e: Evidence) -> str:
    rows = [
        [
            "a soak: growth of memory, most held",
            e.cell(SOAK, ("memory_growth", "%/1000 steps"), ("memory_held", "MiB")),
        ],
        ["the same: growth of the host's memory", e.cell(SOAK, ("host_memory_slope", "MiB/h"))],
        ["a soak: drift of the throughput, training", e.cell(SOAK, ("throughput_drift", "%/h"), ("soak_time", "h"))],
        ["the short training ended", e.states(TRAIN)],
        ["loss fell", _loss(e)],
    ]
    return table(["what", "here"], rows)


def _loss(e: Evidence) -> str:
    before, after = (e.value(TRAIN, name, **_NSA) for name in ("heldout_loss_before", "heldout_loss"))
    if before is None or after is None:
        return TRAIN.not_measured
    return f"held-out, from {shown(before, 'nat/byte')} to {shown(after, 'nat/byte')}"
