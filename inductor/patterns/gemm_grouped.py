"""Experts by grouped products: sort the tokens by expert, two products over the groups, undo the sort, weighted sum.

This is what transformers traces for a mixture of experts by default: about thirty nodes, five passes over the tokens.
"""

import dataclasses
from typing import Any

from torch.fx import Node

from torch_deepinfer.inductor.matcher import (
    CAST,
    Miss,
    argument,
    aten,
    commuted,
    is_call,
    is_number,
    item,
    prims,
    result_of,
    shape_of,
    value,
)
from torch_deepinfer.inductor.patterns.gemm_experts import (
    Experts,
    Linear,
    activation_between,
    flattened,
    indexed,
    transposed,
)


@dataclasses.dataclass
class _GroupedLinear:
    """``rows @ weight[expert] + bias[expert]``; ``masks`` are the conditions under which rows were set to zero."""

    product: Node
    bias: Node | None
    bias_ids: Node | None
    masks: list[Node]

    @property
    def rows(self) -> Node:
        return self.product.args[0]

    @property
    def weight(self) -> Node:
        return self.product.args[1]

    @property
    def ends(self) -> Node:
        return self.product.args[2]


def match_grouped(total: Node) -> Experts | Miss | None:
    undone = _undo_sort(total)
    if undone is None:
        return None
    weighted, order, k = undone
    scaled = _weighted_rows(weighted, order)
    if scaled is None:
        return Miss("the rows are not multiplied by the weights of their experts")
    second_out, weights = scaled
    second = _grouped_linear(second_out)
    if second is None:
        return Miss("the weighted rows do not come from a grouped product with an optional bias")
    inner = activation_between(second.rows)
    if isinstance(inner, Miss):
        return inner
    first = _grouped_linear(inner.source)
    if first is None or first.ends is not second.ends:
        return Miss("gate and up do not come from a grouped product over the same groups")
    tokens = _gathered_tokens(_unmasked(first.rows, first.masks), order, k)
    if tokens is None:
        return Miss("the rows are not the tokens in the order of their experts")
    ids = _sorted_ids(order, first, second)
    if isinstance(ids, Miss):
        return ids
    if shape_of(ids)[1] != k:
        return Miss(f"{k} rows a token, but ids {list(shape_of(ids))}")
    gate_up = Linear(transposed(first.weight), first.bias)
    return Experts(tokens, ids, weights, gate_up, Linear(transposed(second.weight), second.bias), inner)


def _undo_sort(total: Node) -> tuple[Node, Node, int] | None:
    """``(rows, order, k)`` if ``total`` brings the sorted rows back to token order and sums k rows a token."""
    grouped = total.args[0]
    if list(argument(total, 1, "dim") or []) != [1] or argument(total, 2, "keepdim", False) or total.kwargs:
        return None
    if not is_call(grouped, aten.view.default) or value(grouped).dim() != 3:
        return None
    gathered = indexed(grouped.args[0])
    if gathered is None or not is_call(gathered[1], aten.index_put.default):
        return None
    rows, inverse = gathered
    places, positions = inverse.args[1], inverse.args[2]
    if len(places) != 1 or not is_call(positions, prims.iota.default) or argument(inverse, 3, "accumulate", False):
        return None
    if positions.kwargs.get("start") != 0 or positions.kwargs.get("step") != 1 or value(rows).dim() != 2:
        return None
    return rows, places[0], shape_of(grouped)[1]


def _weighted_rows(node: Node, order: Node) -> tuple[Node, Node] | None:
    """``(rows, weights)`` if ``node`` is ``rows * weights.flatten()[order].unsqueeze(-1)``."""
    if not is_call(node, aten.mul.Tensor):
        return None
    for rows, column in commuted(node):
        if not is_call(column, aten.unsqueeze.default) or column.args[1] not in (-1, 1):
            continue
        gathered = indexed(column.args[0])
        if gathered is None or gathered[1] is not order:
            continue
        weights = flattened(gathered[0])
        if weights is not None:
            return rows, weights
    return None


