"""Tables of the READMEs, made of stored runs; each stands between `<!-- generated: NAME -->` and `<!-- end -->`."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from orchestrator.judge.analysis import scaling_fits
from orchestrator.judge.branches import Branch, take_overs
from orchestrator.report.bench import BOTH, FORWARD, KIND, MEMORY, TIME, Bench, Place, collect, is_dense
from orchestrator.store import Store, queries

_NAMED = {"train": "training", "decode": "decoding"}  # pages that are not called like their kind
_SLOTS = "slots.md"

CONFIGS = Path(__file__).resolve().parents[2] / "jobs" / "configs"
_BLOCK = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_NAMES = {"dense": "dense", "naive": "naive", "chunked": "NSA in chunks", "triton": "NSA (Triton)"}
_METRICS = {"time": "time", "peak_extra_memory": "extra memory"}
_SHOWN = {(64, 2048), (64, 8192), (64, 32768), (64, 131072), (128, 65536)}  # head dim and S in the first README


def fill(text: str, tables: Mapping[str, str]) -> str:
    """The text with the generated blocks replaced. Raises KeyError for a block of an unknown name."""
    return _BLOCK.sub(lambda block: f"{block[1]}\n{tables[block[2]]}\n\n{block[3]}", text)


def all_tables(store: Store, runs: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The blocks by name."""
    paged = pages(runs)
    benches = collect(store, [run["run_id"] for run in paged.get("bench.md", [])])
    return {
        "pages": _pages(runs),
        "ran": _ran(store, runs),
        "ran-in-short": _ran_in_short(store, runs),
        "operator": _operator(benches, lambda _: True),
        "operator-in-short": _operator(benches, lambda place: (place.layout.head_dim, place.seq_len) in _SHOWN),
        "growth": _growth(store, runs),
        "branches": _branches(benches),
        "training": _training(store, runs),
        "ranks": _ranks(store, runs),
        "decoding": _decoding(store, runs),
        "slots": _slots(store, paged.get(_SLOTS, [])),
    }


