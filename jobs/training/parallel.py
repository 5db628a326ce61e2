"""A model on several ranks: PyTorch's DistributedDataParallel, gradients averaged in place (Replica), or FSDP2.

All begin to average gradients over the ranks while the backward pass of a step's last micro-batch goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from jobs.measure.memory import graph_memory, tensor_bytes
from jobs.training.compute_clock import ComputeClock
from jobs.training.errors import Ineffective
from jobs.training.layout import Layout
from jobs.training.replica import Replica
from nsa_core.model import NSATransformer

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Inductor's. Otherwise it measures which shape of a reduction is fastest, anew or as another process has left it in the
# cache, and as the shape decides the order of the sum, the same training has other bits.
_OPTIONS: dict[str, Any] = {"deterministic": True}


class ParallelModel:
    """A model, its training pass over the layout's ranks, and numbers averaged over them.

    Attributes:
        model: the model; under FSDP2 its parameters are sharded.
        rank: the number of this process; `device` is its device.
        loss_of: the training pass: tokens and targets to the loss of this rank. A compiled one is cut, so that sums of
            gradients overlap the backward pass: by PyTorch's DDPOptimizer at each of DDP's buckets, by Replica once.
    """

    def __init__(
        self,
        model: NSATransformer,
        layout: Layout,
        rank: int,
        device: torch.device,
        *,
        compiled: bool,
        cuda_graphs: bool = False,
    ) -> None:
        self.model = model
        self.layout = layout
        self.rank = rank
        self.clock = ComputeClock(device)
        self._device, self._cuda_graphs = device, cuda_graphs
        self._ddp: DistributedDataParallel | None = None
        self._replica: Replica | None = None
        self._sharded: Any = None  # the model under FSDP2
        if layout.ranks > 1 and layout.parallel == "fsdp":
            self._shard(device, compiled)
            self.loss_of: Callable[..., Tensor] = model
            return
        options = _OPTIONS | ({"triton.cudagraphs": True} if cuda_graphs else {})

        def compile_if_asked(part: Any) -> Any:
            return torch.compile(part, fullgraph=True, dynamic=False, options=options) if compiled else part

        if layout.ranks > 1 and layout.parallel == "replicate":
            self._replica = self.loss_of = Replica(model, layout.ranks, self.clock, compile_if_asked)
            return
        self.loss_of = compile_if_asked(model)
        if layout.ranks > 1:
            self._ddp = self.loss_of = self._distribute(self.loss_of, device)

    @property
    def resident(self) -> int:
        """Bytes of this rank's weights and of DDP's gradient buckets, which stay between steps."""
        weights = tensor_bytes([local(t) for t in (*self.model.parameters(), *self.model.buffers())])
        buckets = tensor_bytes(list(self.model.parameters())) if self._ddp is not None else 0
        return weights + buckets

    def check_effective(self) -> None:
        """Raise Ineffective if the model that was trained did not do what was asked for."""
        if self.model.config.checkpointing and not self.model.checkpointing_effective:
            raise Ineffective("checkpointing: it was asked for, and the model did not do it")
        if self._cuda_graphs and not graph_memory(self._device).held:
            raise Ineffective("cuda_graphs: they were asked for, and PyTorch captured none; the log has its reasons")

    def gathering(self, last: bool) -> AbstractContextManager[object]:
        """Context of one micro-batch's passes: only the step's last one sums gradients over the ranks."""
        if self._ddp is not None and not last:
            return self._ddp.no_sync()
        if self._replica is not None and last:
            return self._replica.averaged()
        if self._sharded is not None:
            self._sharded.set_requires_gradient_sync(last)
        return nullcontext()

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the ranks; every rank gets the same bits."""
        return self.averaging(values)()

    def averaging(self, values: Tensor) -> Callable[[], Tensor]:
        """Start a mean over the ranks; returns a function that gives it. A GPU goes on meanwhile."""
        if self.layout.ranks == 1:
            return lambda: values
        work: Any = dist.all_reduce(values, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return values.div_(self.layout.ranks)

        return wait

    def _distribute(self, module: Any, device: torch.device) -> DistributedDataParallel:
        ddp = DistributedDataParallel(
            module,
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=self.layout.bucket_mb,
            gradient_as_bucket_view=True,
        )
        if self.layout.gradient_compression == "bf16":
            reduce: Callable[..., Any] = default_hooks.bf16_compress_hook
        else:  # gloo cannot average
            reduce = _averaging if dist.get_backend() == "nccl" else default_hooks.allreduce_hook
        ddp.register_comm_hook(dist.group.WORLD, _marking(reduce, self.clock))
        return ddp

    def _shard(self, device: torch.device, compiled: bool) -> None:
        """Shard each block and then the rest. Autocast keeps choosing dtypes, so that results are those of one rank."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # a second of the processor to import

        mesh = init_device_mesh(device.type, (self.layout.ranks,))
        compressed = self.layout.gradient_compression == "bf16"
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if compressed else None, cast_forward_inputs=False)
        for block in self.model.blocks:
            if compiled:  # gathering a block's weights is outside of its graph
                block.compile(fullgraph=True, dynamic=False, options=_OPTIONS)
            fully_shard(block, mesh=mesh, mp_policy=policy)
        self._sharded = fully_shard(self.model, mesh=mesh, mp_policy=policy)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded."""
    return tensor.to_local() if _is_sharded(tensor) else tensor


def clip_gradients(model: nn.Module, highest: float) -> Tensor:
    """Scale the gradients so that the norm of all of them, over all ranks, is at most `highest`; returns the norm."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), highest)
    return norm.full_tensor() if _is_sharded(norm) else norm


def _is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    found = sys.modules.get("torch.distributed.tensor")  # without it nothing is sharded; `_shard` imports it
    return found is not None and isinstance(tensor, found.DTensor)


def _averaging(state, bucket):  # DDP refuses annotations that are texts
    """A communication hook that averages on the way; PyTorch's divides the gradients in a pass of its own before."""
    work: Any = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.AVG, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def _marking(reduce: Callable[..., Any], clock: ComputeClock) -> Callable[..., Any]:
    """A communication hook that marks the moment at which the last bucket is ready."""

    def hook(state, bucket):  # without annotations, as above
        if bucket.is_last():
            clock.gradients_ready()
        return reduce(state, bucket)

    return hook
