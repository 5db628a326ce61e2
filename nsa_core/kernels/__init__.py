"""Triton and Gluon kernels of Native Sparse Attention, each in one file with the host code that launches it.

- `attention.py` puts the stages of training and prefill together for a `Call` (`call.py`); `operators.py` makes that
  differentiable and known to torch.compile, and is the backends' door.
- Stages: `compress.py` (means of keys and values), `span/` (attention over contiguous keys: compressed, window and
  forced blocks), `scores.py` (importance and choice of blocks), `selected/` (attention over freely chosen blocks),
  `merge.py` (slots and branches summed, gates). A file named *_hopper.py is for sm90 alone, others are for all cards.
- `decode/`: one decoding step over a cache. `training/`: the rest of a model in compiled training.
- `shared/`: device functions of several kernels. `runtime/`: host code that launches them, names their stages and
  replays calls. `aot/` compiles all of them without a GPU.

Conventions of the attention kernels:

- Tensors are contiguous, [B,S,H,D], or [B,H,D] for one token. The rows of a tile are all G heads of one group, for each
  of BQ = M // G queries (or the one that is decoded), so that a group of any size fills the matrix units.
- Softmax is base 2 (scores are multiplied by scale · log2 e), accumulated in float32. A row that sees no key has
  lse = +inf, so that exp2(s - lse) is 0 and never NaN; a part that is yet to be merged has -inf instead, and weight 0.
- Nothing waits for the device, no floating-point atomics are used, and work is split by shapes alone: the same input
  gives the same bits.
"""
