"""The usual code of samplers: temperature, top-k and top-p over logits, softmax, and a draw.

A draw is ``torch.multinomial(probs, 1)``, or the argmax of probabilities over exponential random numbers, which does
without the synchronisation of the former. The filters are those of transformers' logits processors, also written with
``torch.where``. What is drawn has the same distribution; the random numbers are others.
"""

import math
from typing import Any

import torch
from torch.fx import Node

from torch_deepinfer.inductor.matcher import (
    FLOATS,
    LOW_PRECISION,
    Match,
    Pattern,
    argument,
    aten,
    dtype_of,
    held_number,
    is_call,
    is_last_dim,
    is_number,
    number,
    result_of,
    same_shape,
    shape_of,
    softmax_operand,
    uncast,
)

MOST_ELEMENTS = 2**23
LEAST_TEMPERATURE = 1e-5  # below, the op takes the greatest element


def match_draw(anchor: Node) -> Match | None:
    keepdim = True
    if is_call(anchor, aten.multinomial.default):
        probs, count = anchor.args[0], anchor.args[1]
        if count != 1 or anchor.kwargs.get("generator") is not None:
            return None
    else:
        divided, keepdim = anchor.args[0], bool(argument(anchor, 2, "keepdim", False))
        if not is_call(divided, aten.div.Tensor) or not isinstance(divided.args[1], Node):
            return None
        probs, noise = divided.args
        if not is_exponential(noise) or not same_shape(probs, noise):
            return None
        dim = argument(anchor, 1, "dim")
        if dim is None or not is_last_dim(divided, dim):
            return None
    logits = softmax_operand(probs)
    if logits is None:
        return None
    size = shape_of(logits)[-1]
    if not isinstance(size, int) or not 1 <= size < MOST_ELEMENTS:
        return None
    return _with_filters(anchor, logits, keepdim)


def _with_filters(anchor: Node, x: Any, keepdim: bool) -> Match | None:
    """Peels the filters off, the last one first: the op applies the temperature, top_k and top_p in that order.

    Others stay in the graph, in front of the op.
    """
    top_p, top_k, temperature = 1.0, 0, 1.0
    if (nucleus := nucleus_of(x)) is not None:
        x, top_p = nucleus
    if (greatest := greatest_of(x)) is not None:
        x, top_k = greatest
    if (scaled := scaled_of(x)) is not None and scaled[1] >= LEAST_TEMPERATURE:
        x, temperature = scaled
        if top_k == 0 and (greatest := greatest_of(x)) is not None:  # a temperature leaves the k greatest what they are
            x, top_k = greatest
    x = uncast(x, *LOW_PRECISION)
    if dtype_of(x) not in FLOATS:
        return None
    filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "keepdim": keepdim}
    return Match(torch.ops.deepinfer.draw.default, (x,), (anchor,), filters)


def is_exponential(node: Any) -> bool:
    """Whether ``node`` is ``exponential_(1)`` of a float32 tensor, as it is or decomposed."""
    if not isinstance(node, Node) or dtype_of(node) != torch.float32:
        return False
    if is_call(node, aten.exponential.default):
        return is_number(argument(node, 1, "lambd", 1.0), 1.0) and node.kwargs.get("generator") is None
    # -log(u), where u of about 1 counts as a little less
    if not is_call(node, aten.mul.Tensor) or not is_number(node.args[1], -1.0):
        return False
    log = node.args[0]
    if is_call(log, aten.where.self):
        near_one, substitute, log = log.args
        if not is_call(near_one, aten.ge.Scalar) or number(substitute) is None:
            return False
        if not is_call(log, aten.log.default) or near_one.args[0] is not log.args[0]:
            return False
    return is_call(log, aten.log.default) and is_call(log.args[0], aten.rand.default)


def kept_by(node: Any) -> tuple[Any, Node] | None:
    """``(removed, x)`` if ``node`` is ``x`` with -inf where ``removed`` holds."""
    if not is_call(node, aten.where.self) or not is_number(node.args[1], -math.inf):
        return None
    removed, _, x = node.args
    return (removed, x) if isinstance(x, Node) and same_shape(node, x) else None


