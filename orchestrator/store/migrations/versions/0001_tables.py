"""The tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    _environment()
    _run()
    _point()
    _verdict()
    _artifact()
    _event()
    _metric()


def _environment() -> None:
    op.create_table(
        "environment",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("gpu", sa.Text()),
        sa.Column("content", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_environment"),
    )


def _run() -> None:
    op.create_table(
        "run",
        sa.Column("id", sa.String(200), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("kind", sa.String(40), nullable=False),
        sa.Column("origin", sa.String(16), nullable=False),
        sa.Column("source", sa.Text()),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text()),
        sa.Column("state_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("spec_hash", sa.String(64), nullable=False),
        sa.Column("git_commit", sa.String(64)),
        sa.Column("git_dirty", sa.Boolean()),
        sa.Column("code_hash", sa.String(64)),
        sa.Column("submission_id", sa.String(200)),
        sa.Column("host", sa.Text()),
        sa.Column("artifacts", sa.Text()),
        sa.Column("resumed", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("id", name="pk_run"),
    )
    op.create_index("ix_run_created_at", "run", ["created_at"])
    op.create_index("ix_run_origin", "run", ["origin"])


def _point() -> None:
    op.create_table(
        "point",
        sa.Column("id", sa.String(240), nullable=False),
        sa.Column("run_id", sa.String(200), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("estimate_bytes", sa.BigInteger()),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text()),
        sa.Column("state_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("node", sa.Text()),
        sa.Column("started_at", sa.DateTime(timezone=True)),
        sa.Column("ended_at", sa.DateTime(timezone=True)),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True)),
        sa.Column("phase", sa.Text()),
        sa.Column("done", sa.BigInteger()),
        sa.Column("total", sa.BigInteger()),
        sa.Column("implementation", sa.String(120)),
        sa.Column("workload", sa.String(40)),
        sa.Column("pass", sa.String(40)),
        sa.Column("seq_len", sa.BigInteger()),
        sa.Column("batch", sa.Integer()),
        sa.Column("query_heads", sa.Integer()),
        sa.Column("kv_heads", sa.Integer()),
        sa.Column("head_dim", sa.Integer()),
        sa.Column("layers", sa.Integer()),
        sa.Column("dtype", sa.String(20)),
        sa.Column("device", sa.String(20)),
        sa.Column("route", sa.JSON(), nullable=False),
        sa.Column("environment_id", sa.String(64)),
        sa.ForeignKeyConstraint(["environment_id"], ["environment.id"], name="fk_point_environment_id"),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name="fk_point_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_point"),
        sa.UniqueConstraint("id", "state", name="uq_point_id_state"),
        sa.UniqueConstraint("run_id", "number", name="uq_point_run_id_number"),
    )
    op.create_index("ix_point_key", "point", ["key"])
    op.create_index("ix_point_state", "point", ["state"])


def _verdict() -> None:
    op.create_table(
        "verdict",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("evaluated_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("run_id", sa.String(200)),
        sa.Column("target", sa.String(80), nullable=False),
        sa.Column("target_title", sa.Text(), nullable=False),
        sa.Column("target_result", sa.String(16), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("rule", sa.String(80), nullable=False),
        sa.Column("title", sa.Text(), nullable=False),
        sa.Column("result", sa.String(16), nullable=False),
        sa.Column("value", sa.Double()),
        sa.Column("comparison", sa.String(2)),
        sa.Column("bound", sa.Double()),
        sa.Column("unit", sa.String(20), nullable=False),
        sa.Column("margin", sa.Double()),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("evidence", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name="fk_verdict_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_verdict"),
    )
    op.create_index("ix_verdict_target_evaluated_at", "verdict", ["target", "evaluated_at"])


def _artifact() -> None:
    op.create_table(
        "artifact",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("point_id", sa.String(240), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("content", sa.Text()),
        sa.Column("truncated", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["point_id"], ["point.id"], name="fk_artifact_point_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_artifact"),
        sa.UniqueConstraint("point_id", "attempt", "name", name="uq_artifact_point_id_attempt_name"),
    )


def _event() -> None:
    op.create_table(
        "event",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("run_id", sa.String(200), nullable=False),
        sa.Column("point_id", sa.String(240)),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("level", sa.String(16), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["point_id"], ["point.id"], name="fk_event_point_id", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name="fk_event_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_event"),
    )
    op.create_index("ix_event_point_id", "event", ["point_id"])
    op.create_index("ix_event_run_id", "event", ["run_id"])


def _metric() -> None:
    op.create_table(
        "metric",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("point_id", sa.String(240), nullable=False),
        sa.Column("point_state", sa.String(16), server_default="ok", nullable=False),
        sa.Column("name", sa.String(80), nullable=False),
        sa.Column("unit", sa.String(20), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.Column("samples", sa.JSON(), nullable=False),
        sa.Column("p10", sa.Double()),
        sa.Column("p90", sa.Double()),
        sa.Column("ci_low", sa.Double()),
        sa.Column("ci_high", sa.Double()),
        sa.Column("method", sa.Text(), nullable=False),
        sa.CheckConstraint("point_state = 'ok'", name="ck_metric_ok_points_only"),
        sa.ForeignKeyConstraint(
            ["point_id", "point_state"],
            ["point.id", "point.state"],
            name="fk_metric_point_id_point_state",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name="pk_metric"),
        sa.UniqueConstraint("point_id", "name", name="uq_metric_point_id_name"),
    )
