"""Blocks of seeds/training-speed.md: the report on the speed of the planned training (003)."""

from __future__ import annotations

from seed_evidence import (
    BRANCHES,
    DRIVER,
    ENERGY,
    MATRIX,
    PASSES,
    PEAK,
    PROFILE,
    SCALING,
    THROUGHPUT,
    TIME,
    TRAIN,
    TRAIN_1GPU,
    TRAIN_2GPU,
    TRAIN_2GPU_LARGER,
    TRAIN_2GPU_REPLICATED,
    TRAIN_COMPRESSED,
    TRAIN_SHORT,
    Evidence,
    Spec,
    matrix_axes,
    shown,
)
from seed_fitness import verdict
from tables import commits, noted, rate, table

from jobs.schema.training_plan import TrainingPlan
from jobs.training.case import divided

LADDER = Spec("capacity_ladder.yaml")
SPECS = (
    *(TRAIN, TRAIN_2GPU, TRAIN_1GPU, TRAIN_2GPU_LARGER, TRAIN_2GPU_REPLICATED, TRAIN_COMPRESSED, TRAIN_SHORT),
    *(LADDER, PASSES, PROFILE, BRANCHES, SCALING, MATRIX),
)

_BOTH = "forward+backward"
_NSA = {"implementation": "triton"}
_PLAN = TrainingPlan(steps=50000, tokens_per_step=4096, hours=24)
_NEEDED, _HOURS = ("throughput_needed", "tok/s"), ("planned_time", "h")
_WHERE = "card, mode"
_THEN = {128: "~97, acceptable", 512: "~33 (V2=1), ~58 (V2=0), slow", 1024: "<10, unusable", 2048: "<2, hangs"}
"""The report's throughput [tok/s] and status of a forward pass, which are not those of its times."""
_UTILIZATION, _IMBALANCE = ("rank_utilization", "%"), ("rank_imbalance", "%")


def blocks(e: Evidence) -> dict[str, str]:
    return {
        "summary": _summary(e),
        "forward": _forward(e),
        "expected": _expected(e),
        "pair": _pair(e),
        "attempts": _attempts(e),
        "isolated": _forward(e),
        "ladder": _ladder(e),
        "exponents": _exponents(e),
        "selection": _selection(e),
        "routes": _routes(e),
        "utilization": _utilization(e),
        "environment": _environment(e),
        "model": _model(e),
        "variables": _variables(e),
        "investigation": _investigation(e),
        "verdict": verdict(e),
        "timeline": _timeline(e),
        "batch-error": f"A batch of 1 on 2 ranks: `{_refusal()}`.",
    }


def _summary(e: Evidence) -> str:
    found = e.value(TRAIN, THROUGHPUT[0], **_NSA)
    if found is None:
        return f"Throughput: {TRAIN.not_measured}."
    enough = "enough" if found >= _PLAN.needed else "too slow"
    return (
        f"One GPU ({TRAIN.file}): {shown(found, 'tok/s')} with our kernels, {enough} for the "
        f"{shown(_PLAN.needed, 'tok/s')} that 50,000 steps of 4,096 tokens in 24 hours need ({e.mode(TRAIN, **_NSA)}); "
        f"two GPUs: {_with_mode(e, TRAIN_2GPU, THROUGHPUT)}. What two gain over one is told by "
        "[runs alike](#one-gpu-beside-two)."
    )


def _with_mode(e: Evidence, spec: Spec, *figures: tuple[str, str]) -> str:
    """Figures of a training by our kernels, with card and mode in brackets."""
    mode = e.mode(spec, **_NSA)
    return e.cell(spec, *figures, **_NSA) + (f" ({mode})" if mode else "")


def _forward(e: Evidence) -> str:
    rows = []
    for seq_len in (128, 512, 1024, 2048):
        size = f"forward 12 layers dim 768 S={seq_len}"
        then = [f"{told}{name}" for variant, name in (("", ""), ("ranges_v2", " (V2=1)"), ("ranges_v1", " (V2=0)"))
                if (told := e.seed("003", TIME, size, variant))]  # fmt: skip
        at = {"seq_len": seq_len, "pass_": "forward", "batch": 1}
        now = [e.cell(PASSES, TIME, **at, implementation=way) for way in ("triton", "naive", "dense")]
        time = e.value(PASSES, TIME[0], **at, **_NSA)
        speed = "" if time is None else f"{rate(1000 * seq_len / time)}, {e.state(PASSES, **at, **_NSA)}"
        rows.append([f"{seq_len:,}", ", ".join(then), _THEN[seq_len], *now, speed])
    columns = ["S", "the report", "its tok/s, status", "our kernels", "masked, S²", "dense attention"]
    told = table([*columns, "our kernels: tok/s, state"], rows)
    mode = e.mode(PASSES, **_NSA, seq_len=2048, pass_="forward")
    return noted(told, f"Ours: {mode}; tok/s is S over the time." if mode else "")


