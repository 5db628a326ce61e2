"""A model on several ranks: PyTorch's DistributedDataParallel, gradients averaged in place (Replica), or FSDP2.

All begin to average gradients over the ranks while the backward pass of a step's last micro-batch goes on.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from jobs.measure.memory import graph_memory
from jobs.training.case import Layout
from jobs.training.errors import Ineffective
from nsa_core.model import NSATransformer

# Inductor's. Otherwise it measures which shape of a reduction is fastest, anew or as another process has left it in the
# cache, and as the shape decides the order of the sum, the same training has other bits.
_OPTIONS: dict[str, Any] = {"deterministic": True}

_SHARE = 6  # one block in so many comes before Replica's cut: their backward pass lasts about as long as an average


class ParallelModel:
    """A model, its training pass over the layout's ranks, and numbers averaged over them.

    The pass, `loss_of`, takes tokens and targets to the loss of this rank. A compiled one is cut, so that sums of
    gradients overlap the backward pass: by PyTorch's DDPOptimizer at each of DDP's buckets, by Replica once.
    """

    def __init__(
        self, model: NSATransformer, layout: Layout, device: torch.device, *, compiled: bool, cuda_graphs: bool = False
    ) -> None:
        self.model, self.layout = model, layout
        # When the step began, by whoever begins it, and when its last gradients were ready to be summed: never on one
        # rank and under FSDP2.
        self.marks: list[Any] = []
        self._device, self._cuda_graphs = device, cuda_graphs
        self.ddp: DistributedDataParallel | None = None
        self._replica: Replica | None = None
        self._sharded: Any = None  # the model under FSDP2
        options = _OPTIONS | ({"triton.cudagraphs": True} if cuda_graphs else {})

        def compile_if_asked(part: Any) -> Any:
            return torch.compile(part, fullgraph=True, dynamic=False, options=options) if compiled else part

        if layout.ranks == 1:
            self.loss_of: Callable[..., Tensor] = compile_if_asked(model)
        elif layout.parallel == "fsdp":
            self._shard(compiled)
            self.loss_of = model
        elif layout.parallel == "replicate":
            self._replica = self.loss_of = Replica(model, layout.ranks, device, self.marks, compile_if_asked)
        else:
            self.ddp = self.loss_of = DistributedDataParallel(
                compile_if_asked(model),
                device_ids=[device.index] if device.type == "cuda" else None,
                bucket_cap_mb=layout.bucket_mb,
                gradient_as_bucket_view=True,
            )
            self.ddp.register_comm_hook(dist.group.WORLD, self._sum_bucket)

    def _shard(self, compiled: bool) -> None:
        """Shard each block and then the rest. Autocast keeps choosing dtypes, so that results are those of one rank."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # a second of the processor to import

        mesh = init_device_mesh(self._device.type, (self.layout.ranks,))
        compressed = self.layout.gradient_compression == "bf16"
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if compressed else None, cast_forward_inputs=False)
        for block in self.model.blocks:
            if compiled:  # gathering a block's weights is outside of its graph
                block.compile(fullgraph=True, dynamic=False, options=_OPTIONS)
            fully_shard(block, mesh=mesh, mp_policy=policy)
        self._sharded = fully_shard(self.model, mesh=mesh, mp_policy=policy)

    # A hook of DDP, which refuses annotations that are texts.
    def _sum_bucket(self, state, bucket):
        if bucket.is_last():
            self.marks[1:] = [mark(self._device)]
        if self.layout.gradient_compression == "bf16":
            return default_hooks.bf16_compress_hook(state, bucket)
        if dist.get_backend() != "nccl":  # gloo cannot average
            return default_hooks.allreduce_hook(state, bucket)
        # NCCL averages on the way; PyTorch's hook divides the gradients in a pass of its own before.
        work: Any = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.AVG, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def check_effective(self) -> None:
        """Raise Ineffective if the model that was trained did not do what was asked for."""
        if self.model.config.checkpointing and not self.model.checkpointing_effective:
            raise Ineffective("checkpointing: it was asked for, and the model did not do it")
        if self._cuda_graphs and not graph_memory(self._device)[0]:
            raise Ineffective("cuda_graphs: they were asked for, and PyTorch captured none; the log has its reasons")

    def gathering(self, last: bool) -> AbstractContextManager[object]:
        """Context of one micro-batch's passes: only the step's last one sums gradients over the ranks."""
        if self.ddp is not None and not last:
            return self.ddp.no_sync()
        if self._replica is not None and last:
            return self._replica.averaged()
        if self._sharded is not None:
            self._sharded.set_requires_gradient_sync(last)
        return nullcontext()

    def averaged(self, values: Tensor) -> Tensor:
        """Mean over the ranks, in place; all get the same bits."""
        if self.layout.ranks > 1:
            dist.all_reduce(values)
        return values.div_(self.layout.ranks)


