"""A soak over its processes."""
