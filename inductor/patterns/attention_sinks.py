"""Attention with sinks, spelled out in matrix products as GPT-OSS has it.

Every head has a number that takes part in the softmax as one more score, and to which no value belongs. So it only
divides what attention without it returns: with ``l`` the logarithm of the sum of the exponentials of a token's scores,
by ``(exp(l) + exp(sink)) / exp(l)``. The attention itself is a kernel of torch that returns ``l`` too.
"""

from typing import Any

from torch.fx import Node

from torch_deepinfer.inductor.matcher import (
    CAST,
    FLOATS,
    LOW_PRECISION,
    SWAP_HEADS,
    Derived,
    Match,
    Miss,
    Pattern,
    argument,
    aten,
    commuted,
    dtype_of,
    is_call,
    is_dense,
    is_last_dim,
    is_tensor,
    number,
    only_user,
    result_of,
    same,
    same_shape,
    shape_of,
    softmax_operand,
    uncast,
    users,
    value,
)
from torch_deepinfer.inductor.patterns.attention import attend, attend_masked, log_sums, result, span, unrepeated

SWAP_MATRIX = [0, 1, 3, 2]


def match_sinks(cat: Node) -> Match | Miss | None:
    tensors, dim = cat.args[0], cat.args[1] if len(cat.args) > 1 else 0
    if len(tensors) != 2 or value(cat).dim() != 4 or not is_last_dim(cat, dim):
        return None
    sinks = _sinks(tensors[1])
    if sinks is None:
        return None
    scores = _scores(tensors[0])
    if scores is None:
        return Miss("what the sinks stand beside are no scores")
    query, key, mask, scale = scores
    found = _weighted_values(cat)
    if found is None:
        return Miss("what follows the sinks is no softmax and product with values")
    values, output = found
    heads = shape_of(query)[1]
    seen = span(mask, False, query, key)
    keys = [(key, values)]
    shared_key, shared_values = unrepeated(key), unrepeated(values)
    may_share = value(query).device.type == "cuda" or same(shape_of(query)[2], 1)
    if may_share and shared_key is not None and shared_values is not None:
        keys.insert(0, (shared_key, shared_values))
    calls = [] if seen is None else [attend(query, *given, seen, scale) for given in keys]
    known: tuple[Node, ...] = () if mask is None else (mask,)
    if mask is not None and not any(calls):
        calls, known = [attend_masked(query, *given, mask, scale) for given in keys], ()
    call = next(filter(None, calls), None)
    if call is None:
        return Miss("torch has no kernel for attention like this")
    column = Derived(aten.view.default, sinks, ([1, heads, 1],))
    share = Derived(aten.sigmoid.default, Derived(aten.sub.Tensor, log_sums(call, query), (column,)))
    scaled = Derived(aten.mul.Tensor, result(call, query), (Derived(aten.unsqueeze.default, share, (-1,)),))
    return Match(CAST, (scaled, dtype_of(output)), (output,), permutation=SWAP_HEADS, known=known)


def _sinks(column: Any) -> Node | None:
    """[heads], if ``column`` is [batch, heads, tokens, 1] of one number a head."""
    node = column
    if not is_tensor(node) or value(node).dim() != 4 or not same(shape_of(node)[3], 1):
        return None
    heads = shape_of(node)[1]
    while is_call(node, aten.expand.default):
        node = node.args[0]
    node = uncast(node, *LOW_PRECISION)
    if not is_call(node, aten.view.default) or list(shape_of(node)) != [1, heads, 1, 1]:
        return None
    source = node.args[0]
    return source if list(shape_of(source)) == [heads] and dtype_of(source) in FLOATS else None


