"""Triton kernels of Native Sparse Attention, one file a stage, each with the host code that starts them.

`attention.py` puts the stages of training and prefill together; `plan.py` is what they are told of a call.
`operators.py` makes that differentiable and known to torch.compile, and is what backends call; `replay.py` spares a
call with tensors of known shapes the host code. `decode.py` is one decoding step over a cache, with the files
decode_*.py. `heads.py`, `swiglu.py` and `cross_entropy.py` are for the rest of a model in compiled training.
`ranges.py` and `rescale.py` are pieces that attention kernels share. `_launch.py` starts all kernels, `_custom.py`
makes them operators that a compiler knows, `stages.py` tells whose time a launch is, `aot.py` compiles them where there
is no GPU.

Common to those of attention:

- Tensors are contiguous, [B,S,H,D], or [B,H,D] for one token. A tile's rows are those of all G heads of one group, laid
  flat: of BQ = M // G queries, or of the one that is decoded. So a group of any size fills the matrix units.
- Softmax is base 2 (scores are multiplied by scale · log2 e), accumulated in float32. A row that sees nothing has
  lse = +inf, so that exp2(s - lse) is 0 and never NaN; a part of one that is yet to be merged has -inf, and no weight.
- Nothing waits for the device, nothing adds floating-point numbers atomically, and the work is cut by shapes alone:
  the same input gives the same bits.
"""
