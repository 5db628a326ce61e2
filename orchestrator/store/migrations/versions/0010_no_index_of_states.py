"""No index of the points' states: nearly all are ok, so that it finds nothing faster than the table does.

Postgres without statistics (a new database, within its first transaction) looked up the point of each new metric by it,
which read all ok points for each.
"""

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_index("ix_point_state", "point")
