"""The first figures: NSA's time beside that of dense attention and of other implementations, and what is behind it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jobs.schema.peaks import BANDWIDTHS, BF16_PEAKS, least_work
from jobs.schema.states import Origin
from orchestrator.judge.branches import branch_of
from orchestrator.judge.crossover import Crossing
from orchestrator.judge.growth import short
from orchestrator.report.bench import STAGE, TIME, Figure, peer_figures, place_of
from orchestrator.report.series import NSA, Row
from orchestrator.store import Store, queries

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Cell:
    """A workload at one length, by rows of the view v_metrics with NSA's time and that of the fastest dense attention,
    and what is reported of others [ms a call].
    """

    crossing: Crossing
    seq_len: int
    nsa: Row
    dense: Row
    peers: Sequence[Figure]  # the fastest first

    @property
    def title(self) -> str:
        return f"{self.crossing.title}, S = {short(self.seq_len)}"

    def ratio(self, to_peer: bool) -> float | None:
        """NSA's time divided by that of the fastest dense attention, or of the best peer; None if that is unknown."""
        if to_peer:
            return self.nsa["value"] / self.peers[0].value if self.peers else None
        return self.crossing.ratios[self.seq_len]


def cells(store: Store, crossings: Iterable[Crossing]) -> list[Cell]:
    """Measured cells of each workload, by length; none where the ratio is not of times. Raises StoreUnavailable."""
    crossings = list(crossings)
    ids = {point for each in crossings for points in each.points.values() for point in points}
    measured = queries.measurements(store, run_ids=sorted({point.rpartition("/")[0] for point in ids}))
    measured = measured.loc[(measured["metric"] == TIME) & measured["point_id"].isin(sorted(ids))]
    rows = {row["point_id"]: row for row in measured.to_dict("records")}
    reported, found = queries.scaling(store, origin=Origin.REPORTED), []
    for crossing in crossings:
        pairs = {length: (rows[nsa], rows[dense]) for length, (nsa, dense) in crossing.points.items() if nsa in rows}
        peers = list(peer_figures(reported, next(iter(pairs.values()))[0]["gpu"])) if pairs else []
        for seq_len, (nsa, dense) in pairs.items():
            here = (place_of(nsa), TIME) if nsa["workload"] == "attention" else None
            figures = sorted(figure for place, metric, figure in peers if (place, metric) == here)
            found.append(Cell(crossing, seq_len, nsa, dense, figures))
    return found


def curve(found: Sequence[Cell]) -> list[dict[str, Any]]:
    """Milliseconds of a sequence against its length, of all that is known in the cells of a workload."""
    rows = []
    for cell in found:
        times = [(NSA, cell.nsa["value"]), ("dense", cell.dense["value"])]
        times += [(figure.owner, figure.value) for figure in cell.peers]
        rows += [
            {"implementation": name, "seq_len": cell.seq_len, "value": value / cell.nsa["batch"]}
            for name, value in times
        ]
    return rows


def stages(store: Store, cell: Cell) -> list[dict[str, Any]]:
    """The stages of NSA's call with their branch and milliseconds, the longest first. Raises StoreUnavailable."""
    measured = queries.measurements(store, run_ids=[cell.nsa["run_id"]])
    measured = measured.loc[measured["metric"].str.startswith(STAGE) & (measured["seq_len"] == cell.seq_len)]
    return [
        {"stage": (stage := row["metric"].removeprefix(STAGE)), "branch": branch_of(stage).value, "value": row["value"]}
        for row in measured.sort_values("value", ascending=False).to_dict("records")
        if row["implementation"] == cell.nsa["implementation"] and place_of(row) == place_of(cell.nsa)
    ]


def roofline(store: Store, found: Sequence[Cell]) -> list[dict[str, Any]]:
    """TFLOP/s, GB/s and FLOP a byte of NSA and of dense attention in the cells of a workload, of the work that a call
    cannot do without, and the card's peaks; none where these are unknown, and of trainings. Raises StoreUnavailable.
    """
    gpu, point = found[0].nsa["gpu"], queries.point(store, found[0].nsa["point_id"])
    if gpu not in BF16_PEAKS or found[0].nsa["workload"] != "attention" or point is None:
        return []
    sizes, rows = point["config"]["model"]["nsa"], []
    for cell in found:
        for name, row, nsa in ((NSA, cell.nsa, sizes), ("dense", cell.dense, None)):
            heads = (int(row["query_heads"]), int(row["kv_heads"]), int(row["head_dim"]))
            tokens, backward = int(row["batch"]) * cell.seq_len, "backward" in row["pass"]
            about = (tokens, cell.seq_len, heads, _BYTES[row["dtype"]])
            products, read = least_work(*about, backward=backward, nsa=nsa)
            rates = {"tflops": products / row["value"] / 1e9, "gbs": read / row["value"] / 1e6}
            peaks = {"peak_tflops": BF16_PEAKS[gpu] / 1e12, "peak_gbs": BANDWIDTHS[gpu] / 1e9}
            where = {"implementation": name, "seq_len": cell.seq_len, "intensity": products / read}
            rows.append({**where, **rates, **peaks})
    return rows
