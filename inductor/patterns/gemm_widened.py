"""Products in float32 of two tensors that are 16 bits wide: routers cast their operands up before they multiply.

A matrix unit multiplies the 16-bit values exactly and sums in float32, so the casts only cost time.
"""

from typing import Any

import torch
from torch.fx import Node

from torch_deepinfer.inductor.matcher import LOW_PRECISION, Derived, Match, Pattern, aten, cast_to, dtype_of, is_call


def match_product(product: Node) -> Match | None:
    first, second = map(_narrow, product.args)
    if first is None or second is None or dtype_of(_source(first)) != dtype_of(_source(second)):
        return None
    return Match(torch.ops.deepinfer.gemm.default, (first, second), (product,), {"out_dtype": torch.float32})


def _narrow(node: Any) -> Node | Derived | None:
    """What ``node`` is a float32 copy of, with the views that lie between."""
    source = cast_to(node, torch.float32)
    if source is not None:
        return source if dtype_of(source) in LOW_PRECISION else None
    if not is_call(node, aten.view.default, aten.permute.default):
        return None
    narrow = _narrow(node.args[0])
    return None if narrow is None else Derived(node.target, narrow, node.args[1:])


def _source(narrow: Node | Derived) -> Node:
    while isinstance(narrow, Derived):
        narrow = narrow.node
    return narrow


PATTERNS = [Pattern("widened_gemm", "gemm", (aten.mm.default,), match_product)]
