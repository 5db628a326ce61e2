"""The branch that a run's sources were on."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("run", sa.Column("git_branch", sa.Text()))
