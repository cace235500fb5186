"""Graphs that hold a pattern, with one random change each: whatever is swapped then, the values stay.

This is the list of near misses that nobody thought of. A mutant that is not a valid program any more is skipped.
"""

import copy
import operator
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import traced
from test_inductor_attention import attention
from test_inductor_attention import inputs as attention_inputs
from test_inductor_batched_experts import batched_experts
from test_inductor_dense_experts import dense_experts
from test_inductor_dense_experts import inputs as dense_expert_inputs
from test_inductor_masks import attention as masked_attention
from test_inductor_masks import indexed
from test_inductor_masks import inputs as masked_inputs
from test_inductor_mla_rope import assigned, cats, latent
from test_inductor_mla_rope import inputs as latent_inputs
from test_inductor_moe import (
    EXPERTS,
    K,
    cast_back,
    expert_inputs,
    experts,
    gpt_oss,
    in_order,
    limited,
    limited_by_maximum,
    logits_of,
    renormalized,
    sigmoid_bias,
    topk_softmax,
)
from test_inductor_patterns import NORMS, angles, half, heads_first, interleaved_to_half, pairs, partial, split
from test_inductor_qk_norm_rope import norm_then_swap
from test_inductor_rope_cache import inputs as step_inputs
from test_inductor_rope_cache import step
from test_inductor_sinks import sinks_of
from test_inductor_sinks import spelled as spelled_sinks
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from torch_deepinfer.inductor.rewrite import rewrite
from torch_deepinfer.inductor.settings import parse

pytestmark = pytest.mark.usefixtures("one_thread")

aten = torch.ops.aten
SETTINGS, _ = parse({"deepinfer.patterns": "all"})

