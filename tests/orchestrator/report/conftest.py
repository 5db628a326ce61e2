"""Fixtures shared with the dashboard's tests: databases."""

from example_databases import complete, complete_file, database

__all__ = ["complete", "complete_file", "database"]
