"""Views with the project's own NSA as implementation `nsa`, and its backend: all are made again after a migration."""

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Change no table."""
