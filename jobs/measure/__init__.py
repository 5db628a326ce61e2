"""Instruments that every kind of job uses: clock, memory, correctness, environment, machine, telemetry."""
