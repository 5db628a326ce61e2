"""The views of metrics without a condition on the state of their points: only an ok point has any (table metric).

With it SQLite reads every ok point of the database to find those of one run.
"""

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_AXES = (
    "p.implementation, p.workload, p.pass, p.seq_len, p.batch, p.query_heads, p.kv_heads, p.head_dim, p.layers,"
    " p.dtype, p.device, p.env, p.python"
)

# A rate (tok/s) does not depend on how many sequences ran side by side; a time or an amount of memory does.
_METRICS = f"""
CREATE VIEW v_metrics AS
SELECT r.id AS run_id, r.name AS run_name, r.origin, r.source, r.kind, p.id AS point_id, p.label, p.state, {_AXES},
       e.gpu, p.more_axes, m.name AS metric, m.unit, m.value, m.ci_low, m.ci_high,
       CASE WHEN m.unit IN ('ms', 's', 'MiB') THEN m.value / COALESCE(p.batch, 1) ELSE m.value END AS per_sequence,
       m.p10, m.p90, m.method, p.estimate_bytes, p.ended_at
FROM point p JOIN run r ON r.id = p.run_id LEFT JOIN environment e ON e.id = p.environment_id
     JOIN metric m ON m.point_id = p.id
"""

_SCALING_COLUMNS = """
    run_id, run_name, origin, source, point_id, label, state, implementation, workload, pass, seq_len, batch,
    query_heads, kv_heads, head_dim, layers, dtype, device, env, python, gpu, more_axes, metric, unit, value, ci_low,
    ci_high, per_sequence, ended_at"""

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


def upgrade() -> None:
    for view in ("v_memory", "v_throughput", "v_scaling", "v_metrics"):
        op.execute(f"DROP VIEW {view}")
    for view in (_METRICS, _SCALING, _THROUGHPUT, _MEMORY):
        op.execute(view)
