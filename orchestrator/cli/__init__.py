"""The `nsa` command; no job needs it."""