def _unmasked(node: Any, masks: list[Node]) -> Any:
    """``node`` before some rows were set to zero; the condition is added to ``masks``."""
    if not is_call(node, aten.where.self) or not is_number(node.args[1], 0):
        return node
    if not is_call(node.args[0], aten.unsqueeze.default) or node.args[0].args[1] not in (-1, 1):
        return node
    masks.append(node.args[0].args[0])
    return node.args[2]


def is_grouped_mm(node: Any) -> bool:
    """torch's own grouped product, or the stand-in that transformers uses for other dtypes than bfloat16."""
    if is_call(node, aten._grouped_mm.default):
        return len(node.args) == 3 and not node.kwargs
    return isinstance(node, Node) and str(node.target) == "transformers.grouped_mm_fallback.default"


def _grouped_linear(node: Node) -> _GroupedLinear | None:
    masks: list[Node] = []
    node = _unmasked(node, masks)
    if is_grouped_mm(node):
        return _GroupedLinear(node, None, None, masks)
    if not is_call(node, aten.add.Tensor):
        return None
    for product, addend in commuted(node):
        gathered = indexed(addend)
        product = _unmasked(product, masks)
        if is_grouped_mm(product) and gathered is not None and value(gathered[0]).dim() == 2:
            return _GroupedLinear(product, *gathered, masks)
    return None


def _gathered_tokens(rows: Node, order: Node, k: int) -> Node | None:
    """``tokens`` if ``rows`` is ``tokens[order // k]``."""
    gathered = indexed(rows)
    if gathered is None or not is_call(gathered[1], aten.div.Tensor_mode):
        return None
    division = gathered[1]
    if division.args != (order, k) or division.kwargs.get("rounding_mode") != "floor":
        return None
    return gathered[0] if value(gathered[0]).dim() == 2 else None


def _sorted_ids(order: Node, first: _GroupedLinear, second: _GroupedLinear) -> Node | Miss:
    """The [tokens, k] ids that ``order`` sorts, after checking that groups and biases are taken by them."""
    sort = result_of(order, aten.sort.default)
    if (
        sort is None
        or sort[1] != 1
        or argument(sort[0], 1, "dim", -1) not in (-1, 0)
        or argument(sort[0], 2, "", False)
    ):
        return Miss("the rows are not in ascending order of their experts")
    ids, ascending = flattened(sort[0].args[0]), item(sort[0], 0)
    if ids is None or ascending is None:
        return Miss("the expert ids are not [tokens, k]")
    num_experts = shape_of(first.weight)[0]
    if not _are_ends_of_groups(first.ends, ascending, num_experts):
        return Miss("the groups are not the counts of the expert ids")
    for linear in (first, second):
        bias_ids: Any = linear.bias_ids
        if is_call(bias_ids, aten.clamp_max.default):
            bias_ids = bias_ids.args[0]
        if bias_ids is not None and bias_ids is not ascending:
            return Miss("a bias is not taken by the sorted expert ids")
        # Rows of experts that live elsewhere: the fused op leaves them out by itself.
        if not all(is_call(mask, aten.ge.Scalar) and mask.args == (ascending, num_experts) for mask in linear.masks):
            return Miss("rows are masked by something else than the end of the expert ids")
    return ids


def _are_ends_of_groups(ends: Node, ascending: Node, num_experts: Any) -> bool:
    """Whether ``ends`` is ``cumsum(histc(ascending, num_experts, 0, num_experts - 1))``."""
    if not is_call(ends, aten.cumsum.default) or ends.args[1] not in (0, -1):
        return False
    counts = ends.args[0]
    if not is_call(counts, aten.histc.default) or counts.args[1:] != (num_experts, 0, num_experts - 1):
        return False
    counted = counts.args[0]
    return counted is ascending or (is_call(counted, CAST) and counted.args[0] is ascending)
