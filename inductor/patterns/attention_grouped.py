"""Attention on a GPU whose heads share keys that the model repeats: cuDNN's kernel reads each key once, as it is.

A mask that nothing is known about stays. See ``attention_span`` for the others and ``attention_packed`` for one token
where cuDNN does not help.
"""

from torch.fx import Node

from torch_deepinfer.inductor.matcher import SWAP_HEADS, Match, Pattern, is_dense, is_tensor, value
from torch_deepinfer.inductor.patterns.attention import (
    CUDNN,
    EFFICIENT,
    FLASH,
    Attention,
    attend_masked,
    in_place_of,
    read,
    unrepeated,
)


def match_attention(call: Node) -> Match | None:
    attention = read(call)
    if not isinstance(attention, Attention) or value(attention.query).device.type != "cuda":
        return None
    key, values, mask = unrepeated(attention.key), unrepeated(attention.values), attention.mask
    if key is None or values is None or attention.causal or not is_tensor(mask) or value(mask).dim() != 4:
        return None
    by_token = is_dense(attention.output, SWAP_HEADS)
    replaced = attend_masked(attention.query, key, values, mask, attention.scale, by_token)
    return None if replaced is None else in_place_of(attention, replaced)


PATTERNS = [Pattern("grouped_query_attention", "attention", (CUDNN, EFFICIENT, FLASH), match_attention)]
