"""Passes of a whole model on random tokens: forward, forward and backward, or a step of training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from itertools import product
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from jobs.measure.check import Agreement, check_model
from jobs.schema.point import Axes, Machine, Point
from jobs.specs.fields import NSA, Count, Lengths, Preset, Unique, implementation_names, torch_dtype
from jobs.specs.fit import backend_reasons, does_not_fit, heads_of, refuse_unusable, threads
from jobs.specs.nsa_effect import refuse_idle
from jobs.specs.spec import JobSpec
from jobs.training.optimizer import OptimizerSpec, new_optimizer
from nsa_core import NSAConfig
from nsa_core.memory import MemoryEstimate, estimate_model, predicts
from nsa_core.model import PRESETS, ModelConfig, NSATransformer

Pass = Literal["forward", "forward+backward", "train"]
Implementations = Annotated[list[str], Field(min_length=1), Unique, implementation_names("dense")]


class PassSpec(JobSpec):
    """Lengths x passes x implementations of one model."""

    preset: Preset
    implementations: Implementations
    passes: Annotated[list[Pass], Field(min_length=1), Unique] = Field(
        default=["forward", "forward+backward", "train"], description="train: with AdamW's state and step"
    )
    lengths: Lengths
    batch: Count = 1
    precision: Literal["float32", "bfloat16"] = Field(default="float32", description="bfloat16: autocast; weights stay")
    checkpointing: bool = Field(default=False, description="compute blocks anew in the backward pass, to save memory")
    nsa: NSA | None = Field(default=None, description="None: the preset's")

    @model_validator(mode="after")
    def _each_field_acts(self) -> Self:
        refuse_idle(self, self.nsa, self.implementations, self.precision)
        if self.checkpointing and set(self.passes) == {"forward"}:
            raise ValueError(
                "checkpointing: True: changes nothing of a forward pass; leave it out, or add forward+backward or "
                "train to passes"
            )
        return self

    def points(self, machine: Machine) -> Sequence[Point]:
        """Points of the whole grid, shortest lengths first.

        Raises:
            SpecError: an implementation cannot run on this machine.
        """
        reasons = backend_reasons(machine, torch_dtype(self.precision), heads_of(PRESETS[self.preset]))
        refuse_unusable(self.implementations, reasons | {"dense": None})
        grid = product(sorted(self.lengths), self.passes, self.implementations)
        return [self._point(machine, *coordinates) for coordinates in grid]

    def _point(self, machine: Machine, seq_len: int, pass_: Pass, implementation: str) -> Point:
        model = replace(model_of_preset(self.preset, self.nsa, implementation), checkpointing=self.checkpointing)
        config = {
            "model": asdict(model),
            "implementation": implementation,
            "pass": pass_,
            "seq_len": seq_len,
            "batch": self.batch,
            "precision": self.precision,
            "device": machine.device,
            "seed": self.seed,
            "threads": threads(self, machine),
            **self._own(),
        }
        needed = predicted(config).total if predicts(implementation) else None
        saves = pass_ != "forward" and not self.checkpointing
        advice = "shorten lengths or turn checkpointing on" if saves else "shorten lengths, or lower batch"
        return Point(
            kind=self.kind,
            label=f"{implementation} {pass_} S={seq_len}",
            config=config,
            axes=model_axes(config, model),
            estimate_bytes=needed,
            skip_reason=does_not_fit(needed, self, machine, advice),
        )

    def _own(self) -> dict[str, Any]:
        """Configuration of a point beyond the pass itself."""
        return {}


def model_of_preset(preset: str, nsa: NSAConfig | None, implementation: str) -> ModelConfig:
    """A preset's model whose attention is `implementation`; `nsa` replaces its block sizes, None keeps them."""
    base = PRESETS[preset] if nsa is None else replace(PRESETS[preset], nsa=nsa)
    if implementation == "dense":
        return replace(base, attention="dense", backend="auto")
    return replace(base, attention="nsa", backend=implementation)


