"""A shared expert, which sees every token, beside the experts of a router: its sum with theirs is one op.

Tried when the experts are ``deepinfer.fused_experts`` already; the anchor is the addition.
"""

from typing import Any

import torch
from torch.fx import Node

from torch_deepinfer.inductor.matcher import (
    Match,
    Miss,
    Pattern,
    aten,
    commuted,
    dtype_of,
    is_call,
    is_tensor,
    same,
    same_value,
    shape_of,
)
from torch_deepinfer.inductor.patterns.activation import gated

EXPERTS = torch.ops.deepinfer.fused_experts.default


def match_shared_expert(total: Node) -> Match | Miss | None:
    if not is_call(total, aten.add.Tensor):
        return None
    for routed, shared in commuted(total):
        experts, down = without_views(routed), linear(shared)
        if not is_call(experts, EXPERTS) or down is None:
            continue
        found = gated(down[0])
        gate, up = (linear(found.gate), linear(found.up)) if found is not None else (None, None)
        if found is None or gate is None or up is None:
            continue
        if not _is_all_of(routed) or not _is_all_of(shared):
            return Miss("what the experts or the shared one make is used elsewhere")
        if "shared_gate" in experts.kwargs or dtype_of(total) != dtype_of(experts):
            continue
        tokens = without_views(experts.args[0])
        if not all(same_value(without_views(x), tokens) for x, _ in (gate, up)):
            continue  # as in Llama 4, whose experts see tokens that are scaled
        expected = {"activation": "silu", "limit": None, "alpha": 1.0, "up_offset": 0.0}
        if any(getattr(found, name) != experts.kwargs.get(name, default) for name, default in expected.items()):
            return Miss("the shared expert has another activation than the experts")
        if "gate_up_bias" in experts.kwargs or "down_bias" in experts.kwargs:
            return Miss("experts with biases beside one that has none")
        columns, width = shape_of(gate[1])[0], shape_of(experts.args[2])[2]
        if not same(columns, width):
            return Miss(f"a shared expert of {columns} columns beside experts of {width}")
        weights = {"shared_gate": gate[1], "shared_up": up[1], "shared_down": down[1]}
        shape = routed.args[1] if is_call(routed, aten.view.default) else None
        kwargs = {**experts.kwargs, **weights}
        return Match(EXPERTS, experts.args, (total,), kwargs, found.activation, view=shape, known=(tokens,))
    return None


def _is_all_of(node: Node) -> bool:
    """Whether nothing else reads what ``node`` is a view of."""
    while len(node.users) == 1 and is_call(node, aten.view.default):
        node = node.args[0]
    return len(node.users) == 1


def without_views(node: Any) -> Any:
    while is_call(node, aten.view.default):
        node = node.args[0]
    return node


def linear(node: Any) -> tuple[Node, Node] | None:
    """``(x, weight)`` if ``node`` is ``x @ weight.T`` without a bias."""
    product = without_views(node)
    if not is_call(product, aten.mm.default):
        return None
    x, weight = product.args
    if not is_call(weight, aten.permute.default) or not is_tensor(weight.args[0]):
        return None
    return without_views(x), weight.args[0]


PATTERNS = [Pattern("shared_expert", "gemm", (aten.add.Tensor,), match_shared_expert)]
