"""The resumption that planned a point last, by which its states before an attempt are ordered."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("point", sa.Column("resumed", sa.Integer(), nullable=False, server_default="0"))
    # Not known any more: no plan is later than the run's last resumption.
    op.execute("UPDATE point SET resumed = (SELECT run.resumed FROM run WHERE run.id = point.run_id)")