def pages(runs: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The runs of each page, in the order of the first: a page a kind of job, and one for the benches of slots."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        found[_page(run)].append(run)
    return dict(found)


def _page(run: Mapping[str, Any]) -> str:
    if run["kind"] == KIND and not any(map(is_dense, run["spec"]["implementations"])):
        return _SLOTS  # of Triton alone: one run for each way to write slots
    return f"{_NAMED.get(run['kind'], run['kind'])}.md"


def minutes(run: Mapping[str, Any]) -> float | None:
    """Minutes from a run's beginning to its end; None of a resumed run, whose pause they would count."""
    return None if run["resumed"] else (run["ended_at"] - run["created_at"]).total_seconds() / 60


def gpus(run: Mapping[str, Any]) -> int:
    """GPUs of a run's point."""
    return max(1, int(run["spec"].get("resources", {}).get("num_gpus") or 1))


def device(run: Mapping[str, Any]) -> str:
    """The cards of a run, as "2 × NVIDIA H100"; "CPU" without any."""
    return f"{gpus(run)} × {run['gpu']}" if run["gpu"] and gpus(run) > 1 else run["gpu"] or "CPU"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def noted(told: str, *notes: str) -> str:
    """A table with the notes below it that are not empty."""
    return "\n\n".join([told, *filter(None, notes)])


def _pages(runs: Sequence[dict[str, Any]]) -> str:
    rows = [[f"[{page}]({page})", _specs(own), f"{len(own)}", commits(own)] for page, own in pages(runs).items()]
    return table(["page", "specs", "runs", "commit"], rows)


def _ran(store: Store, runs: Sequence[dict[str, Any]]) -> str:
    """One row a run."""

    def row(run: dict[str, Any]) -> list[str]:
        states = queries.points(store, run["run_id"])["state"].value_counts(sort=False)
        points = ", ".join(f"{count} {state}" for state, count in sorted(states.items(), key=lambda item: -item[1]))
        as_job = "Ray job" if run["submission_id"] else "`--local`"
        took = minutes(run)
        shown = "resumed" if took is None else f"{took:.1f}"
        return [run["run_id"], spec_of(run), device(run), as_job, points, shown, commits([run])]

    return table(["run", "spec", "device", "as", "points", "minutes", "commit"], map(row, runs))


def _ran_in_short(store: Store, runs: Sequence[dict[str, Any]]) -> str:
    """One row a kind of card and commit; a run without a card counts to the card of its host."""
    cards = {(run["git_commit"], run["host"]): run["gpu"] for run in runs if run["gpu"]}
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        card = run["gpu"] or cards.get((run["git_commit"], run["host"]), "CPU")
        groups[run["git_commit"], card].append(run)
    rows = []
    for (_, card), own in groups.items():
        with_card = [run for run in own if run["gpu"]] or own
        many = " or ".join({1: "one", 2: "two"}.get(n, str(n)) for n in sorted({gpus(run) for run in own}))
        where = f"{many} {card} ({_versions(store, with_card[0])}), commit {commits(own)}"
        as_jobs = ", as Ray jobs" if all(run["submission_id"] for run in own) else ""
        rows.append([where, f"{_specs(own)}{as_jobs}"])
    return table(["where", "what"], rows)


def _versions(store: Store, run: Mapping[str, Any]) -> str:
    """Driver, PyTorch, Triton, Ray and Python of a run's first point that has them."""
    for point_id in queries.points(store, run["run_id"])["point_id"]:
        if found := (queries.point(store, point_id) or {})["environment"]:
            packages = {name: found["packages"].get(name) for name in ("torch", "triton", "ray")}
            named = [f"{name} {version}" for name, version in packages.items() if version]
            driver = [f"driver {found['gpu']['driver']}"] if "gpu" in found else []
            return ", ".join([*driver, *named, f"Python {found['python']}"])
    return "versions unknown"


def _specs(runs: Iterable[Mapping[str, Any]]) -> str:
    counts = Counter(map(spec_of, runs))
    return ", ".join(f"{spec} ({count} times)" if count > 1 else spec for spec, count in counts.items())


def spec_of(run: Mapping[str, Any]) -> str:
    """The file in jobs/configs of a run's name, else the name."""
    path = _files().get(run["name"])
    return f"`{path.name}`" if path else str(run["name"])


@cache
def _files() -> dict[str, Path]:
    """The first file in jobs/configs of each name."""
    return {yaml.safe_load(path.read_text()).get("name"): path for path in sorted(CONFIGS.glob("*.yaml"), reverse=True)}


def commits(runs: Iterable[Mapping[str, Any]]) -> str:
    short = [str(run["git_commit"])[:7] + (" (with changes)" if run["git_dirty"] else "") for run in runs]
    return ", ".join(dict.fromkeys(short))


def _operator(benches: Sequence[Bench], wanted: Callable[[Place], bool]) -> str:
    """NSA beside the fastest dense attention and the best peer, forward+backward."""
    columns = ["heads, head dim", "S", "NSA, ms", "dense, ms", "best other NSA, ms", "NSA, MiB", "dense, MiB"]
    rows = []
    for bench in benches:
        for place, name in bench.rows():
            if wanted(place):
                peer, layout = bench.peers.get((place, TIME)), place.layout
                dense_ms, dense_mib = _dense(bench, place)
                rows.append(
                    [
                        f"{layout.query_heads}/{layout.kv_heads}, {layout.head_dim}",
                        f"{place.seq_len:,}",
                        number(bench.value(place, name, TIME)),
                        dense_ms,
                        "" if peer is None else f"{number(peer.value)} ({peer.owner})",
                        number(bench.value(place, name, MEMORY), whole=True),
                        dense_mib,
                    ]
                )
    return table(columns, rows)


def _dense(bench: Bench, place: Place) -> tuple[str, str]:
    """Milliseconds of the fastest dense attention with its kernel, and its MiB; empty where none was measured."""
    times = {
        name: value
        for (at, name, metric), value in bench.values.items()
        if at == place and metric == TIME and is_dense(name)
    }
    if not times:
        return "", ""
    name = min(times, key=lambda name: times[name])
    kernel = bench.routes.get((place, name), name)
    return f"{number(times[name])} ({kernel})", number(bench.value(place, name, MEMORY), whole=True)


def _slots(store: Store, runs: Sequence[dict[str, Any]]) -> str:
    """Times of the operator with slots in 12 bits and exact, by heads and length, where both were measured."""
    values: dict[tuple[int, str], dict[tuple[str, str], float]] = defaultdict(dict)
    for run in runs:
        slots = (run["spec"].get("nsa") or {}).get("slots", "packed")
        frame = queries.scaling(store, run_ids=[run["run_id"]])
        for row in frame.loc[frame["metric"] == TIME].to_dict("records"):
            heads = f"{row['query_heads']:.0f}/{row['kv_heads']:.0f}, {row['head_dim']:.0f}"
            values[int(row["seq_len"]), heads][row["pass"], slots] = row["value"]

    def cells(found: Mapping[tuple[str, str], float], pass_: str) -> list[str]:
        packed, exact = (found[pass_, slots] for slots in ("packed", "exact"))
        return [number(packed), number(exact), f"{100 * (exact / packed - 1):+.1f} %"]

    names = [f"{pass_}, {what}" for pass_ in (FORWARD, BOTH) for what in ("12 bits, ms", "exact, ms", "change")]
    rows = [
        [heads, f"{seq_len:,}", *cells(found, FORWARD), *cells(found, BOTH)]
        for (seq_len, heads), found in sorted(values.items())
        if len(found) == 4  # two passes, two kinds of slots
    ]
    return table(["heads, head dim", "S", *names], rows)


def _growth(store: Store, runs: Sequence[dict[str, Any]]) -> str:
    """Asymptotic exponents of the scaling runs' time and extra memory, with interval and range."""
    scaling = [run["run_id"] for run in runs if run["kind"] == "scaling"]
    found = {
        (fit.metric, fit.series["implementation"], fit.series["pass"]): fit
        for fit in scaling_fits(queries.scaling(store, run_ids=scaling))
    }

    def cell(metric: str, name: str, pass_: str) -> str:
        fit = found.get((metric, name, pass_))
        if fit is None:
            return ""
        interval = f"{fit.exponent:.2f} ({fit.ci_low:.2f} to {fit.ci_high:.2f})"
        return f"{interval}, {min(fit.lengths):,} to {max(fit.lengths):,}"

    rows = [
        [f"{title}, {shown}", *(cell(metric, name, pass_) for pass_ in (FORWARD, BOTH))]
        for metric, title in _METRICS.items()
        for name, shown in _NAMES.items()
    ]
    return table(["", "forward", BOTH], [row for row in rows if any(row[1:])]) + _longest(store, scaling)


def _longest(store: Store, run_ids: Sequence[str]) -> str:
    """A sentence on the times at the longest length that NSA and dense attention have in common."""
    frame = queries.scaling(store, run_ids=run_ids)
    times = frame.loc[(frame["metric"] == TIME) & (frame["pass"] == BOTH)]
    by_name = {
        str(name): dict(zip(own["seq_len"], own["value"], strict=True)) for name, own in times.groupby("implementation")
    }
    common = by_name.get("triton", {}).keys() & by_name.get("dense", {}).keys()
    if not common:
        return ""
    nsa, dense = (number(by_name[name][max(common)]) for name in ("triton", "dense"))
    return f"\n\nAt {max(common):,.0f} tokens {BOTH} took {nsa} ms with NSA and {dense} ms with dense attention."


def _branches(benches: Sequence[Bench]) -> str:
    """Where the compressed branch takes over, by heads and pass; its share at the longest length."""
    rows = []
    for bench in benches:
        shares = list(bench.shares.values())
        for taken in take_overs(shares):
            longest = max((one for one in shares if one.series == taken.series), key=lambda one: one.seq_len)
            share = f"{100 * longest.share(Branch.COMPRESSED):.0f} % at {longest.seq_len:,}"
            heads = f"{taken.series['query_heads']:.0f}/{taken.series['kv_heads']:.0f}, {taken.series['head_dim']:.0f}"
            crossings = [(taken.largest, taken.largest_reason), (taken.equal, taken.equal_reason)]
            laws = [f"S^{law.exponent:.2f}" if law else "" for law in (taken.compressed, taken.rest)]
            texts = [str(crossing or reason) for crossing, reason in crossings]
            rows.append([heads, str(taken.series["pass"]), share, *laws, *texts])
    columns = ["heads, head dim", "pass", "its share", "it grows as", "the rest as", "largest from", "half from"]
    return table(columns, rows)


def _training(store: Store, runs: Sequence[dict[str, Any]]) -> str:
    """Tokens a second of a training step, by length; and the energy of a token, if a run has it."""
    rows, energies = [], []
    for seq_len, values in _by_length(store, runs, "train-speed"):
        nsa, dense = values["triton", "throughput"], values["dense", "throughput"]
        rows.append([f"{seq_len:,}", rate(nsa), rate(dense), f"{nsa / dense:.2f}"])
        joules = (values.get((name, "energy_per_token")) for name in ("triton", "dense"))
        energies.append(["" if each is None else f"{1000 * each:.3g}" for each in joules])
    columns = ["S", "NSA, tok/s", "dense, tok/s", "NSA / dense"]
    if any(map(any, energies)):
        columns += ["NSA, mJ/tok", "dense, mJ/tok"]
        rows = [[*row, *more] for row, more in zip(rows, energies, strict=True)]
    return table(columns, rows)


def _ranks(store: Store, runs: Sequence[dict[str, Any]]) -> str:
    """Training by NSA on one GPU and on two: one row a run, those of one GPU first."""
    rows = []
    for run in sorted((run for run in runs if run["name"] == "train-2gpu"), key=gpus):
        found = queries.measurements(store, run_ids=[run["run_id"]]).to_dict("records")
        values = {row["metric"]: row["value"] for row in found if row["implementation"] == "triton"}
        busy, uneven = values.get("rank_utilization"), values.get("rank_imbalance")
        rows.append(
            [
                f"{gpus(run)} × {run['gpu'].split()[1]}",
                _averaging(run["spec"]) if gpus(run) > 1 else "",
                f"{run['spec']['batch'] // gpus(run)}",
                number(values["time"]),
                rate(values["throughput"]),
                "" if busy is None else f"{busy:.1f} %",
                "" if uneven is None else f"{uneven:.2f} %",
                f"{1000 * values['energy_per_token']:.3g}",
                str(run["git_commit"])[:7],
            ]
        )
    columns = ["GPUs", "parallel", "sequences a GPU", "step, ms", "tok/s", "least busy GPU", "imbalance", "mJ/tok"]
    return table([*columns, "commit"], rows)


def _averaging(spec: Mapping[str, Any]) -> str:
    """How ranks average gradients, in words."""
    compression = spec.get("gradient_compression")
    return spec.get("parallel", "ddp") + (f", {compression} sums" if compression else "")


def _decoding(store: Store, runs: Sequence[dict[str, Any]]) -> str:
    """Tokens a second and bytes read of a decoding step, by length of the context."""
    rows = []
    for seq_len, values in _by_length(store, runs, "decode-m7c"):
        rates = [values[name, "throughput"] for name in ("triton", "dense")]
        read = [values[name, "bytes_read"] for name in ("triton", "dense")]
        ratio = f"{rates[0] / rates[1]:.2f}"
        rows.append([f"{seq_len:,}", *map(rate, rates), ratio, *(number(mib, whole=True) for mib in read)])
    columns = ["context", "NSA, tok/s", "dense, tok/s", "NSA / dense", "NSA reads, MiB", "dense reads, MiB"]
    return table(columns, rows)


def _by_length(
    store: Store, runs: Sequence[dict[str, Any]], name: str
) -> Iterable[tuple[int, dict[tuple[str, str], float]]]:
    """Values by (implementation, metric) at each length: those of the newest run of this name with NSA and dense."""
    found: dict[int, dict[tuple[str, str], float]] = {}
    for run_id in (run["run_id"] for run in runs if run["name"] == name):
        for _, group in queries.measurements(store, run_ids=[run_id]).groupby("seq_len"):
            if {"triton", "dense"} <= set(group["implementation"]):
                keys = zip(group["implementation"], group["metric"], strict=True)
                found[int(group["seq_len"].iloc[0])] = dict(zip(keys, group["value"], strict=True))
    return sorted(found.items())


def rate(value: float) -> str:
    """Tokens a second, to three significant digits."""
    return f"{float(f'{value:.3g}'):,.0f}"


def number(value: float | None, *, whole: bool = False) -> str:
    """A value with three significant digits, or to the unit; empty if there is none."""
    if value is None:
        return ""
    return f"{value:,.0f}" if whole or value >= 100 else f"{value:.{1 if value >= 10 else 2}f}"
