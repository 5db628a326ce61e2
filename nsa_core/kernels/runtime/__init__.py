"""Host code that all kernels share: launches, tiles, tensor maps, custom operators, and replay of calls."""
