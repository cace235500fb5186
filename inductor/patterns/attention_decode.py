"""Attention of few tokens over many keys, as decoding has it, on a GPU: a kernel of our own.

It is bound by reading the cache. Keys that a group of heads shares are read once and as they are, masked stretches of
the cache not at all, and the mask is the one of booleans that the model made, before torch spread it over heads, turned
it into what is added to scores and padded it.
"""

import functools
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torch_deepinfer.inductor.masks import LOWEST
from torch_deepinfer.inductor.matcher import (
    LOW_PRECISION,
    Match,
    Pattern,
    argument,
    aten,
    dtype_of,
    is_call,
    is_tensor,
    number,
    same_shape,
    shape_of,
    value,
)
from torch_deepinfer.inductor.patterns.attention import CALLS, Attention, read, unrepeated

MOST_TOKENS, MOST_ROWS = 8, 64  # of queries; of queries and heads that share keys
# Of all sequences and heads, where heads share keys: on more, cuDNN's kernel is faster unless a mask hides many.
MOST_SHARED_KEYS = 1 << 14


def match_attention(call: Node) -> Match | None:
    attention = read(call)
    if not isinstance(attention, Attention):
        return None
    key, values = attention.key, attention.values
    shared_key, shared_values = unrepeated(key), unrepeated(values)
    if shared_key is not None and shared_values is not None:
        key, values = shared_key, shared_values
    mask = attention.mask
    if not _takes(attention.query, key, mask):
        return None
    return Match(
        torch.ops.deepinfer.attention.default,
        (attention.query, key, values, None if mask is None else _as_made(mask)),
        (attention.output,),
        {"scale": attention.scale, "causal": attention.causal},
        known=() if mask is None else (mask,),
    )


def _takes(query: Node, key: Node, mask: Any) -> bool:
    heads, tokens = shape_of(query)[1:3]
    batch, shared, positions = shape_of(key)[:3]
    return (
        value(query).device.type == "cuda"
        and dtype_of(query) in LOW_PRECISION
        and all(isinstance(size, int) for size in (heads, tokens, shared))
        and tokens <= MOST_TOKENS
        and heads // shared * tokens <= MOST_ROWS
        and (heads == shared or statically_known_true(batch * shared * positions <= MOST_SHARED_KEYS))
        and (mask is None or is_tensor(mask))
        and _has_fast_kernel()
    )


@functools.cache
def _has_fast_kernel() -> bool:
    """It needs the matrix unit of compute capability 8.0."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


def _as_made(mask: Node) -> Node:
    """The mask before it was expanded, padded, or made of booleans that say what is seen."""
    while True:
        if is_call(mask, aten.expand.default) and value(mask.args[0]).dim() == value(mask).dim():
            mask = mask.args[0]
        elif (source := _unpadded(mask)) is not None:
            mask = source
        else:
            return _condition(mask) or mask


def _unpadded(mask: Any) -> Node | None:
    """What the first columns of ``mask`` were, before columns were put behind them for alignment."""
    if not is_call(mask, aten.slice.Tensor) or not is_call(mask.args[0], aten.constant_pad_nd.default):
        return None
    padded = mask.args[0]
    is_first = argument(mask, 1, "dim", 0) in (-1, value(mask).dim() - 1) and argument(mask, 2, "start") in (None, 0)
    added, source = padded.args[1], padded.args[0]
    is_behind = len(added) == 2 and added[0] == 0
    return source if is_first and is_behind and same_shape(source, mask) else None


def _condition(mask: Node) -> Node | None:
    """``seen`` if the mask is ``where(seen, 0, lowest)``."""
    if not is_call(mask, aten.where.self):
        return None
    seen, visible, hidden = mask.args
    lowest = number(hidden)
    return seen if number(visible) == 0 and lowest is not None and lowest <= LOWEST else None


PATTERNS = [Pattern("decode_attention", "attention", CALLS, match_attention)]
