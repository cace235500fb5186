"""The swap itself: what the new graph looks like, and reports of passes that went wrong elsewhere."""

import math

import pytest
import torch
import torch.nn.functional as F
from checking import assert_bit_equal
from expecttest import assert_expected_inline
from graphs import swaps, traced
from test_inductor_moe import renormalized
from test_inductor_patterns import ALL, NORMS, angles, half, heads_first, run, xhat
from torch.fx import Graph, GraphModule, Interpreter, Node

from torch_deepinfer.inductor.passes import CountPass, SwapPass
from torch_deepinfer.inductor.rewrite import Rewrites
from torch_deepinfer.inductor.settings import parse


def text(graph: Graph) -> str:
    """One line for each node."""

    def show(argument):
        if isinstance(argument, (list, tuple)):
            return "[" + ", ".join(map(show, argument)) + "]"
        return str(argument)

    lines = []
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"return {show(node.args[0])}")
        elif node.op != "placeholder":
            arguments = [*map(show, node.args), *(f"{key}={show(value)}" for key, value in node.kwargs.items())]
            lines.append(
                f"{node.name} = {getattr(node.target, '_opname', node.target.__name__)}({', '.join(arguments)})"
            )
    return "\n".join(lines)


def rewritten(function, *arguments, **options) -> Graph:
    return run(function, *arguments, **options).graphs[0]


# -- the new graph -----------------------------------------------------------------------------------------------------


def test_graph_of_a_block():
    def block(x, residual, weight, router):
        total = residual + x
        normed = NORMS["cast_mul"](total, weight)
        return total, *renormalized(normed @ router, None)

    x, residual = torch.randn(2, 6, 32).bfloat16()
    graph = rewritten(block, x, residual, torch.randn(32).bfloat16(), torch.randn(32, 16).bfloat16())
    assert_expected_inline(
        text(graph),
        """\
add_rms_norm_default = add_rms_norm(arg1_1, arg0_1, arg2_1, 1e-06)
getitem_4 = getitem(add_rms_norm_default, 0)
getitem_5 = getitem(add_rms_norm_default, 1)
mm = mm(getitem_4, arg3_1)
moe_router_default = moe_router(mm, 4, renormalize=True)
getitem_2 = getitem(moe_router_default, 0)
getitem_3 = getitem(moe_router_default, 1)
return [getitem_5, getitem_2, getitem_3]""",
    )


def test_graph_of_a_rotation():
    q, k = torch.randn(2, 5, 4, 16).bfloat16(), torch.randn(2, 5, 2, 16).bfloat16()
    graph = rewritten(heads_first(half), q, k, *angles(5, 16, torch.bfloat16))
    assert_expected_inline(
        text(graph),
        """\
unsqueeze = unsqueeze(arg2_1, 1)
unsqueeze_1 = unsqueeze(arg3_1, 1)
permute_default_2 = permute(unsqueeze, [0, 2, 1, 3])
permute_default_3 = permute(unsqueeze_1, [0, 2, 1, 3])
rotary_embedding_default = rotary_embedding(arg0_1, arg1_1, permute_default_2, permute_default_3)
getitem_4 = getitem(rotary_embedding_default, 0)
permute_default_4 = permute(getitem_4, [0, 2, 1, 3])
getitem_5 = getitem(rotary_embedding_default, 1)
permute_default_5 = permute(getitem_5, [0, 2, 1, 3])
return [permute_default_4, permute_default_5]""",
    )


def test_new_nodes_say_where_they_come_from():
    graph = rewritten(NORMS["cast_mul"], torch.randn(4, 32), torch.randn(32))
    [node] = graph.find_nodes(op="call_function", target=torch.ops.deepinfer.rms_norm.default)
    assert "test_inductor_patterns.py" in node.meta["stack_trace"]
    assert node.meta["val"].shape == (4, 32) and isinstance(node.meta["val"], torch._subclasses.FakeTensor)


# -- reports from elsewhere --------------------------------------------------------------------------------------------


