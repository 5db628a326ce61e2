"""Training: the loop, its state, and the ranks that it runs on."""
