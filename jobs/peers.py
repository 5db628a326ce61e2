"""Other implementations of the operator, run live beside this one: the same inputs, clock and oracle as kind bench.

A peer is called through its adapter (jobs.adapters), at the head layouts, lengths and passes of a bench. It is compared
with the oracle of the semantics that it claims before it is timed. One that cannot run is skipped, with the reason.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from typing import Annotated, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from jobs.adapters import Peer, PeerProblem, find_peer, load_peer, peer_names
from jobs.adapters.packages import TORCH_FIXED
from jobs.measure.call import FunctionCall, measure_call
from jobs.measure.check import (
    DENSE_KERNELS,
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
from jobs.measure.operator import OPERATOR_QUANTITIES, LayoutsSpec, OperatorCase, measure_operator
from jobs.schema.plain_text import error_in_a_line
from jobs.schema.point import Beat, Machine, Measurement, Point
from jobs.schema.quantities import TELEMETRY
from jobs.specs.fields import Unique, implementation_names, names_among, torch_dtype
from jobs.specs.fit import dense_reasons
from jobs.specs.nsa_effect import refuse_idle
from jobs.specs.spec import SpecError
from nsa_core import NSAConfig, compress
from nsa_core.backends import BACKENDS, Backend
from nsa_core.functional import BRANCHES
from nsa_core.reference import block_scores

QUANTITIES = (*OPERATOR_QUANTITIES, *TELEMETRY)

_VERSION, _PROBLEM = "peer ", "peer-problem "  # in a fingerprint: a peer's version; why it cannot be used


def versions() -> dict[str, str]:
    """Version of every peer that can be used here, and of every other why it cannot; for the machine's fingerprint."""
    found = {}
    for name in peer_names():
        try:
            found[_VERSION + name] = load_peer(name)[1]
        except PeerProblem as err:
            found[_PROBLEM + name] = str(err)
    return found


def _as_implementation(name: str, nsa: NSAConfig | None) -> str:
    """An implementation that the same fields of NSAConfig act on as on a peer: all but slots, or none."""
    try:
        dense = find_peer(name).semantics(nsa or NSAConfig()) is None
    except Exception:  # of an adapter from outside; its points tell
        return "reference"
    return "dense" if dense else "reference"


class Case(OperatorCase):
    """One peer, or one implementation of this project.

    Attributes:
        window_kernel: flash kernel of the window, for peers without one; None: the fastest.
        error_factor: multiple of an eager run's error against the oracle that the peer may have; None: it is no peer.
    """

    window_kernel: str | None = None
    error_factor: float | None = None


class Spec(LayoutsSpec):
    """Head layouts x lengths x passes x peers, and implementations of this project beside them."""

    kind: Literal["peers"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe
    peers: Annotated[list[str], Field(min_length=1), Unique, names_among(peer_names, "peer")]
    implementations: Annotated[list[str], Unique, implementation_names(*DENSE_KERNELS)] = Field(
        default=[], description="of this project, measured beside them as in kind bench"
    )
    window_kernel: Literal["auto", "flash-attn-4", "flash-attn-2", "torch-varlen", "torch-fixed"] = Field(
        default="auto",
        description="flash kernel of the window of peers that leave it to flash-attn; auto: the fastest installed; "
        "PyTorch's of packed sequences (torch-varlen) or of sequences of one length (torch-fixed)",
    )
    error_factor: float = Field(
        default=2, ge=1, le=8, description="multiple of an eager run's error against the oracle that a peer may have"
    )

    @model_validator(mode="after")
    def _check_effect(self) -> Self:
        for name in self.peers:
            if name in self.implementations:
                raise ValueError(f"implementations: {name!r}: is among the peers, too; name it once")
        peers = [_as_implementation(name, self.nsa) for name in self.peers]
        if self.window_kernel != "auto" and set(peers) == {"dense"}:
            raise ValueError(f"window_kernel: {self.window_kernel!r}: changes nothing of dense peers; use auto")
        if self.nsa is not None:
            refuse_idle(self, self.nsa, [*peers, *self.implementations], self.dtype)
        return self

    def points(self, machine: Machine) -> Sequence[Point]:
        """Points of the whole grid, shortest lengths first, the peers of each place before this project's.

        Raises:
            SpecError: an implementation, or the window's kernel, cannot run on this machine.
        """
        points: list[Point] = []
        for length, sweep in self.sweeps(machine, Case):
            own = {
                "window_kernel": self._window_kernel(machine, sweep.model.head_dim),
                "error_factor": self.error_factor,
            }
            for pass_, name in product(self.passes, self.peers):
                case = sweep.case_of(length, pass_, name, **own)
                points.append(sweep.point(case, skip_reason=_reason_against(case, machine)))
            if self.implementations:
                points += sweep.points([length], self.passes, self.implementations)
        return points

    def _window_kernel(self, machine: Machine, head_dim: int) -> str | None:
        """Name of the kernel; None for the fastest. Raises SpecError if the machine cannot run it."""
        if self.window_kernel == "auto":
            return None
        needs = "torch-varlen" if self.window_kernel == TORCH_FIXED else self.window_kernel  # the same kernel's
        reason = dense_reasons(machine, torch_dtype(self.dtype), head_dim)[f"dense-{needs}"]
        if reason is not None:
            raise SpecError(f"window_kernel: {self.window_kernel!r}: {reason}; use auto")
        return self.window_kernel


def _reason_against(case: Case, machine: Machine) -> str | None:
    """Why a peer cannot run there, its package missing or the operands not its; None if it can, as far as is known."""
    try:
        peer = find_peer(case.implementation)
    except PeerProblem as err:
        return str(err)
    if (problem := machine.fingerprint.get(_PROBLEM + case.implementation)) is not None:
        return problem
    try:
        reason = peer.incompatible(case.shape, case.model.nsa, case.torch_dtype, case.device)
    except (Exception, SystemExit) as err:  # of another distribution: no reason to lose the other points
        return f"its adapter cannot say whether it computes this ({error_in_a_line(err)}); mend or uninstall it"
    return None if reason is None else str(reason)


def measure(case: Case, beat: Beat) -> Measurement:
    """Compare a peer, or an implementation of this project, with the oracle, and measure its time and memory.

    Raises:
        PeerProblem: the peer cannot be used here.
        And as measure_call.
    """
    factor, nsa = case.error_factor, case.model.nsa
    if factor is None:
        return measure_operator(case, beat)
    beat("import")
    peer, version = load_peer(case.implementation)

    def check() -> Agreement:
        agreement = check_peer(
            case.implementation, peer, nsa, case.shape, case.torch_dtype, case.torch_device,
            backward=case.backward, seed=case.seed, window_kernel=case.window_kernel, factor=factor,
        )  # fmt: skip
        forget_tuned_choices()
        return agreement

    measured = measure_call(case, check, lambda: _call(case, peer), beat, timing=case.timing)
    claimed = peer.semantics(nsa)
    what = "dense causal attention" if claimed is None else asdict(claimed)
    about = {"name": case.implementation, "version": version, "computes": what}
    return replace(measured, environment={**measured.environment, "peer": about})


def _call(case: Case, peer: Peer) -> FunctionCall:
    """A call of the peer, on inputs as in kind bench."""
    inputs = case.inputs()
    if peer.semantics(case.model.nsa) is None:
        del inputs["gates"]

    def attend() -> Tensor:
        return peer.attend(inputs, case.model.nsa, case.window_kernel)

    return case.differentiated(attend, inputs)


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
