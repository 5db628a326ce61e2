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
    run = sa.table("run", sa.column("id"), sa.column("kind"))
    point = sa.table("point", sa.column("run_id"), sa.column("config", sa.JSON()), sa.column("answers"))
    for kind, of_search, answers in (
        ("capacity", sa.true(), "oom"),
        ("backward", point.c.config["search"].as_string().is_not(None), "crash error hang oom timeout"),
    ):
        of_kind = point.c.run_id.in_(sa.select(run.c.id).where(run.c.kind == kind))
        op.execute(point.update().where(of_kind, of_search).values(answers=answers))