class Replica:
    """A model that every rank has whole, without DistributedDataParallel: gradients are averaged where they lie.

    DDP copies every gradient to a bucket and back. Here the pass, tokens and targets [B,S] to the rank's loss, is cut
    once, after the first blocks: as soon as the backward pass has left the later ones, their gradients are averaged
    while the first blocks' are computed. The weights are the first rank's from the start. `marks`, of ParallelModel,
    gets the second when the last gradients are ready to be averaged; `compiled` compiles a part of the pass, if asked.
    """

    def __init__(
        self,
        model: NSATransformer,
        ranks: int,
        device: torch.device,
        marks: list[Any],
        compiled: Callable[[Any], Callable[..., Tensor]],
    ) -> None:
        depth = max(1, len(model.blocks) // _SHARE)
        self._lower = compiled(lambda tokens, *bounds: model.lower(tokens, depth, *bounds))
        self._upper = compiled(lambda hidden, targets, *bounds: model.upper(hidden, depth, targets, *bounds))
        lower = {id(weight) for part in (model.embedding, *model.blocks[:depth]) for weight in part.parameters()}
        self._first = [weight for weight in model.parameters() if id(weight) in lower]  # a tied head is the embedding
        self._later = [weight for weight in model.parameters() if id(weight) not in lower]
        self._ranks, self._device, self._marks = ranks, device, marks
        self._averages = dist.get_backend() == "nccl"  # on the way, which gloo cannot
        self._averaging = False
        self._under_way: list[Any] = []
        with torch.no_grad():
            for weight in model.parameters():
                dist.broadcast(weight, 0)

    def __call__(self, tokens: Tensor, targets: Tensor, *bounds: Tensor) -> Tensor:
        hidden = self._lower(tokens, *bounds)
        if self._averaging and hidden.grad_fn is not None:
            # PyTorch's engine accumulates gradients as soon as they are there, before it goes on to this node.
            hidden.grad_fn.register_prehook(lambda _: self._start(self._later))
        return self._upper(hidden, targets, *bounds)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context of a forward and backward pass, at whose end the gradients are averages over the ranks."""
        self._averaging = True
        try:
            yield
        finally:
            self._averaging = False
        self._marks[1:] = [mark(self._device)]
        self._start(self._first)
        for work in self._under_way:
            work.wait()
        self._under_way.clear()
        if not self._averages:
            for weight in (*self._first, *self._later):
                if weight.grad is not None:
                    weight.grad /= self._ranks

    def _start(self, weights: Sequence[Parameter]) -> None:
        """Start the sum, or NCCL's average, of the weights' gradients as one operation."""
        how = dist.ReduceOp.AVG if self._averages else dist.ReduceOp.SUM
        with dist._coalescing_manager(async_ops=True) as work:  # pyright: ignore[reportPrivateImportUsage] - as FSDP2
            for weight in weights:
                if weight.grad is not None:
                    dist.all_reduce(weight.grad, how)
        self._under_way.append(work)


def mark(device: torch.device) -> Any:
    """The present place in a device's work: an event on the current stream, for which nothing waits, or seconds."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded."""
    part = getattr(tensor, "to_local", None)
    return tensor if part is None else part()
