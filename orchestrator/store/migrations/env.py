"""Alembic's entry: migrates over the connection that orchestrator.store.engine hands in."""

from alembic import context

from orchestrator.store.models import Base

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=Base.metadata,
    render_as_batch=connection.dialect.name == "sqlite",
    compare_type=True,
)
with context.begin_transaction():
    context.run_migrations()