def model_axes(config: Mapping[str, Any], model: ModelConfig, **own: Any) -> Axes:
    """Axes of a point that measures a model, from its configuration; `own` adds some or replaces them."""
    known = {
        "implementation": config["implementation"],
        "workload": "model",
        "pass_": config["pass"],
        "seq_len": config.get("seq_len"),
        "batch": config["batch"],
        "query_heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "layers": model.layers,
        "dtype": config["precision"],
        "device": config["device"],
    }
    return Axes(**known | own)


def predicted(config: Mapping[str, Any]) -> MemoryEstimate:
    """Memory that nsa_core.memory predicts for a point's configuration. Raises InputError if it cannot."""
    autocast = None if config["precision"] == "float32" else torch_dtype(config["precision"])
    return estimate_model(
        model_of(config),
        implementation=config["implementation"],
        batch=config["batch"],
        seq_len=config["seq_len"],
        dtype=torch.float32,
        backward=config["pass"] != "forward",
        optimizer="adamw" if config["pass"] == "train" else None,
        device=torch.device(config["device"]),
        autocast=autocast,
    )


def model_of(config: Mapping[str, Any]) -> ModelConfig:
    """The model of a point's configuration."""
    given = dict(config["model"])
    given["nsa"] = NSAConfig(**given["nsa"])
    return ModelConfig(**given)


def agree(config: Mapping[str, Any]) -> Agreement:
    """Compare a small form of a point's model with the oracle. Raises WrongResult."""
    backward = config["pass"] != "forward"
    dtype, device = torch_dtype(config["precision"]), torch.device(config["device"])
    return check_model(
        config["implementation"], model_of(config), dtype, device, backward=backward, seed=config["seed"]
    )


class ModelPass:
    """A model on random tokens, and one pass of it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        if config["threads"] is not None:
            torch.set_num_threads(config["threads"])
        torch.manual_seed(config["seed"])
        self.device = torch.device(config["device"])
        self._pass, self._half = config["pass"], config["precision"] == "bfloat16"
        self.model = NSATransformer(model_of(config)).to(self.device).train(self._pass != "forward")
        size = config["batch"], config["seq_len"] + 1
        tokens = torch.randint(self.model.config.vocab_size, size, device=self.device)
        self.inputs = tokens[:, :-1].clone(), tokens[:, 1:].clone()
        self.parameters = list(self.model.parameters())
        self._optimizer = new_optimizer(self.model, OptimizerSpec(), self.device) if self._pass == "train" else None

    @property
    def state(self) -> list[Tensor]:
        """Tensors of the optimizer on the device; none before its first step."""
        states = self._optimizer.state.values() if self._optimizer is not None else ()
        tensors = (x for state in states for x in state.values() if isinstance(x, Tensor))
        return [x for x in tensors if x.device.type == self.device.type]  # "cuda" is not equal to a tensor's "cuda:0"

    @property
    def resident(self) -> list[Tensor]:
        """Tensors that stay allocated between passes."""
        return [*self.parameters, *self.model.buffers(), *self.state, *self.inputs]

    @property
    def backward(self) -> Callable[[Tensor], None] | None:
        """The pass back from a loss, and the optimizer's step if there is one; None without gradients."""
        return None if self._pass == "forward" else self._backward

    def forward(self) -> Tensor:
        """Loss of the tokens."""
        with torch.set_grad_enabled(self._pass != "forward"), self._precision():
            return self.model(*self.inputs)

    def run(self) -> Tensor:
        """The whole pass; its gradients stay."""
        loss = self.forward()
        if self.backward is not None:
            self.backward(loss)
        return loss

    def gradients(self) -> Iterable[Tensor]:
        """Gradients of the parameters, where there are any."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def clear(self) -> None:
        """Free the gradients."""
        self.model.zero_grad(set_to_none=True)

    def _backward(self, loss: Tensor) -> None:
        loss.backward()
        if self._optimizer is not None:
            self._optimizer.step()

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16) if self._half else nullcontext()
