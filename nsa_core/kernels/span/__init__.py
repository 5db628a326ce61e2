"""Attention over contiguous spans of keys: the compressed, window and forced-block branches in one pass."""
