"""What can be run: one file a kind of job, its spec, its points, and how a point is measured."""
