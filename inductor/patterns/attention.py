"""Attention as torch has it: what a call of it says, and how one that says as much is made.

torch picks a kernel when it traces a model, by the arguments it sees then: [batch, heads, tokens, size] with keys that
are repeated for every head, and a mask. A pattern that has found out more asks for the kernel that suits that.
"""

import dataclasses
import operator
from typing import Any

import torch
from torch.fx import Node

from torch_deepinfer.inductor.masks import Span, span_of
from torch_deepinfer.inductor.matcher import (
    SWAP_HEADS,
    Derived,
    Match,
    argument,
    aten,
    is_call,
    is_dense,
    is_number,
    is_tensor,
    item,
    same,
    same_shape,
    shape_of,
    value,
)

ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
CUDNN = aten._scaled_dot_product_cudnn_attention.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
FLASH = aten._scaled_dot_product_flash_attention.default
FLASH_FORWARD = aten._flash_attention_forward.default
CALLS = (ON_CPU, CUDNN, EFFICIENT, FLASH)


@dataclasses.dataclass(frozen=True)
class Attention:
    """``softmax(scale * query @ key^T + mask) @ values`` of one call, without dropout.

    ``query``, ``key`` and ``values`` are [batch, heads, tokens, size]; ``mask`` is added to the scores. ``output`` is
    the one result that the graph uses.
    """

    query: Node
    key: Node
    values: Node
    mask: Node | None
    causal: bool
    scale: float | None
    output: Node


def read(call: Node) -> Attention | str:
    """What a call of one of ``CALLS`` computes, or why that is nothing that patterns know."""
    query, key, values = call.args[:3]
    if value(query).dim() != 4:
        return "attention without heads"
    takes_bias = call.target in (CUDNN, EFFICIENT)
    mask = argument(call, 3, "attn_bias") if takes_bias else call.kwargs.get("attn_mask")
    if not is_number(argument(call, 5 if takes_bias else 3, "dropout_p", 0.0), 0):
        return "attention with dropout"
    causal = bool(argument(call, 6 if takes_bias else 4, "is_causal", False))
    output = item(call, 0)
    if output is None or any(item(call, index) is not None for index in range(1, len(value(call)))):
        return "more than the result of the attention is used"
    return Attention(query, key, values, mask, causal, call.kwargs.get("scale"), output)


def unrepeated(node: Any) -> Node | None:
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


def span(mask: Node | None, causal: bool, query: Node, key: Node) -> Span | None:
    """What a token sees, if compiling knows it."""
    if causal:
        square = same(shape_of(query)[2], shape_of(key)[2])
        return Span(causal=True) if mask is None and square else None
    return Span(causal=False) if mask is None else span_of(mask) if is_tensor(mask) else None


def attend(
    query: Node, key: Node, values: Node, seen: Span, scale: float | None, by_token: bool = True
) -> Derived | None:
    """The call of the kernel that knows which tokens are seen; None where no kernel takes the arguments.

    Keys and values may have fewer heads than the query: on a GPU, or if that is of one token. The results of the call
    are :func:`result`, in the layout [batch, tokens, heads, size] if that is asked for, and :func:`log_sums`.
    """
    asked, causal = _dense_by_token(query) if by_token else query, seen.causal
    if value(query).device.type == "cpu":
        if seen.is_window:
            return None
        return Derived(ON_CPU, _packed(query, key) or asked, (key, values, 0.0, causal), {"scale": scale})
    params = _params(query, key, values, causal)
    if params is None:
        return None
    if not seen.is_window and torch.backends.cuda.can_use_cudnn_attention(params):
        return Derived(CUDNN, asked, (key, values, None, True, 0.0, causal, False), {"scale": scale})
    tokens, positions = shape_of(query)[2], shape_of(key)[2]
    is_static = isinstance(tokens, int) and isinstance(positions, int)
    if is_static and torch.backends.cuda.can_use_flash_attention(params):
        by_head = (Derived(aten.permute.default, given, (SWAP_HEADS,)) for given in (key, values))
        limits = {"window_size_left": seen.before, "window_size_right": 0} if seen.is_window else {}
        return Derived(
            FLASH_FORWARD,
            Derived(aten.permute.default, asked, (SWAP_HEADS,)),
            (*by_head, None, None, tokens, positions, 0.0, causal, False),
            {"scale": scale, **limits},
        )
    if is_static and not seen.is_window and torch.backends.cuda.can_use_efficient_attention(params):
        return Derived(EFFICIENT, asked, (key, values, None, True, 0.0, causal), {"scale": scale})
    return None


