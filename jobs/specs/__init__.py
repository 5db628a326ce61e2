"""YAML to a checked spec."""
