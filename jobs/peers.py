"""Other implementations of the operator, run live beside this one: the same inputs, clock and oracle as kind bench.

A peer is called through its adapter (jobs.adapters), at the head layouts, lengths and passes of a bench. It is compared
with the oracle of the semantics that it claims before it is timed. One that cannot run is skipped, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from torch import Tensor

from jobs.adapters import Peer, PeerProblem, find_peer, load_peer, peer_names
from jobs.adapters.check import check_peer, forget_tuned_choices
from jobs.adapters.packages import TORCH_FIXED
from jobs.measure.call import FunctionCall, measure_call
from jobs.measure.check import DENSE_KERNELS, Agreement
from jobs.measure.operator import OPERATOR_QUANTITIES, LayoutsSpec, OperatorCase, measure_operator
from jobs.schema.plain_text import error_in_a_line
from jobs.schema.point import Beat, Machine, Measurement, Point
from jobs.schema.quantities import TELEMETRY
from jobs.specs.fields import Unique, implementation_names, torch_dtype
from jobs.specs.fit import dense_reasons
from jobs.specs.nsa_effect import refuse_idle
from jobs.specs.spec import SpecError
from nsa_core import NSAConfig

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


def _check_names(names: list[str]) -> list[str]:
    known = peer_names()
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is no peer; use {', '.join(known)}")
    return names


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
    peers: Annotated[list[str], Field(min_length=1), Unique, AfterValidator(_check_names)]
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