def attend_masked(
    query: Node, key: Node, values: Node, mask: Node, scale: float | None, by_token: bool = True
) -> Derived | None:
    """As :func:`attend`, with ``mask``, [batch or 1, heads or 1, tokens, positions], added to the scores."""
    asked = _dense_by_token(query) if by_token else query
    if value(query).device.type == "cpu":
        return Derived(ON_CPU, _packed(query, key) or asked, (key, values), {"attn_mask": mask, "scale": scale})
    params = _params(query, key, values, False, mask)
    if params is None or not torch.backends.cuda.can_use_cudnn_attention(params):
        return None
    of_heads = mask
    if not same(shape_of(mask)[1], shape_of(query)[1]):
        of_heads = Derived(aten.expand.default, mask, ([-1, shape_of(query)[1], -1, -1],))
    return Derived(CUDNN, asked, (key, values, of_heads, True, 0.0, False, False), {"scale": scale})


def result(call: Derived, query: Node) -> Derived:
    """[batch, heads, tokens, size]."""
    first = Derived(operator.getitem, call, (0,))
    if call.op is FLASH_FORWARD:
        return Derived(aten.permute.default, first, (SWAP_HEADS,))
    return _unpacked(call, first, [-1, shape_of(query)[1], 1, shape_of(call.args[1])[3]])


def log_sums(call: Derived, query: Node) -> Derived:
    """[batch, heads, tokens], float32: the logarithm of the sum of the exponentials of a token's scores."""
    second = Derived(operator.getitem, call, (1,))
    if call.op is EFFICIENT:  # has room for a multiple of 32
        return Derived(aten.slice.Tensor, second, (2, 0, shape_of(query)[2]))
    if call.op is CUDNN:
        return Derived(aten.squeeze.dim, second, (3,))
    return _unpacked(call, second, [-1, shape_of(query)[1], 1])


def pack(query: Node, shared: int) -> Derived:
    """One token of [batch, heads, 1, size], the heads of a group as tokens: [batch, heads of keys, group, size]."""
    heads, size = shape_of(query)[1], shape_of(query)[3]
    return Derived(aten.view.default, Derived(aten.squeeze.dim, query, (2,)), ([-1, shared, heads // shared, size],))


def _packed(query: Node, key: Node) -> Derived | None:
    """The heads of a group as tokens, where they share keys."""
    return None if same(shape_of(query)[1], shape_of(key)[1]) else pack(query, shape_of(key)[1])


def _unpacked(call: Derived, packed: Derived, shape: list[Any]) -> Derived:
    """A result of ``call`` with heads as heads again, in ``shape``."""
    if call.op is not ON_CPU or not isinstance(call.node, Derived) or call.node.op is not aten.view.default:
        return packed
    dense = Derived(aten.clone.default, packed, (), {"memory_format": torch.contiguous_format})
    return Derived(aten.view.default, dense, (shape,))


def in_place_of(attention: Attention, call: Derived) -> Match:
    """``call`` computes what ``attention`` does."""
    return Match(
        call.op,
        (call.node, *call.args),
        (attention.output, *[None] * (len(call.op._schema.returns) - 1)),
        call.kwargs,
        permutation=SWAP_HEADS if call.op is FLASH_FORWARD else None,
        known=() if attention.mask is None else (attention.mask,),
    )


def _dense_by_token(query: Node) -> Node | Derived:
    """``query`` in the layout that the result of every kernel then has as well."""
    if is_dense(query, SWAP_HEADS):
        return query
    by_token = Derived(aten.permute.default, query, (SWAP_HEADS,))
    dense = Derived(aten.clone.default, by_token, (), {"memory_format": torch.contiguous_format})
    return Derived(aten.permute.default, dense, (SWAP_HEADS,))


def _params(query: Node, key: Node, values: Node, causal: bool, mask: Node | None = None) -> Any:
    """The question of whether a kernel takes these arguments, in torch's terms; None where it cannot be asked."""
    if value(query).device.type != "cuda" or not torch.cuda.is_available():
        return None
    tensors: list[Any] = [given if given is None else _sized(value(given)) for given in (query, key, values, mask)]
    if any(tensor is None for tensor in tensors[:3]):
        return None
    shared = tensors[0].shape[1] != tensors[1].shape[1]
    ask: Any = torch.backends.cuda.SDPAParams
    return ask(*tensors, 0.0, causal, shared)


def _sized(tensor: torch.Tensor) -> torch.Tensor | None:
    """A fake tensor of the sizes that dynamic ones had when they were traced: asking about it adds no guard."""
    if not any(isinstance(size, torch.SymInt) for size in (*tensor.shape, *tensor.stride())):
        return tensor
    hints = [size.node.hint if isinstance(size, torch.SymInt) else size for size in (*tensor.shape, *tensor.stride())]
    dims = tensor.dim()
    return None if None in hints else tensor.new_empty_strided(hints[:dims], hints[dims:])
