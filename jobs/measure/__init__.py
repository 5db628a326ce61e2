"""Instruments that every kind of job uses: clock, memory, checks against the oracle, calls and passes of a model."""
