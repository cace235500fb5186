"""Routers: the scores of a linear layer become k expert ids and k weights a token.

The anchor is the ``topk`` that picks the experts. Three families of spellings lead to ``deepinfer.moe_router``:

- softmax, top-k, optional renormalisation (Qwen, Mixtral, OLMoE; with a limit on groups: DeepSeek V2),
- sigmoid, bias that only selects, optional limit on groups, renormalisation, scale (DeepSeek V3, GLM-4.5, MiniMax M2),
- top-k on the logits, then softmax over the chosen ones (GPT-OSS, Granite).
"""

import dataclasses
import math
from typing import Any

import torch
from torch.fx import Node

from torch_deepinfer.inductor.matcher import (
    CAST,
    FLOATS,
    LOW_PRECISION,
    Match,
    Miss,
    Pattern,
    argument,
    aten,
    commuted,
    dtype_of,
    is_call,
    is_last_dim,
    is_number,
    is_sum_over_last,
    is_tensor,
    item,
    number,
    only_user,
    result_of,
    same,
    shape_of,
    softmax_operand,
    uncast,
    users,
    value,
)


@dataclasses.dataclass
class _Selection:
    """How the key that ``topk`` sorts by comes about."""

    logits: Node
    scores: Node
    kind: str
    bias: Node | None = None
    groups: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class _Weights:
    """The end of the chain that turns the chosen scores into weights."""

    node: Node
    kwargs: dict[str, Any]


def match_router(anchor: Node) -> Match | Miss | None:
    if is_call(anchor, aten.gather.default):
        return _lookup(anchor)
    topk = anchor
    key, k = topk.args[0], topk.args[1]
    ids = item(topk, 1)
    if value(key).dim() != 2 or ids is None:
        return None
    if not is_last_dim(key, argument(topk, 2, "dim", -1)) or not argument(topk, 3, "largest", True):
        return None
    selection = _selection(key)
    if selection is None:
        return _match_score_after_topk(topk, ids)
    if isinstance(selection, Miss):
        return selection
    chosen = _chosen_scores(topk, ids, selection)
    if chosen is None:
        return Miss("the weights are not the scores of the chosen experts")
    weights = _weights(chosen)
    if isinstance(weights, Miss):
        return weights
    if dtype_of(selection.logits) not in FLOATS:
        return Miss(f"logits of {dtype_of(selection.logits)}")
    kwargs: dict[str, Any] = {"bias": selection.bias} if selection.bias is not None else {}
    if selection.kind != "softmax":
        kwargs["score"] = selection.kind
    kwargs |= selection.groups | weights.kwargs
    return _router(selection.logits, k, kwargs, weights.node, ids, selection.kind)


def _router(logits: Node, k: int, kwargs: dict[str, Any], weights: Node, ids: Node, variant: str) -> Match:
    if dtype_of(weights) != torch.float32:
        kwargs["weights_dtype"] = dtype_of(weights)
    return Match(torch.ops.deepinfer.moe_router.default, (logits, k), (weights, ids), kwargs, variant)


def _selection(key: Node) -> _Selection | Miss | None:
    groups: dict[str, Any] = {}
    base = key
    if is_call(key, aten.where.self):
        base = key.args[2]
    bias = None
    scores = base
    if is_call(base, aten.add.Tensor):
        for a, b in commuted(base):
            if is_tensor(a) and is_tensor(b) and _score_operand(a) is not None:
                scores, bias = a, b
                break
    found = _score_operand(scores)
    if found is None:
        return None
    kind, operand = found
    if dtype_of(scores) != torch.float32:
        return Miss(f"scores in {dtype_of(scores)}; the op computes them in float32")
    if base is not key:
        limit = _group_limit(key, base, biased=bias is not None)
        if isinstance(limit, Miss):
            return limit
        groups = limit
    if bias is not None:
        bias = uncast(bias, *LOW_PRECISION)
        if value(bias).dim() != 1 or not same(shape_of(bias)[0], shape_of(scores)[1]):
            return Miss(f"bias of shape {list(shape_of(bias))}; one value per expert is needed")
    return _Selection(uncast(operand, *LOW_PRECISION), scores, kind, bias, groups)