def _expected(e: Evidence) -> str:
    """The rungs of the report's ladder: its target, its figure, ours."""
    both = e.cell(TRAIN_2GPU, THROUGHPUT, ENERGY, **_NSA)
    one = e.cell(TRAIN, THROUGHPUT, ENERGY, **_NSA)
    short = e.seed("003", THROUGHPUT, "train 12 layers dim 768 S=512")
    rows = [
        ["2 GPUs by DDP, 2,048", e.notes("003", "(2 GPUs"), "", both, e.mode(TRAIN_2GPU, **_NSA)],
        ["1 GPU, 2,048", e.notes("003", "(1 GPU;"), "", one, e.mode(TRAIN, **_NSA)],
        ["1 GPU, 512", "", short, _short(e), e.mode(TRAIN_SHORT, **_NSA)],
        ["the plan needs", "", "", e.cell(TRAIN, _NEEDED, **_NSA), ""],
    ]
    return table(["configuration", "the runbook", "the report", "here", _WHERE], rows)


def _pair(e: Evidence) -> str:
    """One GPU beside two with the same load of each, both of one commit."""
    rows = []
    for title, spec in (("2, `ddp`", TRAIN_2GPU_LARGER), ("2, `replicate`", TRAIN_2GPU_REPLICATED)):
        runs = e.of(spec)[:1]
        here = e.at_commit(runs[0]["git_commit"]) if runs else e
        one, two = (here.value(each, THROUGHPUT[0], **_NSA) for each in (TRAIN_1GPU, spec))
        gain = "" if one is None or two is None else f"{two / one:.2f}"
        rows += [_row(here, TRAIN_1GPU, "1", ""), _row(here, spec, title, gain)]
    return table(["GPUs", "sequences a GPU", "throughput", "time of a step", "of one", _WHERE, "commit"], rows)


def _row(e: Evidence, spec: Spec, title: str, gain: str) -> list[str]:
    figures = [e.cell(spec, figure, **_NSA) for figure in (THROUGHPUT, TIME)]
    return [title, "2", *figures, gain, e.mode(spec, **_NSA), commits([dict(run) for run in e.of(spec)[:1]])]


def _short(e: Evidence) -> str:
    return e.cell(TRAIN_SHORT, THROUGHPUT, **_NSA)


def _ladder(e: Evidence) -> str:
    """The longest sequence that one GPU trains on, and whether it is fast enough."""
    found = [e.cell(LADDER, figure, **_NSA, batch=2) for figure in (("longest", "token"), THROUGHPUT)]
    columns = ["one GPU, 12 layers, batch 2: longest of 512, 1,024, 2,048", "throughput there", _WHERE]
    return table(columns, [[*found, e.mode(LADDER, **_NSA, batch=2)]])


def _attempts(e: Evidence) -> str:
    rows = [
        ["1, DDP on 2 GPUs, a batch of 1", "a rank got a malformed batch", f"refused before it starts: `{_refusal()}`"],
        ["2, the same, a batch of 2", "hung at step 1", _trained(e, TRAIN_2GPU)],
        ["3, gradients in bf16, buckets of 100 MB", "hung at step 1", _trained(e, TRAIN_COMPRESSED)],
        ["4, one GPU", "hung at step 1", _trained(e, TRAIN)],
    ]
    return table(["attempt", "the report", "here"], rows)


def _trained(e: Evidence, spec: Spec) -> str:
    state = e.state(spec, **_NSA)
    return f"ok, {_with_mode(e, spec, THROUGHPUT, TIME)}" if state == "ok" else state


def _refusal() -> str:
    """The message about a batch of one sequence on two ranks."""
    try:
        divided(1, 2, None)
    except ValueError as err:
        return str(err)
    raise AssertionError("a batch of 1 was divided over 2 ranks")


def _exponents(e: Evidence) -> str:
    rows = [
        [title, *(e.growth(SCALING, TIME[0], way, pass_) for pass_ in ("forward", _BOTH))]
        for way, title in (("triton", "our kernels"), ("naive", "masked, S²"), ("dense", "dense attention"))
    ]
    return noted(table(["time of the attention grows as", "forward", _BOTH], rows), _on(e, SCALING))


def _selection(e: Evidence) -> str:
    """Each branch alone and all together: the selection's part."""
    rows = []
    for branch in ("cmp", "slc", "win", "all"):
        cells = [
            e.cell(BRANCHES, TIME, **_NSA, branch=branch, seq_len=seq_len, pass_=pass_)
            for seq_len in (2048, 65536)
            for pass_ in ("forward", _BOTH)
        ]
        rows.append([branch, *cells])
    columns = [f"{pass_}, {seq_len:,}" for seq_len in (2048, 65536) for pass_ in ("forward", _BOTH)]
    shares = "A branch alone that takes longer than all at once is no share of theirs: [stages](../bench.md) are."
    return noted(table(["branch, our kernels", *columns], rows), f"{_on(e, BRANCHES)} {shares}".strip())


def _on(e: Evidence, spec: Spec) -> str:
    """The card of a spec's points by our kernels."""
    card = e.card(spec, **_NSA)
    return f"On one {card}." if card else ""


