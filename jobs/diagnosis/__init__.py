"""Diagnosis of a training: its ranks, their hosts, and advice on what is wrong."""
