"""Attention of many tokens with latent heads: the columns that are rotated need not be put behind the others.

Tried when rotations and attention are ops of ours already; the attention reads both parts of a head where they are,
and the rotated part of the keys once for all heads.
"""

import operator
from typing import Any

import torch
from torch.fx import Node

from torch_deepinfer.inductor.matcher import (
    SWAP_HEADS,
    Derived,
    Match,
    Pattern,
    argument,
    aten,
    is_call,
    result_of,
    shape_of,
)

ATTENTION = torch.ops.deepinfer.attention.default
HEADS = torch.ops.deepinfer.mla_qk_rope.default
ROTATION = torch.ops.deepinfer.rotary_embedding.default
PIECE = 64  # columns that the kernel loads at once


def match_latent_attention(call: Node) -> Match | None:
    query, key, values = call.args[:3]
    if argument(call, 3, "mask") is not None or "query_rope" in call.kwargs:
        return None
    (query, swaps_query), (key, swaps_key) = map(_unswapped, (query, key))
    first, second = result_of(query, HEADS), result_of(key, HEADS)
    if first is None or second is None or swaps_query != swaps_key:
        return None
    heads = first[0]
    if first != (heads, 0) or second != (heads, 1):
        return None
    q, k_nope, k_rope = heads.args[:3]
    if k_nope is None or len(shape_of(q)) != 4 or len(shape_of(k_rope)) != 4:
        return None
    rope, nope = shape_of(k_rope)[-1], shape_of(k_nope)[-1]
    if rope % PIECE != 0 or nope % PIECE != 0:
        return None
    rotated = Derived(ROTATION, _columns(q, nope, nope + rope), (k_rope, *heads.args[3:]), dict(heads.kwargs))
    parts: list[Any] = [_columns(q, 0, nope), k_nope, *(Derived(operator.getitem, rotated, (i,)) for i in range(2))]
    if swaps_query:
        parts = [Derived(aten.permute.default, each, (SWAP_HEADS,)) for each in parts]
    kwargs = {**call.kwargs, "query_rope": parts[2], "key_rope": parts[3]}
    return Match(ATTENTION, (parts[0], parts[1], values), (call,), kwargs)


def _unswapped(node: Node) -> tuple[Node, bool]:
    """[batch, tokens, heads, size] behind the view with heads first, or the node itself."""
    if is_call(node, aten.permute.default) and list(node.args[1]) == SWAP_HEADS:
        return node.args[0], True
    return node, False


def _columns(node: Node, start: int, end: int) -> Derived:
    return Derived(aten.slice.Tensor, node, (3, start, end))


PATTERNS = [Pattern("latent_attention", "attention", (ATTENTION,), match_latent_attention)]
