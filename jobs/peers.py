"""Other implementations of the operator, run live beside this one: the same inputs, clock and oracle as kind bench.

A peer is called through its adapter (jobs.adapters), at the head layouts, lengths and passes of a bench. It is compared
with the oracle of the semantics that it claims before it is timed. One that cannot run is skipped, with the reason.
"""

import gc
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import Annotated, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from jobs.adapters import PEERS, TORCH_FIXED, Peer, PeerProblem, find_peer, load_peer, peer_names
from jobs.measure.check import Agreement, Operator, check_operator
from jobs.measure.passes import OPERATOR_QUANTITIES, LayoutsSpec, OperatorCase, measure_operator
from jobs.schema.plain_text import error_in_a_line
from jobs.schema.point import Beat, Machine, Measurement, Point
from jobs.schema.quantities import TELEMETRY
from jobs.specs.fields import DENSE_KERNELS, Unique, names_among
from jobs.specs.fit import dense_reasons, refuse_idle
from jobs.specs.spec import SpecError
from nsa_core import NSAConfig

QUANTITIES = (*OPERATOR_QUANTITIES, *TELEMETRY)

_VERSION, _PROBLEM = "peer ", "peer-problem "  # in a fingerprint: a peer's version; why it cannot be used


def versions() -> dict[str, str]:
    """For the machine's fingerprint: the version of every peer that can be used here, and why another cannot."""
    found = {}
    for name in peer_names():
        try:
            found[_VERSION + name] = load_peer(name)[1]
        except PeerProblem as err:
            found[_PROBLEM + name] = str(err)
    return found


class Case(OperatorCase):
    """One peer, or one implementation of this project."""

    window_kernel: str | None = None  # flash kernel of the window, for peers without one; None: the fastest
    error_factor: float | None = None  # times an eager run's error that the peer may have; None: it is no peer

    def check(self) -> Agreement:
        """Compare with the oracle. Raises WrongResult."""
        if self.error_factor is None:
            return super().check()
        settings = self.shape, self.torch_dtype, self.torch_device
        agreement = check_operator(self.operator(), *settings, backward=self.backward, seed=self.seed)
        _forget_tuned_choices()
        return agreement

    def operator(self) -> Operator:
        if self.error_factor is None:
            return super().operator()
        peer, nsa = load_peer(self.implementation)[0], self.model.nsa
        return Operator(
            self.implementation,
            peer.semantics(nsa),
            lambda inputs: peer.attend(inputs, nsa, self.window_kernel),
            lambda inputs: _choice(peer, nsa, inputs),
            tie=torch.finfo(self.torch_dtype).eps,
            factor=self.error_factor,
        )


class Spec(LayoutsSpec):
    """Head layouts x lengths x passes x peers, and implementations of this project beside them."""

    kind: Literal["peers"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe
    peers: Annotated[
        list[str],
        Field(min_length=1, description=f"{', '.join(PEERS)}, or one of another distribution"),
        Unique,
        names_among("peer", known=peer_names),
    ]
    implementations: Annotated[list[str], Unique, names_among("implementation", *DENSE_KERNELS)] = Field(
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
        if twice := [name for name in self.peers if name in self.implementations]:
            raise ValueError(f"implementations: {twice[0]!r}: is among the peers, too; name it once")
        # The same fields of NSAConfig act on peers as on the oracle, all but slots; on a dense one none.
        acting = ["dense" if name == "dense-pytorch" else "reference" for name in self.peers]
        if self.window_kernel != "auto" and set(acting) == {"dense"}:
            raise ValueError(f"window_kernel: {self.window_kernel!r}: changes nothing of dense peers; use auto")
        refuse_idle(self, self.nsa, [*acting, *self.implementations], self.dtype)
        return self

    def points(self, machine: Machine) -> Sequence[Point]:
        """Points of the whole grid, shortest lengths first, the peers of each place before this project's."""
        points: list[Point] = []
        kernel = None if self.window_kernel == "auto" else self.window_kernel
        needs = "torch-varlen" if kernel == TORCH_FIXED else kernel  # the same kernel's
        for length, batch, model, layout in self.layouts():
            if needs and (reason := dense_reasons(machine, self.dtype, model.head_dim)[f"dense-{needs}"]):
                raise SpecError(f"window_kernel: {kernel!r}: {reason}; use auto")
            for pass_, name in product(self.passes, self.peers):
                own = {"window_kernel": kernel, "error_factor": self.error_factor}
                case = self.case_of(machine, Case, model, (name, pass_, length, batch), **own)
                points.append(replace(self.point_of(case, machine, layout), skip_reason=_reason_against(case, machine)))
            if self.implementations:
                grid = [length], batch, self.passes, self.implementations
                points += self.grid(machine, Case, model, *grid, layout=layout)
        return points


def _reason_against(case: OperatorCase, machine: Machine) -> str | None:
    """Why a peer cannot compute a case there; None if it can, as far as is known."""
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
    """Compare a peer, or an implementation of this project, with the oracle, and measure its time and memory."""
    beat("import")
    measured = measure_operator(case, beat)
    if case.error_factor is None:
        return measured
    version, claimed = load_peer(case.implementation)[1], case.operator().computes
    what = "dense causal attention" if claimed is None else asdict(claimed)
    about = {"name": case.implementation, "version": version, "computes": what}
    return replace(measured, environment={**measured.environment, "peer": about})


def _choice(peer: Peer, config: NSAConfig, inputs: Mapping[str, Tensor]) -> Tensor:
    """Blocks [B,S,Hkv,n] that the peer chooses, ascending, -1 last."""
    q, k, v = (inputs[key].detach() for key in ("q", "k", "v"))
    blocks, last = peer.select(q, k, v, config).long(), config.slc_blocks(q.shape[1])
    found = blocks.masked_fill((blocks < 0) | (blocks > last), last).sort(-1).values
    return found.masked_fill(found == last, -1).int()


def _forget_tuned_choices() -> None:
    """Have Triton tune each kernel of this process at its next call. It keeps a choice under a key that need not have
    the length and the batch, so that the small call of a check would decide how a large one is computed."""
    if (module := sys.modules.get("triton.runtime.autotuner")) is not None:
        for found in gc.get_objects():
            if issubclass(type(found), module.Autotuner):
                found.cache.clear()
                found.cache_results = False
