"""What all spellings of the experts of a model have in common, and the op that takes their place."""

import dataclasses
from typing import Any

import torch
from torch.fx import Node

from torch_deepinfer.inductor.matcher import (
    CAST,
    FLOATS,
    SWAP_MATRICES,
    Derived,
    Match,
    Miss,
    aten,
    dtype_of,
    is_call,
    is_even_and_odd,
    is_split_in_halves,
    is_tensor,
    only_user,
    part,
    same,
    same_shape,
    shape_of,
    value,
)
from torch_deepinfer.inductor.patterns.activation import Gated, gated


@dataclasses.dataclass
class Linear:
    """A weight for each expert, [experts, out, in], and a bias, [experts, out]."""

    weight: Node | Derived
    bias: Node | None


@dataclasses.dataclass
class Activation:
    """A gated activation; gate and up are the halves of ``source``, or alternate in it."""

    gated: Gated
    source: Node
    interleaved: bool


@dataclasses.dataclass
class Experts:
    """``tokens`` is [tokens, in]; ``ids`` and ``weights`` say for each token which experts are asked, and trusted.

    Without weights all count alike, and the experts see the tokens times ``scores``, [tokens, 1].
    """

    tokens: Node
    ids: Node
    weights: Node | None
    gate_up: Linear
    down: Linear
    activation: Activation
    scores: Derived | None = None


def swap(total: Node, experts: Experts) -> Match | Miss:
    """One ``fused_experts`` for everything that leads to the sum ``total``, and the cast behind it."""
    tokens, ids, weights = experts.tokens, experts.ids, experts.weights
    if not same_shape(ids, weights or ids) or not same(shape_of(ids)[0], shape_of(tokens)[0]):
        given = list(shape_of(weights or ids))
        return Miss(f"{shape_of(tokens)[0]} tokens, ids {list(shape_of(ids))}, weights {given}")
    output = total
    if dtype_of(total) != dtype_of(tokens):
        cast = only_user(total, CAST)
        if cast is None or dtype_of(cast) != dtype_of(tokens):
            return Miss(f"tokens of {dtype_of(tokens)} give a result of {dtype_of(total)}")
        output = cast
    weight = _read_from(experts.gate_up.weight)
    if dtype_of(tokens) not in FLOATS or dtype_of(weight) != dtype_of(tokens):
        return Miss(f"tokens of {dtype_of(tokens)}, weights of {dtype_of(weight)}")
    activation = experts.activation.gated
    kwargs = _activation_arguments(activation, experts.activation.interleaved)
    if experts.gate_up.bias is not None:
        kwargs["gate_up_bias"] = experts.gate_up.bias
    if experts.down.bias is not None:
        kwargs["down_bias"] = experts.down.bias
    ones = Derived(aten.full_like.default, ids, (1.0,), {"dtype": torch.float32})
    rows = tokens if experts.scores is None else Derived(aten.mul.Tensor, tokens, (experts.scores,))
    arguments = (rows, experts.gate_up.weight, experts.down.weight, ids, weights or ones)
    variant = activation.activation + (", clamped" if activation.limit is not None else "")
    return Match(torch.ops.deepinfer.fused_experts.default, arguments, (output,), kwargs, variant)


def activation_between(product: Node) -> Activation | Miss:
    """The activation that makes ``product``, the rows of the second linear, out of one tensor."""
    found = gated(product)
    if found is None:
        return Miss("no known gated activation between the products")
    gate, up = part(found.gate), part(found.up)
    if gate is not None and up is not None:
        gate, up = (dataclasses.replace(each, source=resqueezed(each.source)) for each in (gate, up))
        if is_split_in_halves(gate, up):
            return Activation(found, gate.source, False)
        if is_even_and_odd(gate, up):
            return Activation(found, gate.source, True)
    return Miss("gate and up are not the two parts of one product")


def resqueezed(node: Any) -> Any:
    """``node`` before a dimension was put in and taken out again, as an in-place addition through a view leaves it."""
    while is_call(node, aten.squeeze.dim) and is_call(node.args[0], aten.unsqueeze.default):
        inner = node.args[0]
        rank = value(inner).dim()
        if inner.args[1] % rank != node.args[1] % rank:
            break
        node = inner.args[0]
    return node


def indexed(node: Any) -> tuple[Node, Node] | None:
    """``(source, rows)`` if ``node`` is ``source[rows]``."""
    if not is_call(node, aten.index.Tensor) or len(node.args[1]) != 1 or not is_tensor(node.args[1][0]):
        return None
    return node.args[0], node.args[1][0]


def flattened(node: Node) -> Node | None:
    """The [tokens, k] tensor that ``node`` is the flat view of."""
    if not is_call(node, aten.view.default) or value(node).dim() != 1 or value(node.args[0]).dim() != 2:
        return None
    return node.args[0]


def transposed(weight: Node) -> Node | Derived:
    """The [experts, out, in] tensor whose [experts, in, out] view the product reads."""
    if is_call(weight, aten.permute.default) and list(weight.args[1]) == SWAP_MATRICES:
        return weight.args[0]
    return Derived(aten.permute.default, weight, (SWAP_MATRICES,))


def _read_from(weight: Node | Derived) -> Node:
    while isinstance(weight, Derived):
        weight = weight.node
    return weight


def _activation_arguments(activation: Gated, interleaved: bool) -> dict[str, Any]:
    kwargs: dict[str, Any] = {}
    if activation.activation != "silu":
        kwargs["activation"] = activation.activation
    if interleaved:
        kwargs["interleaved"] = True
    if activation.limit is not None:
        kwargs |= {"limit": activation.limit, "alpha": activation.alpha, "up_offset": activation.up_offset}
    return kwargs
