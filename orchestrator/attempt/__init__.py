"""One try at one point, from process to post-mortem."""
