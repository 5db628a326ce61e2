"""A package, for pytest: else the cluster that its tests share would stay until the session's end."""
