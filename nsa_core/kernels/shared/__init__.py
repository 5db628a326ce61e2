"""Device functions that kernels of several stages share."""
