"""The stored points and metrics of measured runs, read when a rule asks for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Select, Table, exists, select

from jobs.schema.axes import AXES, MORE
from jobs.schema.states import Origin
from orchestrator.judge.filters import Row
from orchestrator.store import Store
from orchestrator.store.models import Attempt, Environment, Metric, Point, Run
from orchestrator.store.views import v_metrics, v_points

_COORDINATES = (*(axis.name for axis in AXES), "gpu")
_POINT = ("run_id", "run_name", "kind", "point_id", "label", "state", *_COORDINATES)
_SOURCE = ("run_id", "run_name", "origin", "source", "kind", "point_id", "label")
_DIGESTS = ("sha256", "heldout_sha256", "tokenizer_sha256")  # of jobs/_data: bytes have the first, tokens the others
_METRIC = (*_SOURCE, *_COORDINATES, "metric", "unit", "value", "ci_low", "ci_high", "per_sequence")


@dataclass(frozen=True, eq=False)
class Source:
    """The measured runs in `run_ids` (None: all) of a store. Reads without pandas, which costs more than the reading.

    Raises:
        StoreUnavailable: in each of its reads.
    """

    store: Store
    run_ids: Sequence[str] | None
    _known: dict[tuple[str, str], frozenset[str]] = field(default_factory=dict)

    def having(self, kind: str, metric: str) -> frozenset[str]:
        """Ids of the runs of a kind of which any point has a metric."""
        if (kind, metric) not in self._known:
            of_run = select(Point.id).join(Point.metrics)
            measured = exists(of_run.where(Point.run_id == Run.id, Metric.name == metric).correlate(Run))
            query = select(Run.id).where(Run.origin == Origin.MEASURED, Run.kind == kind, measured)
            if self.run_ids is not None:
                query = query.where(Run.id.in_(self.run_ids))
            with self.store.session() as session:
                self._known[kind, metric] = frozenset(session.scalars(query))
        return self._known[kind, metric]

    def points(self, run_id: str, gpu: str | None) -> list[Row]:
        """Rows of the points of a run, by number; one without a GPU of its own gets `gpu`, the run's."""
        query = _of(v_points, _POINT).where(v_points.c.run_id == run_id).order_by(v_points.c.number)
        return [row | {"gpu": row["gpu"] or gpu} for row in self._rows(query, _POINT)]

    def metric(self, run_id: str, metric: str, own: Iterable[str]) -> list[Row]:
        """Rows of one metric of a run, by point, each with the columns `own`.

        A value that is missing or no number is None, so that equal shapes compare equal.
        """
        query = _of(v_metrics, _METRIC).where(v_metrics.c.run_id == run_id, v_metrics.c.metric == metric)
        empty = dict.fromkeys(own)
        return [
            empty | {name: None if value != value else value for name, value in row.items()}
            for row in self._rows(query.order_by(v_metrics.c.point_id), _METRIC)
        ]

    def texts(self, run_id: str) -> dict[str, str]:
        """Fingerprint of the text that each point of a run was trained on, by id; only of points that have any."""
        query = select(Point.id, Environment.content).join(Point.outcome)
        query = query.join(Environment, Environment.id == Attempt.environment_id)
        with self.store.session() as session:
            found = session.execute(query.where(Point.run_id == run_id)).all()
        return {point_id: text for point_id, environment in found if (text := _text(environment))}

    def _rows(self, query: Select, names: Sequence[str]) -> list[dict[str, Any]]:
        found = []
        with self.store.session() as session:
            for *values, more in session.execute(query):
                row = dict(zip(names, values, strict=True))
                found.append(row | {MORE + name: value for name, value in (more or {}).items()})
        return found


def _text(environment: Mapping[str, Any]) -> str:
    """The digests of a training's text and tokenizer in its environment; "" without any."""
    training = environment.get("training")
    corpus = training.get("corpus") if isinstance(training, dict) else None
    return " ".join(str(corpus[name]) for name in _DIGESTS if name in corpus) if isinstance(corpus, dict) else ""


def _of(view: Table, names: Sequence[str]) -> Select:
    return select(*(view.c[name] for name in names), view.c.more_axes)