REPLACEMENTS = [
    (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
    (aten.rsqrt.default, aten.sqrt.default, aten.exp.default, aten.neg.default, aten.sigmoid.default, aten.abs.default),
    (aten.amax.default, aten.amin.default),
    (aten.sum.dim_IntList, aten.mean.dim),
    (aten.clamp_min.default, aten.clamp_max.default),
]


class Keep(CustomGraphPass):
    """Keeps a copy of the graph that our pass sees."""

    def __call__(self, graph: Graph) -> None:
        self.graph = copy.deepcopy(graph)

    def uuid(self) -> str:
        return "keep"


def joint_graph(function: Callable[..., Any], *arguments: Any) -> tuple[Graph, tuple[torch.Tensor, ...]]:
    """What our pass sees, and its inputs; every top-k sorted, so that its order is something to compare."""
    keep = Keep()
    compiled = traced(function, {"deepinfer.disable": "all", "joint_custom_pre_pass": keep})
    with torch.no_grad():
        compiled(*arguments)
    for topk in keep.graph.find_nodes(op="call_function", target=aten.topk.default):
        topk.args = topk.args[:4]
    return keep.graph, compiled.inputs[0]


def mutate(graph: Graph, choose: random.Random) -> str:
    """Changes one thing about one node, and says what."""
    nodes = [node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    node = choose.choice(nodes)
    kind = choose.choice(["constant", "constant", "operand", "operand", "swap", "op", "output"])
    before = str(node.args)
    if kind == "constant":
        places = [i for i, arg in enumerate(node.args) if not isinstance(arg, Node) and arg is not None]
        if not places:
            return ""
        place = choose.choice(places)
        node.update_arg(place, other_constant(node.args[place], choose))
    elif kind == "operand":
        places = [i for i, arg in enumerate(node.args) if isinstance(arg, Node)]
        earlier = [other for other in graph.nodes if other < node and other.op != "output"]
        if not places:
            return ""
        place = choose.choice(places)
        alike = [other for other in earlier if looks_like(other, node.args[place]) and other is not node.args[place]]
        if not alike:
            return ""
        node.update_arg(place, choose.choice(alike))
    elif kind == "swap":
        if len(node.args) < 2 or not isinstance(node.args[1], Node):
            return ""
        node.args = (node.args[1], node.args[0], *node.args[2:])
    elif kind == "op":
        rows = [row for row in REPLACEMENTS if node.target in row]
        if not rows:
            return ""
        node.target = choose.choice([target for target in rows[0] if target is not node.target])
    else:
        if not isinstance(node.meta["val"], torch.Tensor):
            return ""
        [output] = graph.find_nodes(op="output")
        output.args = ([*output.args[0], node],)
    return f"{kind} of {node.format_node()}, was {before}"


def looks_like(a: Node, b: Node) -> bool:
    x, y = a.meta.get("val"), b.meta.get("val")
    return isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and (x.shape, x.dtype) == (y.shape, y.dtype)


def other_constant(value: Any, choose: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return choose.choice([value + 1, value - 1, 0, 1, -value])
    if isinstance(value, float):
        return choose.choice([value * 2, -value, 0.0, value + 1.0])
    if isinstance(value, (list, tuple)) and value:
        place = choose.randrange(len(value))
        return [other_constant(v, choose) if i == place and not isinstance(v, Node) else v for i, v in enumerate(value)]
    return value


def outcome(module: GraphModule, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """The results, and what the inputs are then: caches are written."""
    given = copy.deepcopy(inputs)
    return [*Interpreter(module).run(*given), *given]


def is_tied(module: GraphModule, inputs: tuple[torch.Tensor, ...]) -> bool:
    """Whether some top-k has equal candidates: which of them is taken is then free."""

    class Check(Interpreter):
        tied = False

        def run_node(self, node: Node) -> Any:
            result = super().run_node(node)
            if node.target is aten.topk.default:
                values, k = self.fetch_args_kwargs_from_env(node)[0][:2]
                ordered = values.float().nan_to_num(1e30).sort(-1, descending=True).values[..., : k + 1]
                self.tied |= bool(((ordered[..., 1:] - ordered[..., :-1]).abs() < 1e-6).any())
            return result

    check = Check(module)
    check.run(*copy.deepcopy(inputs))
    return check.tied


def reads_past_its_end(graph: Graph) -> bool:
    """Whether attention has fewer keys than values, or other heads than queries: torch's kernel does not look."""
    for node in graph.find_nodes(op="call_function", target=aten._scaled_dot_product_flash_attention_for_cpu.default):
        query, key, values = (argument.meta["val"].shape for argument in node.args[:3])
        if key != values or query[:2] != key[:2] or query[3] != key[3]:
            return True
    return False


def q_and_k(rotate):
    cos, sin = angles(5, 16, torch.float32)
    return heads_first(rotate), torch.randn(2, 5, 4, 16), torch.randn(2, 5, 2, 16), cos, sin


def normed_q_and_k():
    cos, sin = angles(5, 16, torch.float32)
    weights = torch.randn(2, 16)
    return (
        norm_then_swap(NORMS["one_plus"], partial),
        torch.randn(2, 5, 4, 16),
        torch.randn(2, 5, 2, 16),
        *weights,
        cos,
        sin,
    )


def residual_norm(x, residual, weight):
    total = residual + x
    return NORMS["one_plus"](total, weight), total


SUBJECTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "rms_norm": lambda: (NORMS["cast_mul"], torch.randn(32, 32), torch.randn(32)),
    "rms_norm in bf16": lambda: (NORMS["mul_cast"], torch.randn(32, 32).bfloat16(), torch.randn(32).bfloat16()),
    "add_rms_norm": lambda: (residual_norm, torch.randn(32, 32), torch.randn(32, 32), torch.randn(32)),
    "qk_norm_rope": normed_q_and_k,
    "rotary_embedding_cache_": lambda: (step(half), *step_inputs(torch.float32)),
    "qk_norm_rope_cache_": lambda: (step(partial, NORMS["cast_mul"]), *step_inputs(torch.float32)),
    "mla_qk_rope": lambda: (latent(interleaved_to_half, assigned), *latent_inputs(torch.float32)),
    "mla_qk_rope, cached": lambda: (latent(half, cats, cached=True), *latent_inputs(torch.float32)),
    "partial": lambda: q_and_k(partial),
    "split": lambda: q_and_k(split),
    "interleaved_to_half": lambda: q_and_k(interleaved_to_half),
    "pairs": lambda: q_and_k(pairs),
    "renormalized": lambda: (in_order(renormalized), logits_of(), torch.rand(EXPERTS)),
    "cast_back": lambda: (in_order(cast_back), logits_of(torch.bfloat16), torch.rand(EXPERTS)),
    "topk_softmax": lambda: (in_order(topk_softmax), logits_of(), torch.rand(EXPERTS)),
    "sigmoid_bias": lambda: (in_order(sigmoid_bias), logits_of(), torch.rand(EXPERTS) / 20),
    "limited": lambda: (in_order(limited), logits_of(), torch.rand(EXPERTS) / 20),
    "limited_by_maximum": lambda: (in_order(limited_by_maximum), logits_of(), torch.rand(EXPERTS)),
    "silu": lambda: (lambda x: torch.nn.functional.silu(x[..., :K]) * x[..., K:], torch.randn(6, 2 * K)),
    "gpt_oss": lambda: (gpt_oss, 4 * torch.randn(6, 32), 4 * torch.randn(6, 32)),
    "experts": lambda: (experts, *expert_inputs(torch.float32)),
    "attention": lambda: (attention, *attention_inputs()),
    "masked attention": lambda: (lambda q, k, v: masked_attention(q, k, v, indexed()), *masked_inputs()),
    "sinks": lambda: (
        lambda q, k, v, sinks: spelled_sinks(q, k, v, sinks, torch.where(indexed(), 0.0, -1e38)),
        *masked_inputs(),
        sinks_of(torch.float32),
    ),
    "dense experts": lambda: (dense_experts, *dense_expert_inputs()),
    "batched experts": lambda: (batched_experts, *expert_inputs(torch.float32, bias=True)),
}


@pytest.mark.parametrize("name", SUBJECTS)
def test_mutants_keep_their_values(name, mutants=80):
    original, inputs = joint_graph(*SUBJECTS[name]())
    choose = random.Random(name)
    swapped: list[int] = []
    for _ in range(mutants):
        graph = copy.deepcopy(original)
        change = mutate(graph, choose)
        module = GraphModule({}, graph)
        try:
            graph.lint()
            FakeTensorProp(module, FakeTensorMode()).propagate(*inputs)
            if reads_past_its_end(graph):
                continue
            expected = outcome(module, inputs)
            if not change or is_tied(module, inputs):
                continue
        except Exception:  # not a program
            continue
        swapped.append(rewrite(graph, SETTINGS).swapped.total())
        actual = outcome(GraphModule({}, graph), inputs)
        for ours, theirs in zip(actual, expected, strict=True):
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, change
            tolerance = 2e-2 if theirs.dtype == torch.bfloat16 else 2e-5
            assert torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True), change
    assert len(swapped) > mutants // 5 and any(swapped)