def _routes(e: Evidence) -> str:
    route = e.route(TRAIN, **_NSA)
    rows = [[branch, f"`{kernel}`"] for branch, kernel in sorted(route.items())]
    return table(["branch", "kernel that ran in the training"], rows or [["all", TRAIN.not_measured]])


def _utilization(e: Evidence) -> str:
    at = {**_NSA, "seq_len": 2048, "batch": 2, "pass_": "train"}
    busy, time = (e.value(PROFILE, name, **at) for name in ("busy_time", TIME[0]))
    share = PROFILE.not_measured if busy is None or time is None else shown(100 * busy / time, "%")
    one, two = e.mode(TRAIN, **_NSA), e.mode(TRAIN_2GPU, **_NSA)
    reported = "8 to 10 % utilisation (512 tokens)"
    rows = [
        ["one GPU: MFU", "", e.cell(TRAIN, ("mfu", "%"), **_NSA), one],
        ["one GPU: time in which it computes, of a step's", reported, share, e.mode(PROFILE, **at)],
        ["two GPUs: MFU", "", e.cell(TRAIN_2GPU, ("mfu", "%"), **_NSA), two],
        ["two GPUs: utilisation of the least busy", "", e.cell(TRAIN_2GPU, _UTILIZATION, **_NSA), two],
        ["two GPUs: imbalance of the ranks", "", e.cell(TRAIN_2GPU, _IMBALANCE, **_NSA), two],
        ["one GPU: memory in use on the card", "24,117 MiB, in its step 1", e.cell(TRAIN, DRIVER, **_NSA), one],
    ]
    return table(["what", "the report", "here", _WHERE], rows)


def _environment(e: Evidence) -> str:
    found = e.environment(TRAIN, **_NSA)
    if not found:
        return f"Hardware and software: {TRAIN.not_measured}."
    packages, gpu = found["packages"], found.get("gpu", {})
    rows = [
        ["GPU", str(gpu.get("name", ""))],
        ["driver", str(gpu.get("driver", ""))],
        *([name, str(packages[name])] for name in ("torch", "triton", "ray") if name in packages),
        ["CUDA", str(found.get("cuda", ""))],
        ["Python", str(found["python"])],
    ]
    return table([f"of `{TRAIN.file}`", "version"], rows)


def _model(e: Evidence) -> str:
    config = e.config(TRAIN, **_NSA)
    if not config:
        return f"Configuration: {TRAIN.not_measured}."
    model = {**config["model"], **config["model"]["nsa"]}
    model |= {name: config[name] for name in ("seq_len", "batch", "steps", "precision", "compile")}
    rows = [[f"`{name}`", f"{value}"] for name, value in model.items() if name != "nsa"]
    return table([f"of `{TRAIN.file}`", "value"], rows)


def _variables(e: Evidence) -> str:
    found = e.environment(TRAIN, **_NSA).get("variables", {})
    rows = [[f"`{name}`", f"`{value}`"] for name, value in sorted(found.items())]
    return table([f"of `{TRAIN.file}`", "value"], rows or [["all", TRAIN.not_measured]])


def _investigation(e: Evidence) -> str:
    at = {**_NSA, "seq_len": 2048, "batch": 2, "pass_": "train"}
    waits = e.cell(PROFILE, ("busy_time", "ms"), ("synchronizations", "1"), **at)
    alone = [{**_NSA, "branch": name, "seq_len": 2048, "pass_": _BOTH} for name in ("cmp", "win")]
    both = ", ".join(e.cell(BRANCHES, TIME, **place) for place in alone)
    smaller = {**matrix_axes("m7c_125m", 5, 1024), **_NSA}
    dense = {"implementation": "dense"}
    rows = [
        ["profile: device time of a step, waits for the device", waits, e.mode(PROFILE, **at)],
        ["without the selection: compressed, and window alone", both, e.card(BRANCHES, **alone[0])],
        ["fewer layers: 5 at 1,024", e.cell(MATRIX, TIME, PEAK, **smaller), e.mode(MATRIX, **smaller)],
        ["a transformer with dense attention", e.cell(TRAIN, THROUGHPUT, **dense), e.mode(TRAIN, **dense)],
    ]
    return noted(table(["to look at", "here", _WHERE], rows), e.beside(MATRIX))


def _timeline(e: Evidence) -> str:
    """Time of the planned steps at each throughput."""
    then = e.seed("003", THROUGHPUT, "train 12 layers dim 768 S=512").removesuffix(" tok/s")
    dense = {"implementation": "dense"}
    rows = [
        [f"the report's {then} tok/s at 512 tokens", f"{shown(_PLAN.hours_at(float(then)), 'h')}", ""],
        ["one GPU", e.cell(TRAIN, _HOURS, **_NSA), e.mode(TRAIN, **_NSA)],
        ["one GPU, dense attention", e.cell(TRAIN, _HOURS, **dense), e.mode(TRAIN, **dense)],
        ["two GPUs", e.cell(TRAIN_2GPU, _HOURS, **_NSA), e.mode(TRAIN_2GPU, **_NSA)],
    ]
    days = "The report: about 21 days, with steps of its 512 tokens."
    return noted(table(["at", "50,000 steps of 4,096 tokens take", _WHERE], rows), days)
