"""Live series of points, one row a sample; the rate of a running point's progress."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_AXES = (
    "p.implementation, p.workload, p.pass, p.seq_len, p.batch, p.query_heads, p.kv_heads, p.head_dim, p.layers,"
    " p.dtype, p.device, p.env, p.python"
)

_POINTS = f"""
CREATE VIEW v_points AS
SELECT r.id AS run_id, r.name AS run_name, r.origin, r.source, r.kind, p.id AS point_id, p.number, p.label, p.state,
       p.reason, p.attempt, {_AXES}, e.gpu, p.more_axes, p.estimate_bytes, p.node, p.phase, p.done, p.total, p.rate,
       p.heartbeat_at, p.started_at, p.ended_at, p.key
FROM point p JOIN run r ON r.id = p.run_id LEFT JOIN environment e ON e.id = p.environment_id
"""

_SERIES = """
CREATE VIEW v_series AS
SELECT r.id AS run_id, r.name AS run_name, r.kind, p.id AS point_id, p.label, p.state, p.implementation, p.seq_len,
       s.attempt, s.attempt = p.attempt AS latest, s.name AS series, s.unit, s.rank, s.step, s.at, s.value
FROM series s JOIN point p ON p.id = s.point_id JOIN run r ON r.id = p.run_id
"""


def upgrade() -> None:
    op.create_table(
        "series",
        sa.Column("point_id", sa.String(240), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(80), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.Column("unit", sa.String(20), nullable=False),
        sa.ForeignKeyConstraint(["point_id"], ["point.id"], name=op.f("fk_series_point_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("point_id", "attempt", "name", "rank", "step", name=op.f("pk_series")),
        sqlite_with_rowid=False,
    )
    op.execute("DROP VIEW v_points")
    op.add_column("point", sa.Column("rate", sa.Double()))
    op.execute(_POINTS)
    op.execute(_SERIES)
