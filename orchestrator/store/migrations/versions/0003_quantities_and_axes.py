"""Quantities that runs declare, and axes of a kind's own."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

# As the kinds declared them when this migration was written: name, unit, title, short, better, role, plot.
_DECLARED = (
    ("time", "ms", "Time", "time", "lower", "headline", "growth"),
    ("throughput", "tok/s", "Throughput", "throughput", "higher", "headline", "rate"),
    ("bytes_read", "MiB", "Bytes read by a step's attention", "bytes read", "lower", "headline", None),
    ("loss", "nat/byte", "Training loss", "loss", "lower", "headline", "curve"),
    ("heldout_loss", "nat/byte", "Held-out loss", "", "lower", "headline", None),
    ("mfu", "%", "Model FLOPs utilisation", "MFU", "higher", "headline", None),
    ("planned_time", "h", "Time that the plan takes", "", "lower", "headline", None),
    ("elapsed", "s", "Time that the point took", "elapsed", None, "headline", None),
    ("peak_extra_memory", "MiB", "Peak memory beyond inputs", "extra memory", "lower", "headline", "growth"),
    ("peak_memory", "MiB", "Peak memory allocated", "allocated memory", "lower", "headline", "growth"),
    ("peak_reserved", "MiB", "Peak memory reserved", "reserved memory", "lower", "detail", "growth"),
    ("peak_driver", "MiB", "Memory in use on the card", "", "lower", "detail", None),
    ("peak_rss", "MiB", "Peak resident set", "", "lower", "detail", None),
    ("heldout_loss_before", "nat/byte", "Held-out loss before training", "", None, "detail", None),
    ("throughput_needed", "tok/s", "Throughput that the plan needs", "", None, "detail", None),
    ("estimate_error", "%", "Error of the memory estimate", "", None, "detail", None),
    ("oracle_error", "1", "Error against the oracle", "", "lower", "detail", None),
    ("oracle_error_bound", "1", "Bound of the error against the oracle", "", None, "detail", None),
    ("stage_*", "ms", "Stage", "", "lower", "stage", None),
    ("gpu_utilization", "%", "GPU utilisation", "", "higher", "telemetry", None),
    ("gpu_power", "W", "GPU power", "", None, "telemetry", None),
    ("gpu_sm_clock", "MHz", "SM clock", "", None, "telemetry", None),
    ("gpu_temperature", "C", "GPU temperature", "", None, "telemetry", None),
    ("gpu_memory_used", "MiB", "Memory used on the GPU", "", None, "telemetry", None),
    ("gpu_processes", "1", "Processes on the GPU", "", None, "telemetry", None),
    ("gpu_throttled", "%", "Samples with a throttle", "", "lower", "telemetry", None),
)

_RUN = "r.id AS run_id, r.name AS run_name, r.origin, r.source"
_AXES = (
    "p.implementation, p.workload, p.pass, p.seq_len, p.batch, p.query_heads, p.kv_heads, p.head_dim, p.layers,"
    " p.dtype, p.device"
)
_FROM = "point p JOIN run r ON r.id = p.run_id LEFT JOIN environment e ON e.id = p.environment_id"

# A rate (tok/s) does not depend on how many sequences ran side by side; a time or an amount of memory does.
_METRICS = f"""
CREATE VIEW v_metrics AS
SELECT {_RUN}, r.kind, p.id AS point_id, p.label, p.state, {_AXES}, e.gpu, p.more_axes,
       m.name AS metric, m.unit, m.value, m.ci_low, m.ci_high,
       CASE WHEN m.unit IN ('ms', 's', 'MiB') THEN m.value / COALESCE(p.batch, 1) ELSE m.value END AS per_sequence,
       m.p10, m.p90, m.method, p.estimate_bytes, p.ended_at
FROM {_FROM} JOIN metric m ON m.point_id = p.id
WHERE p.state = 'ok'
"""

_SCALING_COLUMNS = """
    run_id, run_name, origin, source, point_id, label, state, implementation, workload, pass, seq_len, batch,
    query_heads, kv_heads, head_dim, layers, dtype, device, gpu, more_axes, metric, unit, value, ci_low, ci_high,
    per_sequence, ended_at"""

# Numbers of quantities that their run declares to be drawn against S.
_SCALING = f"""
CREATE VIEW v_scaling AS
SELECT {_SCALING_COLUMNS}, plot
FROM v_metrics JOIN (SELECT run_id AS declared_by, name, plot FROM quantity) q
  ON q.declared_by = run_id AND q.name = metric
WHERE seq_len IS NOT NULL AND plot IN ('growth', 'rate', 'step rate')
"""

_THROUGHPUT = f"""
CREATE VIEW v_throughput AS
SELECT {_SCALING_COLUMNS}
FROM v_metrics
WHERE metric = 'throughput'
"""

_MEMORY = f"""
CREATE VIEW v_memory AS
SELECT {_SCALING_COLUMNS}, estimate_bytes / 1048576.0 AS estimate_mib
FROM v_metrics
WHERE metric IN ('peak_extra_memory', 'peak_memory', 'peak_reserved', 'peak_driver', 'peak_rss')
"""

_POINTS = f"""
CREATE VIEW v_points AS
SELECT {_RUN}, r.kind, p.id AS point_id, p.number, p.label, p.state, p.reason, p.attempt, {_AXES}, e.gpu, p.more_axes,
       p.estimate_bytes, p.node, p.phase, p.done, p.total, p.heartbeat_at, p.started_at, p.ended_at, p.key
FROM {_FROM}
"""


def upgrade() -> None:
    for view in ("v_memory", "v_throughput", "v_scaling", "v_points", "v_metrics"):
        op.execute(f"DROP VIEW {view}")
    op.add_column("run", sa.Column("axes", sa.JSON()))
    op.add_column("point", sa.Column("more_axes", sa.JSON()))
    _quantity()
    _declare_stored_runs()
    for view in (_METRICS, _SCALING, _THROUGHPUT, _MEMORY, _POINTS):
        op.execute(view)


def _quantity() -> None:
    op.create_table(
        "quantity",
        sa.Column("run_id", sa.String(200), nullable=False),
        sa.Column("name", sa.String(80), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("unit", sa.String(20), nullable=False),
        sa.Column("title", sa.Text(), nullable=False),
        sa.Column("short", sa.Text(), nullable=False),
        sa.Column("better", sa.String(16)),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("plot", sa.String(16)),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name="fk_quantity_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "name", name="pk_quantity"),
    )


def _declare_stored_runs() -> None:
    """Runs of earlier versions get the declarations that their kinds have now; decoding's throughput its own guides."""
    connection = op.get_bind()
    statement = sa.text(
        "INSERT INTO quantity (run_id, name, position, unit, title, short, better, role, plot) "
        "SELECT id, :name, :position, :unit, :title, :short, :better, :role, :plot FROM run"
    )
    names = ("name", "unit", "title", "short", "better", "role", "plot")
    for position, declared in enumerate(_DECLARED):
        connection.execute(statement, {"position": position, **dict(zip(names, declared, strict=True))})
    connection.execute(
        sa.text(
            "UPDATE quantity SET plot = 'step rate' "
            "WHERE name = 'throughput' AND run_id IN (SELECT id FROM run WHERE kind = 'decode')"
        )
    )
