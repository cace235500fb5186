"""Attention of many tokens on Hopper, all of which see everything or what is before them: a kernel of our own.

Its result has the heads of a token side by side, which is what models go on with: where another kernel would return
the tokens of a head side by side, the copy that follows is saved as well.
"""

import functools
from typing import Any

import torch
from torch.fx import Node

from torch_deepinfer import jit
from torch_deepinfer.inductor.matcher import (
    LOW_PRECISION,
    SWAP_HEADS,
    Match,
    Pattern,
    aten,
    dtype_of,
    is_dense,
    only_user,
    shape_of,
    value,
)
from torch_deepinfer.inductor.patterns.attention import CALLS, Attention, read, span, unrepeated

HEADS = {(192, 128), (128, 128), (64, 64)}  # sizes of the heads of queries and values
LEAST_TOKENS = 256


def match_attention(call: Node) -> Match | None:
    attention = read(call)
    if not isinstance(attention, Attention) or not _takes(attention):
        return None
    query, key, values = attention.query, attention.key, attention.values
    seen = span(attention.mask, attention.causal, query, key)
    found = _by_token(attention.output)
    if seen is None or seen.is_window or found is None:
        return None
    shared_key, shared_values = unrepeated(key), unrepeated(values)
    if shared_key is not None and shared_values is not None:
        key, values = shared_key, shared_values
    output, permutation = found
    return Match(
        torch.ops.deepinfer.attention.default,
        (query, key, values),
        (output,),
        {"scale": attention.scale, "causal": seen.causal},
        permutation=permutation,
        known=() if attention.mask is None else (attention.mask,),
    )


def _takes(attention: Attention) -> bool:
    query, values = attention.query, attention.values
    return (
        value(query).device.type == "cuda"
        and dtype_of(query) in LOW_PRECISION
        and (shape_of(query)[3], shape_of(values)[3]) in HEADS
        and _hint(shape_of(query)[2]) >= LEAST_TOKENS
        and (attention.scale is None or attention.scale > 0)
        and _is_hopper()
    )


def _hint(size: Any) -> int:
    """The size that a dynamic one had when it was traced; 0 if there was none."""
    return size if isinstance(size, int) else size.node.hint or 0


@functools.cache
def _is_hopper() -> bool:
    return jit.available() and jit.device_arch() == "sm_90a"


def _by_token(output: Node) -> tuple[Node, list[int] | None] | None:
    """The result, or its dense copy with tokens before heads; and the order in which that has the dimensions."""
    if is_dense(output, SWAP_HEADS):
        return output, None
    swapped = only_user(output, aten.permute.default)
    dense = swapped and only_user(swapped, aten.clone.default)
    if swapped is None or dense is None or list(swapped.args[1]) != SWAP_HEADS or not is_dense(dense):
        return None
    return dense, SWAP_HEADS


PATTERNS = [Pattern("prefill_attention", "attention", CALLS, match_attention)]
