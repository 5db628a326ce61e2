"""How a point is measured: clock, memory, correctness, environment, machine, telemetry. Used by every kind of job."""
