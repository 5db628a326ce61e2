"""The `nsa` command: what no job needs."""