def _scores(node: Any) -> tuple[Node, Node, Node | None, float] | None:
    """``(query, key, mask, scale)`` if ``node`` is ``query @ key^T * scale + mask``."""
    mask = None
    if is_call(node, aten.add.Tensor):
        for product, added in commuted(node):
            if is_call(product, aten.mul.Tensor, aten.div.Tensor, aten.view.default) and is_tensor(added):
                node, mask = product, added
                break
        else:
            return None
        if not same_shape(node, product) or value(mask).dim() != 4 or not same(shape_of(mask)[1], 1):
            return None
    scale: float = 1.0
    if is_call(node, aten.mul.Tensor, aten.div.Tensor):
        factor = number(node.args[1])
        if not factor:
            return None
        scale = float(factor) if is_call(node, aten.mul.Tensor) else 1 / factor
        node = node.args[0]
    operands = _product(node)
    if operands is None:
        return None
    query, transposed = operands
    if not is_call(transposed, aten.permute.default) or list(transposed.args[1]) != SWAP_MATRIX:
        return None
    return query, transposed.args[0], mask, scale


def _product(node: Any) -> tuple[Node, Node] | None:
    """The factors of a product of matrices, [batch, heads, ...] each."""
    if not is_call(node, aten.view.default) or value(node).dim() != 4 or not is_call(node.args[0], aten.bmm.default):
        return None
    first, second = map(_by_head, node.args[0].args[:2])
    if first is None or second is None:
        return None
    batch, heads = shape_of(node)[:2]
    fits = same(shape_of(first)[0], batch) and same(shape_of(first)[1], heads)
    return (first, second) if fits and same(shape_of(second)[1], heads) else None


def _by_head(node: Node) -> Node | None:
    """[batch, heads, rows, columns], of which ``node`` has the first two dimensions merged."""
    if not is_call(node, aten.view.default):
        return None
    rows, columns = shape_of(node)[1:]
    node = node.args[0]
    if is_call(node, aten.clone.default):
        node = node.args[0]
    if is_call(node, aten.expand.default) and same_shape(node, node.args[0]):
        node = node.args[0]
    if value(node).dim() != 4 or not (same(shape_of(node)[2], rows) and same(shape_of(node)[3], columns)):
        return None
    return node


def _weighted_values(cat: Node) -> tuple[Node, Node] | None:
    """``(values, output)``: the softmax of ``cat`` without its last column times ``values``, tokens before heads."""
    node, columns = _softmax_of(cat), shape_of(cat)[3]
    steps = (CAST, aten.slice.Tensor, aten.clone.default, aten.expand.default, aten.view.default, aten.bmm.default)
    is_cut = False
    while node is not None and not is_call(node, aten.bmm.default):
        if is_call(node, aten.slice.Tensor):
            is_first = argument(node, 1, "dim", 0) in (3, -1) and argument(node, 2, "start") in (None, 0)
            if is_cut or not is_first or not same(shape_of(node)[-1], columns - 1):
                return None
            is_cut = True
        node = only_user(node, *steps)
    product = node and only_user(node, aten.view.default)
    operands = _product(product)
    if not is_cut or product is None or operands is None:
        return None
    swapped = only_user(product, aten.permute.default)
    dense = swapped and only_user(swapped, aten.clone.default)
    if swapped is None or list(swapped.args[1]) != SWAP_HEADS or not is_dense(dense or swapped):
        return None
    return operands[1], dense or swapped


def _softmax_of(scores: Node) -> Node | None:
    """The softmax of ``scores``, in float32, perhaps after their largest has been subtracted."""
    shifted = [sub for sub in users(scores, aten.sub.Tensor) if _is_largest(sub.args[1], scores)]
    for rounded in (scores, *shifted):
        for operand in (rounded, *users(rounded, CAST)):
            for difference in users(operand, aten.sub.Tensor):
                for exponential in users(difference, aten.exp.default):
                    for quotient in users(exponential, aten.div.Tensor):
                        if softmax_operand(quotient) is operand:
                            return quotient
    return None


def _is_largest(node: Any, scores: Node) -> bool:
    """Whether ``node`` is the largest of ``scores`` in each row, [..., 1]."""
    found = result_of(node, aten.max.dim)
    if found is not None:
        call, index = found
        return index == 0 and call.args[0] is scores and is_last_dim(scores, call.args[1]) and bool(call.args[2])
    if not is_call(node, aten.amax.default) or node.args[0] is not scores:
        return False
    dims = argument(node, 1, "dim")
    return len(dims) == 1 and is_last_dim(scores, dims[0]) and bool(argument(node, 2, "keepdim", False))


PATTERNS = [Pattern("sink_attention", "attention", (aten.cat.default,), match_sinks)]
