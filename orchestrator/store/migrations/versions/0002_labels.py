"""Labels of runs (person, tags, notes), and the failures that answer a search."""

import sqlalchemy as sa
from alembic import op

from orchestrator.store.models import UtcDateTime

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("run", sa.Column("person", sa.String(200)))
    op.add_column("run", sa.Column("tags", sa.Text(), nullable=False, server_default=""))
    op.add_column("run", sa.Column("notes", sa.Text()))
    op.add_column("run", sa.Column("labelled_at", UtcDateTime()))
    op.add_column("point", sa.Column("answers", sa.String(100)))
