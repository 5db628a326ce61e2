"""The kernels as PyTorch's operators, in Triton's interpreter: schemas, compiled calls, gradients of some inputs."""

from dataclasses import replace

import pytest
import torch
from kernel_interpreter import MARKS, config, interpreted, run

from nsa_core import PRESETS, NSATransformer, nsa_attention
from nsa_core.functional import compress
from nsa_core.kernels.runtime.launch import handed_to, observe
from nsa_core.packed_sequences import Packing, document_bounds

__all__ = ["config", "interpreted"]  # fixtures

pytestmark = MARKS


def operator_calls(case, config):
    """Every operator with arguments as the model gives them, call included: (operator, arguments)."""
    from nsa_core.kernels import operators

    sizes = operators._sizes(config)
    q, k, v, gates = (x.detach() for x in case.leaves)
    k_cmp, v_cmp = operators._compress_operator(k, v, None, sizes)
    pairs, call = [k_cmp, v_cmp, k, v], ("cmp,slc,win", sizes, config.slots, 0, 0.25, True, False, True, True, True, 0)
    out, *saved = operators._attend_operator(q, gates, None, None, pairs, *call)
    chosen = operators._select_operator(q, k_cmp, None, sizes, 0, 0.25, 0)
    leaf = [x.clone().requires_grad_() for x in (q, gates, *pairs)]
    return [
        (torch.ops.nsa_core.attend, (leaf[0], leaf[1], None, None, leaf[2:], *call)),
        (
            torch.ops.nsa_core.attend,
            (q, gates[..., :1].contiguous(), chosen, None, [k, v], "slc", *call[1:5], False, False, *call[7:]),
        ),
        (torch.ops.nsa_core.attend, (leaf[0], leaf[1], None, None, leaf[4:], *call[:6], True, *call[7:])),
        (torch.ops.nsa_core.attend, (q, gates, None, None, pairs, *call[:7], False, *call[8:])),
        (torch.ops.nsa_core.attend_backward, (out, q, gates, None, pairs, saved, *call)),
        (torch.ops.nsa_core.compress, (leaf[4], leaf[5], None, sizes)),
        (torch.ops.nsa_core.compress_backward, (k_cmp, v_cmp, None, k.shape[1], sizes)),
        (torch.ops.nsa_core.select, (q, k_cmp, None, sizes, 0, 0.25, 0)),
    ]


def test_operators_are_what_their_schemas_and_fake_implementations_say(make_case, config):
    """Shapes, dtypes, strides and gradients, traced and not, of rows with and without a choice of blocks."""
    for operator, arguments in operator_calls(make_case(70, 4, 2), config):
        torch.library.opcheck(operator.default, arguments, test_utils="test_schema")
        with handed_to(lambda launch: None):  # of the kernels' results, shapes alone count
            tests = ("test_faketensor", "test_autograd_registration")
            torch.library.opcheck(operator.default, arguments, test_utils=tests)


def test_one_graph_serves_all_lengths_with_the_same_bits(make_case, config):
    from torch._dynamo.testing import CompileCounterWithBackend

    graphs = CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()

    @torch.compile(fullgraph=True, dynamic=True, backend=graphs)
    def call(*leaves):
        return nsa_attention(*leaves, config, backend="triton")

    case = make_case(70, 4, 2)
    out = call(*case.leaves)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    got = [out, *torch.autograd.grad(out, case.leaves, weights)]
    for ours, eager in zip(got, run(case.leaves, config, "triton"), strict=True):
        assert torch.equal(ours, eager)
    with handed_to(lambda launch: None):
        for tokens in (90, 128, 300):
            leaves = make_case(tokens, 4, 2).leaves
            out = call(*leaves)
            out.sum().backward()
            assert out.shape == leaves[0].shape
    assert graphs.frame_count == 1


def test_a_compiled_call_with_keys_of_its_own_for_each_branch_has_the_same_bits(make_case, config):
    """Compressed keys and values are given, as by the layer."""

    def call(q, k, v, gates):
        keys, values, made = (k, 2 * k, 3 * k), (v, 2 * v, 3 * v), [compress(x, config) for x in (k, v)]
        return nsa_attention(q, keys, values, gates, config, k_cmp=made[0], v_cmp=made[1], backend="triton")

    case = make_case(70, 4, 2)
    torch.compiler.reset()
    out = torch.compile(call, fullgraph=True, backend="aot_eager")(*case.leaves)
    assert torch.equal(out, call(*case.leaves))


def test_packed_sequences_are_one_graph_which_checks_their_bounds(make_case, config):
    leaves = [x[0].detach() for x in make_case(70, 2, 1).leaves]

    def call(cu_seqlens):
        return nsa_attention(*leaves, config, cu_seqlens=cu_seqlens, max_seqlen=46, backend="triton")

    torch.compiler.reset()
    compiled, bounds = torch.compile(call, fullgraph=True, backend="aot_eager"), torch.tensor([0, 3, 23, 24, 70])
    assert torch.equal(compiled(bounds), call(bounds))
    with pytest.raises(RuntimeError, match="cu_seqlens: give an int32 tensor that ascends"):
        compiled(torch.tensor([0, 23, 3, 24, 70]))


def test_a_model_trains_on_packed_documents_of_any_lengths_by_one_graph():
    from torch._dynamo.testing import CompileCounterWithBackend

    graphs = CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    model = NSATransformer(replace(PRESETS["tiny"], layers=1, backend="triton")).train()
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=graphs)
    tokens, targets = torch.randint(1, 256, (2, 1, 64))
    for ends in ([30], [2, 20, 40]):
        with_ends = tokens.index_fill(1, torch.tensor(ends), 0)
        packing = Packing.of(document_bounds(with_ends, 0), 64, tokens.device, model.config.nsa)
        expected, got = model(with_ends, targets, packing), compiled(with_ends, targets, packing.for_compiled(64))
        torch.testing.assert_close(got, expected)
    got.backward()
    assert graphs.frame_count == 1


def test_gradients_of_some_inputs_alone(make_case, config):
    """Gradients of some inputs have the bits of a call for all, and no kernel runs that none of them needs."""
    case = make_case(70, 2, 1)
    _, *expected = run(case.leaves, config, "triton")

    def call(*leaves):
        return nsa_attention(*leaves, config, backend="triton")

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    of_q, of_kv = {"_span_backward_q", "_sum_dq"}, {"_span_backward_kv", "_spread"}
    for wanted, calls, missing in (((0,), [call], of_kv), ((1,), [call, compiled], of_q), ((2, 3), [call], of_q)):
        given = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(case.leaves)]
        for made in calls:
            with observe() as started:
                out = made(*given)
                weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
                got = torch.autograd.grad(out, [given[i] for i in wanted], weights)
            assert all(torch.equal(ours, expected[i]) for i, ours in zip(wanted, got, strict=True)), (wanted, made)
            assert not missing & {one.kernel for one in started}


def test_a_second_derivative_is_refused(make_case, config):
    case = make_case(40, 2, 1)
    out = nsa_attention(*case.leaves, config, backend="triton")
    for loss in (out.square().sum(), out.sum()):  # also where nothing else makes dq require a gradient
        (dq,) = torch.autograd.grad(loss, case.leaves[0], create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative; use backend"):
            dq.sum().backward()
