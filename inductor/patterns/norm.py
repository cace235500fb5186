"""RMSNorm, alone or behind a residual addition.

The anchor is ``rsqrt(mean(h^2) + eps)``. What differs between models is how the weight comes in; see the weight forms
of :func:`torch_deepinfer.ops.rms_norm`.
"""

import dataclasses
from typing import Any

import torch
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
    cast_to,
    commuted,
    dtype_of,
    is_call,
    is_dense,
    is_last_dim,
    is_number,
    is_tensor,
    number,
    only_user,
    same,
    same_shape,
    same_value,
    shape_of,
    uncast,
    users,
    value,
)


@dataclasses.dataclass
class Norm:
    """``output`` is the norm of the rows of ``x``."""

    x: Node
    weight: Node | None
    eps: float
    form: str
    output: Node


def match_rms_norm(anchor: Node) -> Match | Miss | None:
    norm = norm_at(anchor)
    if not isinstance(norm, Norm):
        return norm
    swapped = is_dense(norm.output, SWAP_HEADS) and not is_dense(norm.output)
    x = Derived(aten.permute.default, norm.x, (SWAP_HEADS,)) if swapped else norm.x
    return Match(
        torch.ops.deepinfer.rms_norm.default,
        (x, norm.weight, norm.eps, *form_argument(norm)),
        (norm.output,),
        variant=norm.form,
        permutation=SWAP_HEADS if swapped else None,
    )


def match_add_rms_norm(anchor: Node) -> Match | Miss | None:
    norm = norm_at(anchor)
    if not isinstance(norm, Norm) or not is_call(norm.x, aten.add.Tensor) or norm.x.kwargs:
        return None
    residual, branch = norm.x.args
    if not is_tensor(residual) or not is_tensor(branch):
        return None
    if _is_end_of_rotation(residual, branch):
        return None
    if not same_shape(residual, branch) or {dtype_of(residual), dtype_of(branch)} != {dtype_of(norm.x)}:
        return None
    arguments = (branch, residual, norm.weight, norm.eps, *form_argument(norm))
    return Match(torch.ops.deepinfer.add_rms_norm.default, arguments, (norm.output, norm.x), variant=norm.form)


def _is_end_of_rotation(*addends: Node) -> bool:
    """Whether this is ``x * cos + rotate(x) * sin``, where a norm of q or k follows a rotary embedding."""
    factors = [factor for addend in addends if is_call(addend, aten.mul.Tensor) for factor in addend.args]
    return any(is_call(f.args[0] if is_call(f, aten.view.default) else f, aten.cat.default) for f in factors)


def form_argument(norm: Norm) -> tuple[str, ...]:
    return () if norm.form == "cast_mul" else (norm.form,)


def norm_at(anchor: Node) -> Norm | Miss | None:
    """The norm that the call ``anchor``, one of ``ANCHORS``, is part of."""
    if is_call(anchor, aten.pow.Tensor_Scalar) and anchor.args[1] != -0.5:
        return None
    mean, eps = _mean_and_eps(anchor.args[0])
    if mean is None:
        return None
    hidden = _squared(mean.args[0])
    if hidden is None:
        return None
    dims = argument(mean, 1, "dim")
    if len(dims) != 1 or not is_last_dim(hidden, dims[0]) or not argument(mean, 2, "keepdim", False):
        return Miss("the mean is not over the last dimension alone, kept as a dimension of size 1")
    if eps is None or eps < 0:
        return Miss("eps is not a constant")
    if dtype_of(hidden) != torch.float32:
        return Miss(f"statistics in {dtype_of(hidden)}; the op computes them in float32")
    products = [user for user in users(anchor, aten.mul.Tensor) if any(same_value(hidden, a) for a in user.args)]
    if len(products) != 1:
        return Miss("the rows are not multiplied once by the inverse of their norm")
    x = uncast(hidden, *LOW_PRECISION)
    weighted = _weighted(products[0], x)
    if isinstance(weighted, Miss):
        return weighted
    output, weight, form = weighted
    if weight is not None and dtype_of(weight) not in FLOATS:
        return Miss(f"weight of {dtype_of(weight)}")
    return Norm(x, weight, float(eps), form, output)


def _mean_and_eps(total: Any) -> tuple[Node | None, float | int | None]:
    if not is_call(total, aten.add.Tensor) or total.kwargs:
        return None, None
    for mean, eps in commuted(total):
        if is_call(mean, aten.mean.dim) and not mean.kwargs.get("dtype"):
            return mean, number(eps)
    return None, None


def _squared(node: Any) -> Node | None:
    if is_call(node, aten.pow.Tensor_Scalar) and node.args[1] == 2:
        return node.args[0]
    if is_call(node, aten.mul.Tensor) and same_value(*node.args):
        return node.args[0]
    return None


def _weighted(normed: Node, x: Node) -> tuple[Node, Node | None, str] | Miss:
    """``(output, weight, form)`` for the fp32 product ``normed``."""
    rounded = only_user(normed, CAST)
    if rounded is not None and dtype_of(rounded) == dtype_of(x):
        product = _times_weight(rounded, x)
        return (rounded, None, "none") if product is None else (*product, "cast_mul")
    product = _times_weight(normed, x)
    if product is None:
        if dtype_of(x) == torch.float32:
            return normed, None, "none"
        return Miss("the normalised rows are used in float32")
    output, weight = product
    shifted = _minus_one(weight)
    if dtype_of(x) == torch.float32:
        return (output, weight, "cast_mul") if shifted is None else (output, shifted, "one_plus")
    rounded = only_user(output, CAST)
    if rounded is None or dtype_of(rounded) != dtype_of(x):
        return Miss("the weighted rows are used in float32")
    if shifted is not None:
        return rounded, shifted, "one_plus"
    return rounded, uncast(weight, *LOW_PRECISION), "mul_cast"


def _times_weight(node: Node, x: Node) -> tuple[Node, Node] | None:
    """``(product, weight)`` if the only use of ``node`` is a product with a vector as long as the rows of ``x``."""
    product = only_user(node, aten.mul.Tensor)
    if product is None:
        return None
    weight = product.args[1] if product.args[0] is node else product.args[0]
    if not is_tensor(weight) or value(weight).dim() != 1 or not same(shape_of(weight)[0], shape_of(x)[-1]):
        return None
    return product, weight


def _minus_one(weight: Node) -> Node | None:
    """``w`` if ``weight`` is ``1 + w`` in fp32."""
    if not is_call(weight, aten.add.Tensor) or not is_number(weight.args[1], 1) or dtype_of(weight) != torch.float32:
        return None
    return cast_to(weight.args[0], torch.float32) or weight.args[0]


ANCHORS = (aten.rsqrt.default, aten.pow.Tensor_Scalar)
PATTERNS = [
    Pattern("add_rms_norm", "norm", ANCHORS, match_add_rms_norm),
    Pattern("rms_norm", "norm", ANCHORS, match_rms_norm),
]