def _score_operand(node: Any) -> tuple[str, Node] | None:
    if is_call(node, aten.sigmoid.default):
        return "sigmoid", node.args[0]
    if is_call(node, aten.sqrt.default):
        operand = _softplus_operand(node.args[0])
        return None if operand is None else ("sqrt_softplus", operand)
    operand = softmax_operand(node)
    return None if operand is None else ("softmax", operand)


def _softplus_operand(node: Any) -> Node | None:
    """``x`` if ``node`` is ``log(1 + exp(x))``, which above 20 is ``x``; computed in float32, perhaps rounded."""
    if is_call(node, CAST):
        node = node.args[0]
    if not is_call(node, aten.where.self) or dtype_of(node) != torch.float32:
        return None
    is_large, x, small = node.args
    if not is_call(is_large, aten.gt.Scalar) or is_large.args[0] is not x or not is_number(is_large.args[1], 20):
        return None
    if not is_call(small, aten.log1p.default) or not is_call(small.args[0], aten.exp.default):
        return None
    return x if small.args[0].args[0] is x else None


def _lookup(gather: Node) -> Miss | None:
    """DeepSeek V4 looks the experts of a token up in a table; the scores only weigh them."""
    scores, _, ids = gather.args[:3]
    is_table = is_call(ids, aten.index.Tensor, aten.embedding.default)
    if not is_table or not is_call(scores, aten.sqrt.default) or _score_operand(scores) is None:
        return None
    return Miss("the experts are looked up in a table, not chosen by their scores")


def _group_limit(key: Node, base: Node, biased: bool) -> dict[str, Any] | Miss:
    """``key`` is ``base`` with all but the best groups of experts masked out."""
    not_chosen, fill = key.args[0], number(key.args[1])
    # Zero is as good as -inf where every score is positive: a masked expert can only be picked with weight zero.
    if fill != -math.inf and (biased or fill != 0.0):
        return Miss("masked groups are filled with a value that can still win")
    if not is_call(not_chosen, aten.bitwise_not.default, aten.logical_not.default):
        return Miss("the mask over experts is not the inverse of a choice of groups")
    mask = _per_group(not_chosen.args[0])
    if not is_call(mask, aten.scatter.value) or not is_number(mask.args[3], 1) or mask.args[1] not in (1, -1):
        return Miss("the mask over experts does not come from a choice of groups")
    zeros, picked = mask.args[0], mask.args[2]
    if not is_call(zeros, aten.full.default) or not is_number(zeros.args[1], 0):
        return Miss("the choice of groups does not start from zeros")
    pick = result_of(picked, aten.topk.default)
    if pick is None or pick[1] != 1:
        return Miss("the groups are not chosen by topk")
    group_scores, chosen_groups = pick[0].args[0], pick[0].args[1]
    score = _group_score(group_scores, base)
    if score is None:
        return Miss("groups are not ranked by their maximum or by the sum of their two best")
    num_groups = shape_of(group_scores)[1]
    if not same(shape_of(zeros)[1], num_groups):
        return Miss("the mask does not have one entry per group")
    limit: dict[str, Any] = {"num_groups": num_groups, "topk_groups": chosen_groups}
    if score != "top2_sum":
        limit["group_score"] = score
    return {} if num_groups == 1 else limit


def _per_group(mask: Any) -> Any:
    """The [tokens, groups] tensor of which ``mask`` repeats every element for the experts of a group."""
    while is_call(mask, CAST, aten.view.default, aten.clone.default, aten.expand.default):
        mask = mask.args[0]
    return mask.args[0] if is_call(mask, aten.unsqueeze.default) and mask.args[1] in (-1, 2) else None


