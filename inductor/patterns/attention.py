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
    argument,
    aten,
    is_call,
    is_number,
    is_tensor,
    item,
    same,
    same_shape,
    shape_of,
    value,
)

ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
ON_CUDA = (aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default)


def match_attention(call: Node) -> Match | Miss | None:
    query, key, values = call.args[:3]
    keys, repeated_values = _unrepeated(key), _unrepeated(values)
    if keys is None or repeated_values is None or value(query).dim() != 4 or not same(shape_of(query)[2], 1):
        return None
    heads, size, shared = shape_of(query)[1], shape_of(query)[3], shape_of(keys)[1]
    if not all(isinstance(each, int) for each in (heads, size, shared)):
        return Miss("the number of heads is not a constant")
    if shape_of(repeated_values)[1] != shared:
        return Miss("keys and values are not repeated alike")
    dropout = argument(call, 3 if call.target is ON_CPU else 5, "dropout_p", 0.0)
    causal = argument(call, 4 if call.target is ON_CPU else 6, "is_causal", False)
    if not is_number(dropout, 0) or causal:
        return Miss("attention with dropout, or of the first position only")
    mask = argument(call, 3, "attn_bias") if call.target in ON_CUDA else call.kwargs.get("attn_mask")
    if mask is not None and not _is_of_all_heads(mask):
        return Miss("the heads have masks of their own")
    output, count = item(call, 0), len(value(call))
    if output is None or any(item(call, index) is not None for index in range(1, count)):
        return Miss("more than the result of the attention is used")
    packed = Derived(aten.view.default, Derived(aten.squeeze.dim, query, (2,)), ([-1, shared, heads // shared, size],))
    arguments: tuple[Any, ...] = (packed, keys, repeated_values)
    kwargs = dict(call.kwargs)
    if call.target is ON_CPU:
        arguments += tuple(call.args[3:])
        kwargs["attn_mask"] = _mask_of(mask, shared)
    else:
        mask = _mask_of(mask, shared)
        if mask is not None:
            mask = Derived(aten.expand.default, mask, ([-1, -1, heads // shared, -1],))
        arguments += (mask, *call.args[4:])
    return Match(call.target, arguments, (output, *[None] * (count - 1)), kwargs, view=[-1, heads, 1, size])


def _unrepeated(node: Any) -> Node | None:
    """[batch, heads of keys, positions, size] of which every head comes several times in ``node``."""
    if not is_call(node, aten.view.default) or value(node).dim() != 4:
        return None
    repeated = node.args[0]
    if is_call(repeated, aten.clone.default):
        repeated = repeated.args[0]
    if not is_call(repeated, aten.expand.default):
        return None
    single = _whole(repeated.args[0])
    if not is_call(single, aten.unsqueeze.default) or single.args[1] != 2 or value(single).dim() != 5:
        return None
    source, shape = single.args[0], shape_of(repeated)
    merged = (shape[0], shape[1] * shape[2], *shape[3:])
    return source if all(map(same, shape_of(node), merged)) and same(shape[1], shape_of(source)[1]) else None


def _whole(node: Any) -> Any:
    """``node`` before slices that leave everything in: of a dynamic dimension they stay in the graph."""
    while is_call(node, aten.slice.Tensor) and same_shape(node, node.args[0]) and argument(node, 4, "step", 1) == 1:
        node = node.args[0]
    return node


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


PATTERNS = [Pattern("packed_attention", "attention", (ON_CPU, *ON_CUDA), match_attention)]
