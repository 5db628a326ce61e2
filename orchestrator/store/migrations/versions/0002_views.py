"""The reporting views."""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_RUN = "r.id AS run_id, r.name AS run_name, r.origin, r.source"
_AXES = (
    "p.implementation, p.workload, p.pass, p.seq_len, p.batch, p.query_heads, p.kv_heads, p.head_dim, p.layers,"
    " p.dtype, p.device"
)
_FROM = "point p JOIN run r ON r.id = p.run_id LEFT JOIN environment e ON e.id = p.environment_id"

# A rate (tok/s) does not depend on how many sequences ran side by side; a time or an amount of memory does.
_METRICS = f"""
CREATE VIEW v_metrics AS
SELECT {_RUN}, r.kind, p.id AS point_id, p.label, p.state, {_AXES}, e.gpu,
       m.name AS metric, m.unit, m.value, m.ci_low, m.ci_high,
       CASE WHEN m.unit IN ('ms', 's', 'MiB') THEN m.value / COALESCE(p.batch, 1) ELSE m.value END AS per_sequence,
       m.p10, m.p90, m.method, p.estimate_bytes, p.ended_at
FROM {_FROM} JOIN metric m ON m.point_id = p.id
WHERE p.state = 'ok'
"""

_SCALING_COLUMNS = """
    run_id, run_name, origin, source, point_id, label, state, implementation, workload, pass, seq_len, batch,
    query_heads, kv_heads, head_dim, layers, dtype, device, gpu, metric, unit, value, ci_low, ci_high, per_sequence,
    ended_at"""

_SCALING = f"""
CREATE VIEW v_scaling AS
SELECT {_SCALING_COLUMNS}
FROM v_metrics
WHERE seq_len IS NOT NULL
  AND metric IN ('time', 'throughput', 'peak_extra_memory', 'peak_memory', 'peak_reserved')
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
SELECT {_RUN}, r.kind, p.id AS point_id, p.number, p.label, p.state, p.reason, p.attempt, {_AXES}, e.gpu,
       p.estimate_bytes, p.node, p.phase, p.done, p.total, p.heartbeat_at, p.started_at, p.ended_at, p.key
FROM {_FROM}
"""

_GATE = """
CREATE VIEW v_gate AS
SELECT v.target, v.target_title, v.target_result, v.position, v.rule, v.title, v.result, v.value, v.comparison,
       v.bound, v.unit, v.margin, v.reason, v.evidence, v.run_id, v.evaluated_at
FROM verdict v
JOIN (SELECT target, COALESCE(run_id, '') AS scope, MAX(evaluated_at) AS newest
      FROM verdict GROUP BY target, COALESCE(run_id, '')) latest
  ON latest.target = v.target AND latest.scope = COALESCE(v.run_id, '') AND latest.newest = v.evaluated_at
"""


def upgrade() -> None:
    for view in (_METRICS, _SCALING, _THROUGHPUT, _MEMORY, _POINTS, _GATE):
        op.execute(view)