def _group_score(node: Node, base: Node) -> str | None:
    """How the [tokens, groups] ranking is made of the [tokens, experts] scores ``base``."""
    best = result_of(node, aten.max.dim)
    if best is not None and best[1] == 0:
        name, grouped, dim = "max", best[0].args[0], best[0].args[1]
    elif is_call(node, aten.amax.default) and len(node.args[1]) == 1:
        name, grouped, dim = "max", node.args[0], node.args[1][0]
    elif is_call(node, aten.sum.dim_IntList) and is_sum_over_last(node, node.args[0], keepdim=False):
        best = result_of(node.args[0], aten.topk.default)
        if best is None or best[1] != 0 or best[0].args[1] != 2:
            return None
        name, grouped, dim = "top2_sum", best[0].args[0], argument(best[0], 2, "dim", -1)
    else:
        return None
    if not is_call(grouped, aten.view.default) or grouped.args[0] is not base or value(grouped).dim() != 3:
        return None
    return name if is_last_dim(grouped, dim) else None


def _chosen_scores(topk: Node, ids: Node, selection: _Selection) -> Node | None:
    for gather in users(selection.scores, aten.gather.default):
        if gather.args[2] is ids and is_last_dim(selection.scores, gather.args[1]):
            return gather
    return item(topk, 0) if selection.bias is None else None


def _weights(chosen: Node) -> _Weights | Miss:
    """Follows renormalisation, scale and cast after the chosen scores."""
    kwargs: dict[str, Any] = {}
    node = chosen
    divided = [user for user in users(node, aten.div.Tensor) if user.args[0] is node]
    if divided:
        total = divided[0].args[1]
        if is_call(total, aten.clamp_min.default):
            least = number(total.args[1])
            if least is None or least < 0:
                return Miss("the least divisor of the renormalisation is not a constant, or negative")
            kwargs["renorm_min"] = float(least)
            total = total.args[0]
        eps: float | int | None = 0.0
        if is_call(total, aten.add.Tensor):
            total, eps = total.args[0], number(total.args[1])
            if eps is None:
                return Miss("the eps of the renormalisation is not a constant")
        if not is_sum_over_last(total, node):
            return Miss("the weights are divided by something other than their sum")
        kwargs["renormalize"] = True
        if eps:
            kwargs["renorm_eps"] = float(eps)
        node = divided[0]
    scaled = only_user(node, aten.mul.Tensor)
    if scaled is not None:
        factors = [number(b) for a, b in commuted(scaled) if a is node]
        if factors and factors[0] is not None:
            if factors[0] != 1.0:
                kwargs["scale"] = float(factors[0])
            node = scaled
    cast = only_user(node, CAST)
    if cast is not None and dtype_of(cast) in LOW_PRECISION:
        node = cast
    return _Weights(node, kwargs)


def _match_score_after_topk(topk: Node, ids: Node) -> Match | Miss | None:
    values = item(topk, 0)
    if values is None:
        return None
    operands = [values, *(user for user in users(values, CAST) if dtype_of(user) == torch.float32)]
    shifts = [user for operand in operands for user in users(operand, aten.sub.Tensor)]
    for shift in shifts:
        exp = only_of(users(shift, aten.exp.default))
        score = only_of(users(exp, aten.div.Tensor)) if exp is not None else None
        if score is None or softmax_operand(score) not in operands:
            continue
        cast = only_user(score, CAST)
        weights = cast if cast is not None and dtype_of(cast) in LOW_PRECISION else score
        logits = uncast(topk.args[0], *LOW_PRECISION)
        kwargs: dict[str, Any] = {"score_after_topk": True}
        return _router(logits, topk.args[1], kwargs, weights, ids, "topk then softmax")
    return None


def only_of(nodes: list[Node]) -> Node | None:
    return nodes[0] if len(nodes) == 1 else None


PATTERNS = [Pattern("moe_router", "moe", (aten.topk.default, aten.gather.default), match_router)]
