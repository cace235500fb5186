"""Attention of one token whose heads share keys: the heads of a group become the tokens of one head.

Models repeat keys and values for every head of a group, and so write them once and read them once more for each. One
token sees the same positions in all heads, so that [batch, heads, 1, size] may as well be attended to as
[batch, heads of keys, heads of a group, size], with the keys as they are. That is torch's own attention, with other
shapes; transformers does the same when it is not compiled.
"""

from typing import Any

from torch.fx import Node

from torch_deepinfer.inductor.matcher import (
    Derived,
    Match,
    Miss,
    Pattern,
    aten,
    is_call,
    is_tensor,
    same,
    shape_of,
    value,
)
from torch_deepinfer.inductor.patterns.attention import CUDNN, EFFICIENT, ON_CPU, pack, read, unrepeated


def match_attention(call: Node) -> Match | Miss | None:
    query, key, values = call.args[:3]
    keys, repeated_values = unrepeated(key), unrepeated(values)
    if keys is None or repeated_values is None or value(query).dim() != 4 or not same(shape_of(query)[2], 1):
        return None
    heads, size, shared = shape_of(query)[1], shape_of(query)[3], shape_of(keys)[1]
    if not all(isinstance(each, int) for each in (heads, size, shared)):
        return Miss("the number of heads is not a constant")
    if shape_of(repeated_values)[1] != shared:
        return Miss("keys and values are not repeated alike")
    attention = read(call)
    if isinstance(attention, str):
        return Miss(attention)
    if attention.causal:
        return Miss("attention of the first position only")
    mask = attention.mask
    if mask is not None and not _is_of_all_heads(mask):
        return Miss("the heads have masks of their own")
    arguments: tuple[Any, ...] = (pack(query, shared), keys, repeated_values)
    kwargs = dict(call.kwargs)
    if call.target is ON_CPU:
        arguments += tuple(call.args[3:])
        kwargs["attn_mask"] = _mask_of(mask, shared)
    else:
        mask = _mask_of(mask, shared)
        if mask is not None:
            mask = Derived(aten.expand.default, mask, ([-1, -1, heads // shared, -1],))
        arguments += (mask, *call.args[4:])
    outputs = (attention.output, *[None] * (len(call.target._schema.returns) - 1))
    return Match(call.target, arguments, outputs, kwargs, view=[-1, heads, 1, shape_of(repeated_values)[3]])


def _is_of_all_heads(mask: Any) -> bool:
    """Whether all heads have the same mask, [batch, 1, 1, positions] or that expanded."""
    if not is_tensor(mask) or value(mask).dim() != 4:
        return False
    single = mask.args[0] if is_call(mask, aten.expand.default) and value(mask.args[0]).dim() == 4 else mask
    return same(shape_of(single)[1], 1) and same(shape_of(mask)[2], 1)


def _mask_of(mask: Node | None, shared: int) -> Node | Derived | None:
    """The mask for as many heads as there are heads of keys; one for all stays as it is."""
    if mask is None or same(shape_of(mask)[1], 1):
        return mask
    return Derived(aten.slice.Tensor, mask, (1, 0, shared))


PATTERNS = [Pattern("packed_attention", "attention", (ON_CPU, EFFICIENT, CUDNN), match_attention)]
