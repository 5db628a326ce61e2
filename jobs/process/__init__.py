"""Functions in supervised processes."""