def greatest_of(node: Any) -> tuple[Node, int] | None:
    """``(x, k)`` if ``node`` is ``x`` with -inf where it is less than its k-th greatest element."""
    kept = kept_by(node)
    if kept is None or not is_call(kept[0], aten.lt.Tensor):
        return None
    below, x = kept
    if below.args[0] is not x:
        return None
    last = below.args[1]  # values[..., -1, None] or values[..., -1:]
    if is_call(last, aten.unsqueeze.default) and is_call(last.args[0], aten.select.int):
        if last.args[1] not in (-1, len(shape_of(last)) - 1) or last.args[0].args[2] != -1:
            return None
        values, dim = last.args[0].args[0], last.args[0].args[1]
    elif is_call(last, aten.slice.Tensor) and argument(last, 2, "start") == -1:
        values, dim = last.args[0], argument(last, 1, "dim", 0)
    else:
        return None
    found = result_of(values, aten.topk.default)
    if found is None or found[1] != 0 or not is_last_dim(values, dim):
        return None
    topk = found[0]
    k = topk.args[1]
    in_order = argument(topk, 3, "largest", True) and argument(topk, 4, "sorted", True)
    if topk.args[0] is not x or not isinstance(k, int) or k < 1 or not in_order:
        return None
    return (x, k) if is_last_dim(x, argument(topk, 2, "dim", -1)) else None


def nucleus_of(node: Any) -> tuple[Node, float] | None:
    """``(x, p)`` if ``node`` is ``x`` with -inf where it and all below have at most 1 - p of the mass."""
    kept = kept_by(node)
    if kept is None or not is_call(kept[0], aten.scatter.src):
        return None
    scatter, x = kept
    removed, dim, order, source = scatter.args
    found = result_of(order, aten.sort.default)
    if removed is not source or not is_last_dim(x, dim) or found is None or found[1] != 1:
        return None
    ordered = found[0]
    ascending = not argument(ordered, 2, "descending", False)
    if ordered.args[0] is not x or not ascending or not is_last_dim(x, argument(ordered, 1, "dim", -1)):
        return None
    if not is_call(removed, aten.slice_scatter.default) or not _is_false(removed.args[1]):
        return None
    # the greatest one stays
    if not is_last_dim(x, argument(removed, 2, "dim", 0)) or argument(removed, 3, "start") != -1:
        return None
    late = removed.args[0]
    if not is_call(late, aten.le.Scalar) or not is_call(late.args[0], aten.cumsum.default):
        return None
    cumsum, rest = late.args[0], number(late.args[1])
    values = softmax_operand(cumsum.args[0])
    sorted_values = None if values is None else result_of(values, aten.sort.default)
    if sorted_values is None or sorted_values != (ordered, 0) or not is_last_dim(x, cumsum.args[1]):
        return None
    return (x, 1.0 - rest) if rest is not None and 0 < rest < 1 else None


def _is_false(node: Any) -> bool:
    """Whether ``node`` is a copy of the constant False, or filled with it."""
    if is_call(node, aten.copy.default):
        node = node.args[1]
    if is_call(node, aten.full.default, aten.full_like.default):
        return node.args[1] in (False, 0)
    while is_call(node, aten.lift_fresh_copy.default, aten.clone.default, aten.expand.default):
        node = node.args[0]
    return held_number(node) == 0


def scaled_of(node: Any) -> tuple[Node, float] | None:
    """``(x, t)`` if ``node`` is ``x / t``."""
    if not is_call(node, aten.div.Tensor, aten.mul.Tensor) or not isinstance(node.args[0], Node):
        return None
    factor = number(node.args[1])
    if factor is None or not factor > 0 or not math.isfinite(factor):
        return None
    return node.args[0], float(factor) if is_call(node, aten.div.Tensor) else 1 / factor


PATTERNS = [Pattern("draw", "sampling", (aten.multinomial.default, aten.argmax.default), match_draw)]