# pytorch#192042: what a pass does must be in its identity.
def test_identity_covers_every_choice():
    def identity(options=None, **environ):
        return SwapPass(parse(options, environ)[0], Rewrites()).uuid()

    default = identity()
    assert default and default == identity() == CountPass(parse(None, {})[0], Rewrites()).uuid()
    choices = [
        {"deepinfer.patterns": "all"},
        {"deepinfer.patterns": ["norm"]},
        {"deepinfer.disable": ["norm"]},
        {"deepinfer.strict": True},
        {"deepinfer.expect": {"rms_norm": 1}},
    ]
    assert len({default, *map(identity, choices), identity(DEEPINFER_DISABLE="moe")}) == 7
    assert identity({"deepinfer.disable": ["moe", "norm"]}) == identity({"deepinfer.disable": ["norm", "moe"]})
    assert torch.__version__ in default


# pytorch#148751, pytorch#137280: users of the first output come before the inputs of the second one.
def test_outputs_with_users_in_between():
    def quantized(x, w):
        normed = NORMS["cast_mul"](x, w)
        scale = normed.abs().amax() * 2.0
        return normed, (normed / scale).clamp(-1, 1), scale

    rewritten(quantized, torch.randn(3, 8), torch.ones(8))

    def early_user(q, k, cos, sin):
        q = half(q, cos, sin)
        used = q.sin()
        k = half(k.exp(), cos, sin)
        return used, k

    graph = rewritten(early_user, torch.randn(2, 5, 16), torch.randn(2, 5, 16), *angles(5, 16, torch.float32))
    assert len(graph.find_nodes(op="call_function", target=torch.ops.deepinfer.rotary_embedding.default)) == 1


def test_input_that_is_computed_from_an_output():
    def circular(x, residual):
        total = x + residual
        weight = total.abs().amax(0)
        return NORMS["cast_mul"](total, weight), total

    compiled = run(circular, torch.randn(4, 32), torch.randn(4, 32))
    assert swaps(compiled.report) == {"rms_norm": 1}
    [reason] = compiled.report.patterns["add_rms_norm"].declined
    assert reason == "one input of the op is computed from one of its outputs"


# vllm#41972: no residual is made up where there is none.
def test_norm_without_residual():
    x, weight = torch.randn(4, 16), torch.randn(16)
    junk = torch.full_like(x, math.nan)
    del junk
    graph = rewritten(NORMS["cast_mul"], x, weight)
    assert not graph.find_nodes(op="call_function", target=torch.ops.deepinfer.add_rms_norm.default)
    zero = torch.zeros_like(x)
    assert_bit_equal(traced(NORMS["cast_mul"], ALL)(x + zero, weight), traced(NORMS["cast_mul"], ALL)(x, weight))


# vllm#50773: two values of a flag never become one op.
def test_two_eps_in_one_graph():
    def two(x):
        return xhat(x, 1e-6), xhat(x, 0.5), xhat(x, 1e-6) * 2

    graph = rewritten(two, torch.randn(4, 16) / 100)
    norms = graph.find_nodes(op="call_function", target=torch.ops.deepinfer.rms_norm.default)
    assert sorted(node.args[2] for node in norms) == [1e-6, 1e-6, 0.5]


# pytorch#182328: what the compiler believes of a result is what the kernel returns.
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.t().contiguous().t(),
        lambda x: x[:, ::2],
        lambda x: x[::2, 8:],
        lambda x: x[:0],
        lambda x: x[:1],
        lambda x: x[:1].expand(3, -1),
    ],
    ids=["contiguous", "transposed", "every other column", "slice", "no rows", "one row", "expanded"],
)
def test_believed_and_real_results_agree(view):
    def block(x, gate):
        total = x + gate
        return total, xhat(total), F.silu(gate) * total, torch.topk(torch.softmax(x.float(), -1), 3, dim=-1)[0]

    x, gate = view(torch.randn(8, 32)), view(torch.randn(8, 32))
    compiled = run(block, x, gate)

    class Compare(Interpreter):
        def run_node(self, node: Node):
            result = super().run_node(node)
            if isinstance(result, torch.Tensor):
                believed = node.meta["val"]
                assert (result.shape, result.dtype) == (believed.shape, believed.dtype), node
                assert result.stride() == believed.stride() or 0 in result.shape, node
            return result

    graph = compiled.graphs[0]
    Compare(GraphModule({}, graph)).run(*compiled.inputs[0])


