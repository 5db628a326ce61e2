"""Attempts at points that had an outcome before, which counts until the next one."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "remeasurement",
        sa.Column("point_id", sa.String(240), nullable=False),
        sa.Column("plan", sa.JSON(), nullable=False),
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
        sa.Column("rate", sa.Double()),
        sa.Column("resumed", sa.Integer(), nullable=False, server_default="0"),
        sa.PrimaryKeyConstraint("point_id", name="pk_remeasurement"),
        sa.ForeignKeyConstraint(["point_id"], ["point.id"], name="fk_remeasurement_point_id", ondelete="CASCADE"),
    )
