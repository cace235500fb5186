"""Experts that all see every token, times its score: zero for every expert but the one that was chosen.

So does Llama 4. What an expert makes of zeros is zero, so one expert for each token gives the same sum.
"""

from typing import Any

import torch
from torch.fx import Node

from torch_deepinfer.inductor.matcher import (
    CAST,
    LOW_PRECISION,
    Derived,
    Miss,
    argument,
    aten,
    commuted,
    dtype_of,
    is_call,
    is_last_dim,
    number,
    result_of,
    same,
    shape_of,
    uncast,
    value,
)
from torch_deepinfer.inductor.patterns.gemm_experts import Experts, Linear, activation_between, transposed


def match_dense(total: Node) -> Experts | Miss | None:
    second = _product(_before_views(total.args[0]))
    if second is None or list(argument(total, 1, "dim") or []) != [0] or argument(total, 2, "keepdim", False):
        return None
    inner = activation_between(second[0])
    if isinstance(inner, Miss):
        return inner
    first = _product(inner.source)
    if first is None:
        return Miss("gate and up do not come from a product with a matrix for each expert")
    found = _scaled_tokens(first[0])
    if found is None:
        return Miss("the experts do not all see the tokens, times the score of the one that was chosen")
    tokens, ids, scores = found
    gate_up, down = (Linear(transposed(weight), None) for weight in (first[1], second[1]))
    return Experts(tokens, ids, None, gate_up, down, inner, scores)


def _before_views(node: Any) -> Any:
    while is_call(node, aten.view.default):
        node = node.args[0]
    return node


def _product(node: Any) -> tuple[Node, Node] | None:
    """``(rows, weight)`` of ``rows[e] @ weight[e]`` for every expert e."""
    return node.args[:2] if is_call(node, aten.bmm.default) else None


def _scaled_tokens(rows: Node) -> tuple[Node, Node, Derived] | None:
    """``(tokens, ids, scores)``: [tokens, in], and [tokens, 1] twice, the chosen expert and what it is worth."""
    product = _before_views(rows)
    if not is_call(product, aten.mul.Tensor) or value(product).dim() != 2:
        return None
    experts = shape_of(rows)[0]
    for repeated, column in commuted(product):
        if not is_call(repeated, aten.repeat.default) or list(repeated.args[1]) != [experts, 1]:
            continue
        by_expert = _before_views(column)
        if is_call(by_expert, aten.clone.default):
            by_expert = by_expert.args[0]
        if not is_call(by_expert, aten.permute.default) or value(by_expert).dim() != 2:
            continue
        chosen = _chosen(by_expert.args[0])
        if chosen is not None and same(shape_of(by_expert.args[0])[1], experts):
            return repeated.args[0], *chosen
    return None


def _chosen(scores: Node) -> tuple[Node, Derived] | None:
    """``(ids, scores)`` of the one expert of a token whose score in [tokens, experts] is not zero."""
    dtype = dtype_of(scores)
    sigmoid = scores.args[0] if is_call(scores, CAST) else scores
    if not is_call(sigmoid, aten.sigmoid.default) or dtype_of(sigmoid) != torch.float32:
        return None
    scattered = uncast(sigmoid.args[0], *LOW_PRECISION)
    if not is_call(scattered, aten.scatter.src) or not is_last_dim(scattered, scattered.args[1]):
        return None
    empty, _, ids, values = scattered.args
    first, second = result_of(values, aten.topk.default), result_of(ids, aten.topk.default)
    if first is None or second is None or (first[1], second[1]) != (0, 1) or first[0] is not second[0]:
        return None
    is_last = is_last_dim(first[0].args[0], argument(first[0], 2, "dim", -1))
    if (
        not is_last
        or first[0].args[1] != 1
        or not is_call(empty, aten.full.default)
        or number(empty.args[1]) != -torch.inf
    ):
        return None
    single = Derived(aten.sigmoid.default, Derived(CAST, values, (torch.float32,)))
    return ids, Derived(CAST, single, (dtype,))
