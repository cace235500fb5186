"""Attention under a mask that says no more than "causal", "a window" or "everything", as compiling finds out.

Without a mask kernels skip what is not seen, and on a GPU they read keys that several heads share as they are.
"""

from torch.fx import Node

from torch_deepinfer.inductor.matcher import SWAP_HEADS, Match, Pattern, is_dense, value
from torch_deepinfer.inductor.patterns.attention import CALLS, Attention, attend, in_place_of, read, span, unrepeated


def match_attention(call: Node) -> Match | None:
    attention = read(call)
    if not isinstance(attention, Attention):
        return None
    query, key, values = attention.query, attention.key, attention.values
    seen = span(attention.mask, attention.causal, query, key)
    if seen is None:
        return None
    by_token = is_dense(attention.output, SWAP_HEADS)
    replaced = None
    shared_key, shared_values = unrepeated(key), unrepeated(values)
    if value(query).device.type == "cuda" and shared_key is not None and shared_values is not None:
        replaced = attend(query, shared_key, shared_values, seen, attention.scale, by_token)
    if replaced is None and attention.mask is not None:
        replaced = attend(query, key, values, seen, attention.scale, by_token)
    return None if replaced is None else in_place_of(attention, replaced)


PATTERNS = [Pattern("maskless_attention", "attention", CALLS, match_attention)]
