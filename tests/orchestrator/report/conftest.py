"""Fixtures shared with the dashboard's tests: databases."""

from made_up_runs import complete, complete_file, database

__all__ = ["complete", "complete_file", "database"]
