"""Checkpoints of a training: when they are saved, how they are stored and found again."""