# vllm-ascend#11006: a varying number of rows stays one graph.
def test_varying_number_of_rows():
    x = torch.randn(300, 32)
    weight, router = torch.randn(32), torch.randn(32, 16)

    def block(x):
        normed = NORMS["cast_mul"](x, weight)
        return normed, *renormalized(normed @ router, None)

    compiled = traced(block, ALL, dynamic=True)
    for rows in (17, 2, 3, 300):
        for ours, eager in zip(compiled(x[:rows]), block(x[:rows]), strict=True):
            torch.testing.assert_close(ours, eager)
    assert len(compiled.graphs) == 1
    for rows in (1, 0):
        assert [out.shape[0] for out in compiled(x[:rows])] == [rows] * 3
    graphs = len(compiled.graphs)
    assert graphs <= 3
    # Older torch spells the softmax of no rows, in the third graph, without its maximum.
    unlike = graphs == 3 and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
    assert swaps(compiled.report) == {"rms_norm": graphs, "moe_router": graphs - unlike}


# torch-harmonics#246: under autocast, in inference mode, with inputs that want gradients.
def test_autocast_and_grad_modes():
    weight, matrix = torch.randn(32, requires_grad=True), torch.randn(32, 32)

    def block(x):
        return NORMS["cast_mul"](x @ matrix, weight)

    x = torch.randn(4, 32)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        ours, eager = traced(block, ALL)(x), block(x)
    assert eager.dtype == torch.float32  # a bf16 product, then an fp32 weight
    assert_bit_equal(ours, eager)
    with torch.inference_mode():
        ours = traced(block, ALL)(x)
        assert ours.is_inference() and not ours.requires_grad
        torch.testing.assert_close(ours, block(x))
    with torch.no_grad():
        compiled = traced(block, ALL)
        assert not compiled(x.clone().requires_grad_()).requires_grad
        assert swaps(compiled.report) == {"rms_norm": 1}


# comfy-kitchen#124: values in the middle are rounded where eager rounds them.
def test_fused_chains_round_as_eager_does():
    gate, up = torch.randn(64, 256).bfloat16(), torch.randn(64, 256).bfloat16()
    fused = (F.silu(gate.float()) * up.float()).abs().amax(-1)
    assert ((F.silu(gate) * up).float().abs().amax(-1) != fused).float().mean() > 0.5
    run(lambda a, b: (F.silu(a) * b).float().abs().amax(-1).bfloat16(), gate, up)
    weight = torch.randn(256).bfloat16()
    for norm in NORMS.values():
        run(lambda x, w, norm=norm: norm(x, w).float().abs().amax(-1).bfloat16(), gate, weight)


# pytorch#151649: reshape and view are the same thing to a pattern.
def test_reshape_and_view():
    def by_group(x):
        grouped = x.reshape(-1, 4, 16).view(4, -1, 16)
        return xhat(grouped).reshape(x.shape)

    assert swaps(run(by_group, torch.randn(8, 32)).report) == {"rms_norm": 1}


# pytorch#198031: a copy that is read and written.
def test_inputs_that_are_overwritten():
    def overwrites(x, weight):
        normed = NORMS["cast_mul"](x, weight)
        x.mul_(2.0)
        return normed, NORMS["cast_mul"](x + 1.0, weight)

    x, weight = torch.randn(4, 32), torch.randn(32)
    ours_x, eager_x = x.clone(), x.clone()
    compiled = traced(overwrites, ALL)
    with torch.no_grad():
        for ours, eager in zip(compiled(ours_x, weight), overwrites(eager_x, weight), strict=True):
            torch.testing.assert_close(ours, eager)
    assert_bit_equal(ours_x, eager_x)
    assert swaps(compiled.report) == {"rms_norm": 2}
