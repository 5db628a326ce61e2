"""Job kinds: each file defines one kind, its spec, its points, and how a point is measured."""
