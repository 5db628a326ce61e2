"""The machine: GPUs, telemetry, energy, topology, driver."""
