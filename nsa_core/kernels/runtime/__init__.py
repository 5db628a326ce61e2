"""Launches, tiles, tensor maps, custom operators and CUDA graph replay: what every kernel needs from the host."""
