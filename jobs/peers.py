"""Other implementations of the operator, run live beside this one: the same inputs, clock and oracle as kind bench.

A peer is called through its adapter (jobs.adapters), at the head layouts, lengths and passes of a bench. It is compared
with the oracle of the semantics that it claims before it is timed. One that cannot run is skipped, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import AfterValidator, Field, model_validator
from torch import Tensor

from jobs.adapters import Peer, PeerProblem, find_peer, in_words, load_peer, peer_names
from jobs.adapters.check import check_peer
from jobs.adapters.shared import TORCH_FIXED
from jobs.adapters.tuning import forget_tuned_choices
from jobs.measure.case import PointCase
from jobs.measure.check import DENSE_KERNELS, HeadShape, make_inputs
from jobs.measure.operator import OPERATOR_QUANTITIES, OperatorCase, differentiated, measure_call, measure_operator
from jobs.measure.sweep import LayoutsSpec, Sweep, in_a_case
from jobs.schema.point import Beat, Machine, Measurement, Point
from jobs.schema.quantities import TELEMETRY
from jobs.specs.fields import Unique, implementation_names, torch_dtype
from jobs.specs.fit import dense_reasons, threads
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


def _known(names: list[str]) -> list[str]:
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


class Spec(LayoutsSpec):
    """Head layouts x lengths x passes x peers, and implementations of this project beside them."""

    kind: Literal["peers"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe
    peers: Annotated[list[str], Field(min_length=1), Unique, AfterValidator(_known)]
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
    def _told_apart(self) -> Self:
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
        found: list[Point] = []
        for length, sweep in self.sweeps(machine):
            found += [self._point(sweep, length, pass_, name) for pass_ in self.passes for name in self.peers]
            found += sweep.points([length], self.passes, self.implementations) if self.implementations else []
        return [in_a_case(point) for point in found]

    def _point(self, sweep: Sweep, length: int, pass_: str, name: str) -> Point:
        machine, model = sweep.machine, sweep.model
        case = PeerCase(
            workload=sweep.workload,
            implementation=name,
            seq_len=length,
            batch=sweep.batch,
            dtype=sweep.dtype,
            device=machine.device,
            seed=self.seed,
            threads=threads(self, machine),
            model=model,
            timing=sweep.timing,
            backward=pass_ == "forward+backward",
            window_kernel=self._window_kernel(machine, model.head_dim),
            error_factor=self.error_factor,
        )
        return Point(
            kind="peers",
            label=f"{name} {pass_} S={length}",
            config=case.to_config(),
            axes=case.axes(pass_),
            skip_reason=_reason_against(case, machine),
        )

    def _window_kernel(self, machine: Machine, head_dim: int) -> str | None:
        """Name of the kernel; None for the fastest. Raises SpecError if the machine cannot run it."""
        if self.window_kernel == "auto":
            return None
        needs = "torch-varlen" if self.window_kernel == TORCH_FIXED else self.window_kernel  # the same kernel's
        reason = dense_reasons(machine, torch_dtype(self.dtype), head_dim)[f"dense-{needs}"]
        if reason is not None:
            raise SpecError(f"window_kernel: {self.window_kernel!r}: {reason}; use auto")
        return self.window_kernel


def _reason_against(case: PeerCase, machine: Machine) -> str | None:
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
        return f"its adapter cannot say whether it computes this ({in_words(err)}); mend or uninstall it"
    return None if reason is None else str(reason)


@dataclass(frozen=True)
class PeerCase(PointCase):
    """A point's configuration: one peer, pass and length.

    Attributes:
        backward: whether gradients are computed too.
        window_kernel: flash kernel of the window, for peers without one; None: the fastest.
        error_factor: multiple of an eager run's error against the oracle that the peer may have.
    """

    backward: bool
    window_kernel: str | None
    error_factor: float

    @property
    def shape(self) -> HeadShape:
        return HeadShape.of(self.model)

    def _used(self) -> tuple[str, ...]:
        return ("heads", "kv_heads", "head_dim", "nsa")


def measure(config: Mapping[str, Any], beat: Beat) -> Measurement:
    """Compare a peer, or an implementation of this project, with the oracle, and measure its time and memory.

    Raises:
        PeerProblem: the peer cannot be used here.
        WrongResult: it disagrees with the oracle.
        torch.OutOfMemoryError, RuntimeError: memory ran out (device; host).
    """
    if "error_factor" not in config["case"]:
        return measure_operator(OperatorCase.from_config(config["case"]), beat)
    case = PeerCase.from_config(config["case"])
    name, device = case.implementation, case.start()
    beat("import")
    peer, version = load_peer(name)
    beat("check")
    agreement = check_peer(
        name, peer, case.model.nsa, case.shape, case.torch_dtype, device,
        backward=case.backward, seed=case.seed, window_kernel=case.window_kernel, factor=case.error_factor,
    )  # fmt: skip
    forget_tuned_choices()
    beat("inputs")
    measured = measure_call(case, agreement, *_call(case, peer, device), beat)
    claimed = peer.semantics(case.model.nsa)
    what = "dense causal attention" if claimed is None else asdict(claimed)
    told = {"name": name, "version": version, "computes": what}
    return replace(measured, environment={**measured.environment, "peer": told})


def _call(case: PeerCase, peer: Peer, device: torch.device) -> tuple[Callable[[], object], list[Tensor]]:
    """A call of the peer, and the tensors that stay allocated between calls; inputs as in kind bench."""
    inputs = make_inputs(case.shape, case.batch, case.seq_len, case.torch_dtype, device, case.seed, case.backward)
    if peer.semantics(case.model.nsa) is None:
        del inputs["gates"]

    def attend() -> Tensor:
        return peer.attend(inputs, case.model.nsa, case.window_kernel)

    if not case.backward:
        return torch.no_grad()(attend), [*inputs.values()]
    return differentiated(attend, inputs, case.seed)
