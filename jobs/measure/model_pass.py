"""Passes of a whole model on random tokens: forward, forward and backward, or a step of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from jobs.measure.call import ModelCase
from jobs.measure.check import Agreement, check_model
from jobs.schema.point import Machine, Point
from jobs.specs import fit
from jobs.specs.fields import Batch, Lengths, ModelledSpec, OrDense, Several
from jobs.specs.fit import refuse_idle
from nsa_core.model import NSATransformer

Pass = Literal["forward", "forward+backward", "train"]


class PassCase(ModelCase):
    """A pass of a model with float32 weights; a `dtype` of bfloat16 means autocast."""

    AUTOCAST = True

    def check(self) -> Agreement:
        """Compare a small form of the model with the oracle, and attention at the pass's size. Raises WrongResult."""
        settings = self.torch_dtype, self.torch_device
        agreement = check_model(self.implementation, self.model, *settings, backward=self.backward, seed=self.seed)
        return replace(agreement, rows=self.check_rows())


class ImplementationsSpec(ModelledSpec):
    """A model under several implementations."""

    implementations: OrDense
    precision: Literal["float32", "bfloat16"] = Field(default="float32", description="bfloat16: autocast; weights stay")

    @model_validator(mode="after")
    def _check_effect(self) -> Self:
        refuse_idle(self, self.own_nsa, self.implementations, self.precision)
        return self

    def refuse_unusable(self, machine: Machine) -> None:
        """Raise SpecError if an implementation cannot run on the machine."""
        fit.refuse_unusable(self.implementations, machine, self.precision, self.base, ("dense",))


class PassSpec(ImplementationsSpec):
    """Lengths x passes x implementations of one model."""

    passes: Several[Pass] = Field(
        default=["forward", "forward+backward", "train"], description="train: with AdamW's state and step"
    )
    lengths: Lengths
    batch: Batch = 1
    checkpointing: bool = Field(default=False, description="compute blocks anew in the backward pass, to save memory")

    @model_validator(mode="after")
    def _check_checkpointing(self) -> Self:
        if self.checkpointing and set(self.passes) == {"forward"}:
            raise ValueError(
                "checkpointing: True: changes nothing of a forward pass; leave it out, or add forward+backward or "
                "train to passes"
            )
        return self

    def points(self, machine: Machine) -> Sequence[Point]:
        return self.pass_points(machine, PassCase, timing=getattr(self, "timing", None))

    def pass_points(self, machine: Machine, case_type: type[PassCase], **own: Any) -> Sequence[Point]:
        """Points of the whole grid, shortest lengths first; `own` are fields that the kind's Case adds."""
        self.refuse_unusable(machine)
        points = []
        for seq_len, pass_, implementation in product(sorted(self.lengths), self.passes, self.implementations):
            model = replace(self.base.under(implementation), checkpointing=self.checkpointing)
            place = implementation, pass_, seq_len, self.batch
            case = case_type.of(self, machine, place, dtype=self.precision, model=model, **own)
            saves = case.backward and not self.checkpointing
            advice = "shorten lengths or turn checkpointing on" if saves else "shorten lengths, or lower batch"
            points.append(case.point(self, machine, f"{implementation} {pass_} S={seq_len}", advice))
        return points


class ModelPass:
    """A model on random tokens, and one pass of it."""

    rows = None  # as of FunctionCall

    def __init__(self, case: ModelCase) -> None:
        torch.manual_seed(case.seed)
        self.case, self.device = case, case.torch_device
        weights = torch.float32 if case.AUTOCAST else case.torch_dtype
        self._precision = torch.autocast(self.device.type, case.torch_dtype, enabled=weights != case.torch_dtype)
        self.model = NSATransformer(case.model).to(self.device, weights).train(case.backward)
        tokens = torch.randint(case.model.vocab_size, (case.batch, case.seq_len + 1), device=self.device)
        self.inputs = tokens[:, :-1].clone(), tokens[:, 1:].clone()
        self.parameters = list(self.model.parameters())
        # Its work and its memory matter here, its numbers do not.
        fused = self.device.type == "cuda"
        self._optimizer = torch.optim.AdamW(self.parameters, fused=fused) if case.pass_ == "train" else None

    @property
    def state(self) -> list[Tensor]:
        """Tensors of the optimizer on the device; none before its first step."""
        states = self._optimizer.state.values() if self._optimizer is not None else ()
        tensors = (x for state in states for x in state.values() if isinstance(x, Tensor))
        return [x for x in tensors if x.device.type == self.device.type]  # "cuda" is not equal to a tensor's "cuda:0"

    @property
    def resident(self) -> list[Tensor]:
        return [*self.parameters, *self.model.buffers(), *self.state, *self.inputs]

    def forward(self) -> Tensor:
        """Loss of the tokens."""
        with torch.set_grad_enabled(self.case.backward), self._precision:
            return self.model(*self.inputs)

    def backward(self, loss: Tensor) -> None:
        """The pass back from a loss, and the optimizer's step, as far as the pass has them."""
        if self.case.backward:
            loss.backward()
        if self._optimizer is not None:
            self._optimizer.step()

    def run(self) -> Tensor:
        """The whole pass, without the gradients of an earlier one; its own stay."""
        self.clear()
        loss = self.forward()
        self.backward(loss)
        return loss

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)
