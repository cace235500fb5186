"""Experts by batched products: a copy of its expert's weights for each row, two products of matrix and vector.

This is what transformers traces on a GPU while ``generate`` decodes, or with ``experts_implementation="batched_mm"``.
"""

from typing import Any

from torch.fx import Node

from torch_deepinfer.inductor.matcher import (
    SWAP_MATRICES,
    Derived,
    Miss,
    argument,
    aten,
    commuted,
    is_call,
    is_last_dim,
    result_of,
    same,
    shape_of,
    value,
)
from torch_deepinfer.inductor.patterns.gemm_experts import (
    Experts,
    Linear,
    activation_between,
    flattened,
    indexed,
    resqueezed,
)


def match_batched(total: Node) -> Experts | Miss | None:
    weighted = _rows_of(total)
    if weighted is None:
        return None
    rows, weights = weighted
    second = _batched_linear(rows)
    if second is None:
        return None
    product, down, flat_ids = second
    inner = activation_between(product)
    if isinstance(inner, Miss):
        return inner
    first = _batched_linear(inner.source)
    if first is None:
        return Miss("gate and up do not come from a product with a matrix for each row")
    repeated, gate_up, first_ids = first
    ids = _ids_of(flat_ids, gate_up)
    if ids is None or first_ids is not flat_ids:
        return Miss("the weights are not taken by the [tokens, k] ids of the experts")
    tokens = _repeated_tokens(repeated, shape_of(ids)[1])
    if tokens is None:
        return Miss("the rows are not the tokens, once for each of their experts")
    return Experts(tokens, ids, weights, gate_up, down, inner)


def _ids_of(flat: Node, linear: Linear) -> Node | None:
    """The [tokens, k] ids; a clamp to the number of experts changes nothing about those that a top-k chose."""
    if not is_call(flat, aten.clamp_max.default):
        return flattened(flat)
    bounded = flat.args[0]
    if not is_call(bounded, aten.clamp_min.default):
        return None
    ids = flattened(bounded.args[0])
    chosen = result_of(ids, aten.topk.default)
    weight = linear.weight.node if isinstance(linear.weight, Derived) else linear.weight
    if chosen is None or chosen[1] != 1 or not isinstance(weight, Node):
        return None
    experts = shape_of(weight)[0]
    bounds = (bounded.args[1], flat.args[1])
    in_range = bounds == (0, experts - 1) and same(shape_of(chosen[0].args[0])[-1], experts)
    return ids if in_range and is_last_dim(chosen[0].args[0], argument(chosen[0], 2, "dim", -1)) else None


def _rows_of(total: Node) -> tuple[Node, Node] | None:
    """``(rows, weights)`` of ``(rows * weights.flatten().unsqueeze(-1)).view(tokens, k, size).sum(1)``."""
    if list(argument(total, 1, "dim") or []) != [1] or argument(total, 2, "keepdim", False) or total.kwargs:
        return None
    grouped = total.args[0]
    if not is_call(grouped, aten.view.default) or value(grouped).dim() != 3:
        return None
    product = grouped.args[0]
    if not is_call(product, aten.mul.Tensor) or value(product).dim() != 2:
        return None
    for rows, column in commuted(product):
        if not is_call(column, aten.unsqueeze.default) or column.args[1] not in (-1, 1):
            continue
        weights = flattened(column.args[0])
        if weights is not None and same(shape_of(weights)[1], shape_of(grouped)[1]):
            return rows, weights
    return None


def _batched_linear(node: Any) -> tuple[Node, Linear, Node] | None:
    """``(rows, linear, ids)`` if ``node`` is ``linear.weight[ids[i]] @ rows[i] + linear.bias[ids[i]]`` for every i."""
    node = resqueezed(node)
    found = _batched_product(node)
    if found is not None:
        rows, weight, ids = found
        return rows, Linear(weight, None), ids
    if not is_call(node, aten.add.Tensor):
        return None
    for product, addend in commuted(node):
        found, bias = _batched_product(resqueezed(product)), indexed(addend)
        if found is not None and bias is not None and bias[1] is found[2] and value(bias[0]).dim() == 2:
            rows, weight, ids = found
            return rows, Linear(weight, bias[0]), ids
    return None


def _batched_product(node: Any) -> tuple[Node, Node | Derived, Node] | None:
    """``(rows, weight, ids)``, from either side: matrix times column, or row times matrix."""
    if not is_call(node, aten.squeeze.dim) or not is_call(node.args[0], aten.bmm.default):
        return None
    removed, (left, right) = node.args[1] % 3, node.args[0].args
    for matrices, vectors, dim in ((left, right, 2), (right, left, 1)):
        chosen = indexed(matrices)
        if chosen is None or value(chosen[0]).dim() != 3 or value(chosen[1]).dim() != 1 or removed != dim:
            continue
        if not is_call(vectors, aten.unsqueeze.default) or vectors.args[1] % 3 != dim:
            continue
        weight, ids = chosen
        return vectors.args[0], weight if dim == 2 else Derived(aten.permute.default, weight, (SWAP_MATRICES,)), ids
    return None


def _repeated_tokens(rows: Any, k: int) -> Node | None:
    """``tokens`` if ``rows`` is ``tokens.repeat_interleave(k, 0)``."""
    if not is_call(rows, aten.view.default):
        return None
    repeated = rows.args[0]
    if is_call(repeated, aten.clone.default):
        repeated = repeated.args[0]
    if is_call(repeated, aten.expand.default):
        repeated = repeated.args[0]
    if not is_call(repeated, aten.unsqueeze.default) or repeated.args[1] not in (1, -2):
        return None
    tokens = repeated.args[0]
    size = shape_of(rows.args[0])
    fits = value(tokens).dim() == 2 and len(size) == 3 and same(size[1], k)
    return tokens if fits and same(shape_of(rows)[-1], shape_of(tokens)[-1]) else None
