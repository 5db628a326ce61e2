"""Kernels of the model around the attention: heads, SwiGLU, cross entropy."""
