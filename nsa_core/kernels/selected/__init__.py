"""Attention over the selected blocks, forward and backward."""
