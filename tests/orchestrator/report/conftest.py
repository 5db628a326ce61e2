"""The databases that the dashboard's tests read, too."""

from example_databases import complete, complete_file, database

__all__ = ["complete", "complete_file", "database"]
