"""The tables of version 0.2.0, which are made from the models: a later migration changes them for older databases."""

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """No older database can be migrated."""
