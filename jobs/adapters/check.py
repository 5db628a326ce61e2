"""Check of a peer before it is timed, against the float64 oracle of the semantics that it claims.

As in jobs.measure.check, with two differences. Two sequences are compared, for most peers compute packed ones. And the
choice of blocks may differ from the oracle's where their scores are closer than the inputs' dtype can tell: peers round
queries or scores to it before they choose.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from jobs.adapters import Peer
from jobs.measure.check import (
    MISMATCH,
    REACHES,
    Agreement,
    Attend,
    HeadShape,
    WrongResult,
    attend_densely,
    attend_to,
    judge,
    make_inputs,
    results_of_sides,
    small_case,
)
from nsa_core import NSAConfig, compress
from nsa_core.backends import BACKENDS, Backend
from nsa_core.functional import BRANCHES
from nsa_core.reference import block_scores

_SEQUENCES = 2


def check_peer(
    name: str,
    peer: Peer,
    config: NSAConfig,
    shape: HeadShape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    backward: bool,
    seed: int,
    window_kernel: str | None,
    factor: float,
) -> Agreement:
    """Compare a peer with the oracle, on at most two kv heads and one block more than a query selects.

    Args:
        factor: multiple of an eager run's error that it may have.

    Raises:
        WrongResult: the error of the selection, the output or a gradient exceeds its bound.
    """
    small, seq_len = small_case(config, shape)
    inputs = make_inputs(small, _SEQUENCES, seq_len, dtype, device, seed, backward)
    claimed = peer.semantics(config)
    if claimed is None:
        del inputs["gates"]

        def by(backend: Backend) -> Attend:
            return partial(attend_densely, backend=backend)
    else:
        longer = REACHES * config.slc_count * config.slc_block
        _check_choice(name, peer, config, claimed, make_inputs(small, 1, longer, dtype, device, seed, False))
        blocks = _choice(peer, config, inputs)

        def by(backend: Backend) -> Attend:
            return lambda tensors: attend_to(blocks, tensors, claimed, backend, BRANCHES)

    sides = results_of_sides(lambda x: peer.attend(x, config, window_kernel), by, inputs, backward)
    return judge(*sides, dtype, f"{_SEQUENCES} sequences, S={seq_len}, {small}", name, factor)


def _choice(peer: Peer, config: NSAConfig, inputs: Mapping[str, Tensor]) -> Tensor:
    """Blocks [B,S,Hkv,n] that the peer chooses, ascending, -1 last."""
    q, k, v = (inputs[key].detach() for key in ("q", "k", "v"))
    blocks = peer.select(q, k, v, config).long()
    last = torch.iinfo(torch.int32).max
    found = blocks.masked_fill(blocks < 0, last).sort(-1).values
    return found.masked_fill(found == last, -1).int()


def _check_choice(name: str, peer: Peer, config: NSAConfig, claimed: NSAConfig, inputs: Mapping[str, Tensor]) -> None:
    """Compare the peer's choices with the oracle's. Raises WrongResult.

    The share of wrong ones is also taken over the queries that see more blocks than they select.
    """
    q, k = inputs["q"], inputs["k"]
    scale, k_cmp = q.shape[-1] ** -0.5, compress(k, claimed)
    with torch.no_grad():
        scores = _ranked(block_scores(q, k_cmp, claimed, 0, scale).transpose(1, 2), claimed)
    right = BACKENDS["reference"].select(q, k_cmp, claimed, 0, scale)
    wrong = _wrong(_choice(peer, config, inputs), right, scores, torch.finfo(q.dtype).eps)
    reach = claimed.slc_count * claimed.slc_block
    share = max(wrong[:, reach:].float().mean().item(), wrong.float().mean().item())
    if share > MISMATCH:
        raise WrongResult(
            f"{name}: selects other blocks than the oracle for {share:.1%} of the queries; at most {MISMATCH:.1%} can "
            "be rounding"
        )


def _ranked(scores: Tensor, config: NSAConfig) -> Tensor:
    """Scores [B,S,Hkv,blocks], inf for the forced blocks and -inf for those that begin after the query."""
    index = torch.arange(scores.shape[-1], device=scores.device)
    own = (torch.arange(scores.shape[1], device=scores.device) // config.slc_block)[:, None, None]
    forced = (index < config.init_blocks) | (index > own - config.local_blocks)
    return scores.masked_fill(forced, torch.inf).masked_fill(index > own, -torch.inf)


def _wrong(found: Tensor, right: Tensor, scores: Tensor, rounding: float) -> Tensor:
    """Choices [B,S,Hkv] that differ from the right ones by more than a tie.

    A tie: equally many blocks, none twice, and the lowest score that was taken in exchange is, but for `rounding`, as
    high as the highest that was left out.
    """
    ours, theirs = (_as_mask(blocks, scores.shape[-1]) for blocks in (right, found))
    extra, missing = theirs & ~ours, ours & ~theirs
    lowest = scores.masked_fill(~extra, torch.inf).amin(-1)
    highest = scores.masked_fill(~missing, -torch.inf).amax(-1)
    given = (found >= 0).sum(-1)
    complete = (given == (right >= 0).sum(-1)) & (given == theirs.sum(-1))
    return ~complete | (lowest < highest * (1 - rounding))


def _as_mask(blocks: Tensor, count: int) -> Tensor:
    """Whether each of `count` blocks is among those chosen, [B,S,Hkv,count]; blocks beyond them are left out."""
    places = torch.where((blocks < 0) | (blocks >= count), count, blocks).long()
    chosen = torch.zeros(*blocks.shape[:-1], count + 1, dtype=torch.bool, device=blocks.device)
    return chosen.scatter_(-1, places, True)[..., :count]


def forget_tuned_choices() -> None:
    """Have each kernel of this process that Triton has tuned, or read a choice for from disk, tuned at its next call.

    A choice is kept under a key that need not have the length and the batch, so that the small call of a check would
    else decide how a large one is computed. Triton's source has no function for it (triton/runtime/autotuner.py).
    """
    module = sys.modules.get("triton.runtime.autotuner")
    if module is None:
        return
    for found in gc.get_objects():
        if issubclass(type(found), module.Autotuner):
            found.cache.clear()
            found.cache_results = False
