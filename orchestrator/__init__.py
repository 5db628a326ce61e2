"""Runs jobs on a Ray cluster or on this machine, keeps their results, and judges them."""
