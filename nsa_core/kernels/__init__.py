"""Triton kernels of Native Sparse Attention, one file a stage, forward and backward together.

`attention.py` puts the stages together; `operators.py` makes that differentiable and known to torch.compile, and is
what backends call. Common to all of them:

- Tensors are contiguous, [B,S,H,D]. A tile's rows are BQ = M // G queries times the G heads of one group, laid flat, so
  that a group of any size fills the matrix units.
- Softmax is base 2 (scores are multiplied by scale · log2 e), accumulated in float32. A row that sees nothing has
  lse = +inf, so that exp2(s - lse) is 0 and never NaN.
- Nothing waits for the device, nothing adds floating-point numbers atomically, and the work is cut by shapes alone:
  the same input gives the same bits.
"""
