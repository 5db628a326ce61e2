"""The tables. docs/database.md describes each column and the views."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, ClassVar

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, attribute_keyed_dict, mapped_column, relationship

from jobs.schema.axes import AXES
from jobs.schema.states import Origin, PointState, Result, RunState


class UtcDateTime(sa.TypeDecorator[datetime]):
    """A timezone-aware datetime in UTC. SQLite stores no zone: it is removed on writing and added on reading."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value.isoformat()} has no time zone")
        value = value.astimezone(UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


# Enums are stored as their values' text.
_ENUMS = {
    cls: sa.Enum(cls, native_enum=False, length=16, values_callable=lambda members: [each.value for each in members])
    for cls in (PointState, RunState, Origin, Result)
}


class Base(DeclarativeBase):
    metadata = sa.MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    # JSON and not JSONB on Postgres: it keeps the order of a spec's keys, and \u0000 in captured output.
    type_annotation_map: ClassVar = {
        datetime: UtcDateTime(),
        str: sa.Text(),
        float: sa.Double(),
        dict[str, Any]: sa.JSON(),
        list[Any]: sa.JSON(),
        **_ENUMS,
    }


class Run(Base):
    """One submitted job, or one imported report."""

    __tablename__ = "run"

    id: Mapped[str] = mapped_column(sa.String(200), primary_key=True)
    name: Mapped[str]
    kind: Mapped[str] = mapped_column(sa.String(40))
    origin: Mapped[Origin] = mapped_column(index=True)
    source: Mapped[str | None]
    state: Mapped[RunState]
    reason: Mapped[str | None]
    state_at: Mapped[datetime]  # time of the record that set `state`; older records do not change it
    spec: Mapped[dict[str, Any]]
    spec_hash: Mapped[str] = mapped_column(sa.String(64))
    git_commit: Mapped[str | None] = mapped_column(sa.String(64))
    git_branch: Mapped[str | None]
    git_dirty: Mapped[bool | None]
    code_hash: Mapped[str | None] = mapped_column(sa.String(64))
    submission_id: Mapped[str | None] = mapped_column(sa.String(200))
    person: Mapped[str | None] = mapped_column(sa.String(200))  # who submitted it
    tags: Mapped[str] = mapped_column(server_default="")  # in order, with a space between
    notes: Mapped[str | None]
    labelled_at: Mapped[datetime | None]  # time of the record that set tags and notes
    host: Mapped[str | None]
    artifacts: Mapped[str | None]
    artifact_store: Mapped[str | None]
    resumed: Mapped[int]
    axes: Mapped[list[Any] | None]  # jobs.schema.axes.Axis, as the run's kind declares them
    created_at: Mapped[datetime] = mapped_column(index=True)
    ended_at: Mapped[datetime | None]
    lease_owner: Mapped[str | None]  # host/process of the driver that measures the run
    lease_expires_at: Mapped[datetime | None]


class Environment(Base):
    """The environment of a point. Equal environments share a row: `id` is the hash of the content."""

    __tablename__ = "environment"

    id: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    gpu: Mapped[str | None]  # the card's name, None on a CPU
    content: Mapped[dict[str, Any]]


class Point(Base):
    """One measurement of a run: its coordinates and configuration, as they were planned last."""

    __tablename__ = "point"
    __table_args__ = (sa.UniqueConstraint("run_id", "number"),)

    id: Mapped[str] = mapped_column(sa.String(240), primary_key=True)
    run_id: Mapped[str] = mapped_column(sa.ForeignKey("run.id", ondelete="CASCADE"))
    number: Mapped[int]  # position in the run, from 0
    attempt: Mapped[int]  # number of the attempt that counts: the newest with an outcome, else the newest
    label: Mapped[str]
    config: Mapped[dict[str, Any]]
    estimate_bytes: Mapped[int | None] = mapped_column(sa.BigInteger)
    answers: Mapped[str | None] = mapped_column(sa.String(100))  # states that answer a search and are no failure
    more_axes: Mapped[dict[str, Any] | None]  # values of the axes that its kind adds to AXES

    attempts: Mapped[dict[int, Attempt]] = relationship(
        collection_class=attribute_keyed_dict("number"), lazy="selectin", cascade="all, delete-orphan"
    )
    outcome: Mapped[Attempt] = relationship(
        primaryjoin="and_(Attempt.point_id == Point.id, Attempt.number == Point.attempt)", viewonly=True
    )
    metrics: Mapped[list[Metric]] = relationship(
        primaryjoin="and_(foreign(Metric.point_id) == Point.id, Metric.attempt == Point.attempt)", viewonly=True
    )


for _axis in AXES:
    _type = sa.String(_axis.size) if _axis.type == "text" else sa.BigInteger() if _axis.size == 8 else sa.Integer()
    setattr(Point, _axis.attribute, mapped_column(_axis.name, _type, nullable=True))


class Attempt(Base):
    """One attempt at a point, which may be planned only; earlier ones stay as they ended."""

    __tablename__ = "attempt"
    __table_args__ = (sa.UniqueConstraint("point_id", "number", "state"),)

    point_id: Mapped[str] = mapped_column(sa.ForeignKey("point.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)  # from 1
    state: Mapped[PointState]
    settled: Mapped[bool]  # whether it ended with an outcome, which counts until a later attempt has one
    reason: Mapped[str | None]
    key: Mapped[str] = mapped_column(sa.String(64), index=True)
    resumed: Mapped[int]  # the resumption of the run that planned it
    git_commit: Mapped[str | None] = mapped_column(sa.String(64))
    node: Mapped[str | None]
    started_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    heartbeat_at: Mapped[datetime | None]
    phase: Mapped[str | None]
    done: Mapped[int | None] = mapped_column(sa.BigInteger)
    total: Mapped[int | None] = mapped_column(sa.BigInteger)
    rate: Mapped[float | None]  # steps of the phase a second
    route: Mapped[dict[str, Any]]
    environment_id: Mapped[str | None] = mapped_column(sa.ForeignKey("environment.id"))


class DeclaredQuantity(Base):
    """A quantity that a run may hold, as its kind declares it (jobs.schema.quantities.Quantity)."""

    __tablename__ = "quantity"

    run_id: Mapped[str] = mapped_column(sa.ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(sa.String(80), primary_key=True)  # "stage_*" declares all with this prefix
    position: Mapped[int]  # position among the run's quantities, from 0
    unit: Mapped[str] = mapped_column(sa.String(20))
    title: Mapped[str]
    short: Mapped[str]
    better: Mapped[str | None] = mapped_column(sa.String(16))
    role: Mapped[str] = mapped_column(sa.String(16))
    plot: Mapped[str | None] = mapped_column(sa.String(16))


class Metric(Base):
    """One metric of an attempt that ended `ok`.

    `state` is always "ok" and part of the foreign key: the database rejects metrics of an attempt in any other state,
    and rejects moving an attempt out of "ok" while it has metrics.
    """

    __tablename__ = "metric"
    __table_args__ = (
        sa.ForeignKeyConstraint(
            ["point_id", "attempt", "state"],
            ["attempt.point_id", "attempt.number", "attempt.state"],
            ondelete="CASCADE",
        ),
        sa.CheckConstraint("state = 'ok'", name="ok_attempts_only"),
        sa.UniqueConstraint("point_id", "attempt", "name"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    point_id: Mapped[str] = mapped_column(sa.String(240))
    attempt: Mapped[int]
    state: Mapped[str] = mapped_column(sa.String(16), server_default="ok")
    name: Mapped[str] = mapped_column(sa.String(80))
    unit: Mapped[str] = mapped_column(sa.String(20))
    value: Mapped[float]
    samples: Mapped[list[Any]]
    p10: Mapped[float | None]
    p90: Mapped[float | None]
    ci_low: Mapped[float | None]
    ci_high: Mapped[float | None]
    method: Mapped[str]


class Artifact(Base):
    """A file of one attempt at a point; earlier attempts keep theirs (e.g. the stacks of a hang before its retry)."""

    __tablename__ = "artifact"
    __table_args__ = (sa.UniqueConstraint("point_id", "attempt", "name"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    point_id: Mapped[str] = mapped_column(sa.ForeignKey("point.id", ondelete="CASCADE"))
    attempt: Mapped[int]
    name: Mapped[str] = mapped_column(sa.String(200))
    path: Mapped[str]
    size: Mapped[int] = mapped_column(sa.BigInteger)
    sha256: Mapped[str] = mapped_column(sa.String(64))
    content: Mapped[str | None]
    truncated: Mapped[bool]


class Series(Base):
    """One sample of a live series of an attempt; a point in any state has them, and keeps those of earlier attempts."""

    __tablename__ = "series"
    __table_args__ = (
        sa.PrimaryKeyConstraint("point_id", "attempt", "name", "rank", "step"),
        {"sqlite_with_rowid": False},
    )

    point_id: Mapped[str] = mapped_column(sa.ForeignKey("point.id", ondelete="CASCADE"))
    attempt: Mapped[int]
    name: Mapped[str] = mapped_column(sa.String(80))
    rank: Mapped[int]
    step: Mapped[int] = mapped_column(sa.BigInteger)
    at: Mapped[datetime]
    value: Mapped[float]
    unit: Mapped[str] = mapped_column(sa.String(20))


class Event(Base):
    """An event in a run. `id` is the hash of the content, so a repeated event is stored once."""

    __tablename__ = "event"

    id: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    run_id: Mapped[str] = mapped_column(sa.ForeignKey("run.id", ondelete="CASCADE"), index=True)
    point_id: Mapped[str | None] = mapped_column(sa.ForeignKey("point.id", ondelete="CASCADE"), index=True)
    at: Mapped[datetime]
    level: Mapped[str] = mapped_column(sa.String(16))
    message: Mapped[str]


class Verdict(Base):
    """One rule's verdict in one evaluation of a target; `run_id` None: evaluated on the whole store."""

    __tablename__ = "verdict"
    __table_args__ = (sa.Index(None, "target", "evaluated_at"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    evaluated_at: Mapped[datetime]
    run_id: Mapped[str | None] = mapped_column(sa.ForeignKey("run.id", ondelete="CASCADE"))
    target: Mapped[str] = mapped_column(sa.String(80))
    target_title: Mapped[str]
    target_result: Mapped[Result]
    position: Mapped[int]  # the rule's position within its target
    rule: Mapped[str] = mapped_column(sa.String(80))
    title: Mapped[str]
    result: Mapped[Result]
    value: Mapped[float | None]
    comparison: Mapped[str | None] = mapped_column(sa.String(2))  # "<=" or ">="
    bound: Mapped[float | None]
    unit: Mapped[str] = mapped_column(sa.String(20))
    margin: Mapped[float | None]  # distance to the bound, in the unit; negative: violated
    reason: Mapped[str]
    evidence: Mapped[list[Any]]  # point ids
