"""torch.compile on a CUDA device: training with the Triton kernels is one graph with the results of eager mode."""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from travelling import travelled

from jobs.measure.memory import measure_peak
from jobs.schema.point import Machine
from jobs.train import Spec, measure
from nsa_core.kernels.runtime.launch import observe
from nsa_core.loss import head_cross_entropy
from nsa_core.model import PRESETS, NSATransformer
from nsa_core.packed_sequences import Packing, document_bounds
from nsa_core.routes import capture

MODEL = replace(PRESETS["m7c_125m"], layers=1, vocab_size=512, backend="triton")


def step(model, compiled, length=1500):
    """Loss, gradients and routes; beyond 1,024 tokens there are blocks to choose."""
    torch.compiler.reset()
    tokens = torch.randint(512, (2, length), generator=torch.Generator().manual_seed(0)).cuda()
    call = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model
    with capture() as runs:
        loss = call(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()], runs


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_compiled_step_is_the_eager_one(checkpointing):
    """In float32, where rounding does not change the choice of blocks."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = NSATransformer(replace(MODEL, checkpointing=checkpointing)).cuda().train()
        found.append(step(model, compiled))
    (loss, eager, ran), (again, ours, noted) = found
    assert noted == ran
    torch.testing.assert_close(again, loss)
    for got, want in zip(ours, eager, strict=True):
        assert (got - want).norm() < 0.01 * want.norm()


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_packed_documents_of_any_lengths_are_one_graph_with_the_eager_steps(attention):
    graphs = CompileCounterWithBackend("inductor")
    torch.compiler.reset()
    torch.manual_seed(0)
    model = NSATransformer(replace(MODEL, attention=attention, checkpointing=True)).cuda().train()
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=graphs)
    tokens, targets = torch.randint(1, 512, (2, 2, 2048), generator=torch.Generator().manual_seed(0))
    for ends in ([700], [5, 40, 1500], [100, 200, 300, 1990]):
        with_ends = tokens.index_fill(1, torch.tensor(ends), 0)
        packing = Packing.of(document_bounds(with_ends, 0), tokens.numel(), torch.device("cuda"), model.config.nsa)
        gradients = []
        for call, packed in ((model, packing), (compiled, packing.for_compiled(2048))):
            model.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                call(with_ends.cuda(), targets.cuda(), packed).backward()
            gradients.append([p.grad for p in model.parameters()])
        for got, want in zip(*reversed(gradients), strict=True):
            assert (got - want).norm() < 0.05 * want.norm()
    assert graphs.frame_count == 1


def test_autocast_is_one_graph_too():
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = NSATransformer(MODEL).cuda().train()
        with torch.autocast("cuda", torch.bfloat16):
            loss, gradients, _ = step(model, compiled)
        losses.append(loss)
        assert all(x.isfinite().all() for x in gradients)
    torch.testing.assert_close(*losses, rtol=1e-3, atol=0)


def test_compiled_training_in_half_precision_is_as_near_as_an_eager_one():
    """Heads, SwiGLU and the loss have kernels here. All blocks are selected: rounding cannot change the choice."""
    gradients = []
    for dtype, compiled in ((None, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        torch.manual_seed(0)
        model = NSATransformer(MODEL).cuda().train()
        torch.nn.init.normal_(model.blocks[0].attention.gate_proj.bias)
        with observe() as started, torch.autocast("cuda", dtype, enabled=dtype is not None):
            gradients.append(step(model, compiled, 900)[1])
        ran, own = {one.kernel for one in started}, {"_heads", "_mean", "_swiglu", "_swiglu_backward", "_cross_entropy"}
        assert own <= ran if compiled else own.isdisjoint(ran)
    for exact, eager, ours in zip(*gradients, strict=True):
        assert (ours - exact).norm() <= 2 * (eager - exact).norm()


def test_the_compiled_loss_holds_the_logits_of_two_chunks():
    """The compiler must not take those of all chunks first."""
    torch.compiler.reset()
    x = torch.randn(8 * 1024, 256, device="cuda", requires_grad=True)
    weight = torch.randn(50_304, 256, device="cuda", requires_grad=True)
    targets = torch.zeros(len(x), dtype=torch.long, device="cuda")
    compiled = torch.compile(
        lambda: head_cross_entropy(torch.nn.functional.silu(x), weight, targets, 1024), fullgraph=True, dynamic=False
    )

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            compiled().backward()
        x.grad = weight.grad = None

    step()
    chunk = 1024 * 50_304 * 2
    assert measure_peak(step, torch.device("cuda"), 0).extra < 3 * chunk + 4 * weight.nbytes


def train(**changes):
    """Metrics of a short compiled training, by name."""
    settings = {"precision": "bfloat16", "compile": True, "device": "cuda", "data": {"heldout_batches": 1}}
    sizes = {"seq_len": 1024, "batch": 4, "steps": 12}
    spec = Spec.model_validate({"kind": "train", "name": "compiled", **settings, **sizes, **changes})
    (point,) = spec.points(Machine("cuda", "card", 2**36))
    return {metric.name: metric for metric in measure(travelled(point), lambda *_: None).metrics}


def test_a_training_by_cuda_graphs_has_the_same_losses_and_its_memory_is_counted():
    plain, replayed = train(), train(cuda_graphs=True)
    assert replayed["loss"].samples == pytest.approx(plain["loss"].samples, rel=1e-3)
    assert replayed["peak_memory"].value > 0.9 * plain["peak_memory"].value, "activations of a replay count"


@pytest.mark.parametrize("graphs", [False, True])
def test_a_compiled_training_repeats_its_bits(graphs):
    """Ours; the fused kernels of dense attention add its gradients up in any order."""
    first, second = (train(attention=["nsa"], cuda_graphs=graphs, steps=40) for _ in range(2))
    assert first["loss"].samples == second["loss"].samples
    assert first["heldout_loss"].value == second["heldout_loss"].value
