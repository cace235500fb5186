"""Gated activations: ``act(gate) * up`` in the spellings of SwiGLU, GeGLU and the clamped form of GPT-OSS.

``gated`` reads one of them off the graph and is shared with the expert pattern, where the same arithmetic stands
between two grouped matrix products.
"""

import dataclasses
import math
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from torch_deepinfer.inductor.matcher import (
    FLOATS,
    Match,
    Miss,
    Pattern,
    aten,
    cast_to,
    commuted,
    dtype_of,
    is_call,
    is_number,
    is_split_in_halves,
    is_tensor,
    number,
    part,
    same_shape,
    shape_of,
    uncast,
)


@dataclasses.dataclass
class Gated:
    """``activation(gate) * up``; with ``limit`` both are clamped first and ``up_offset`` is added to ``up``."""

    gate: Node
    up: Node
    activation: str
    limit: float | None = None
    alpha: float = 1.0
    up_offset: float = 0.0


def gated(product: Node) -> Gated | None:
    """The gated activation that ends in the multiplication ``product``, if it is one."""
    if not is_call(product, aten.mul.Tensor):
        return None
    for activated, up in commuted(product):
        if not is_tensor(activated) or not is_tensor(up) or dtype_of(activated) != dtype_of(up):
            continue
        for activation, operand in (("silu", _silu), ("gelu_tanh", _gelu_tanh), ("gelu", _gelu)):
            gate = operand(activated)
            if gate is not None:
                limited = _limited(gate, up) if activation == "silu" else None
                return limited or Gated(gate, up, activation)
        clamped = _clamped(activated, up)
        if clamped is not None:
            return clamped
    return None


def _unrounded(node: Node) -> tuple[Node | None, torch.dtype]:
    """The fp32 value that ``node`` rounds (None if ``node`` was computed in 16 bits), and the dtype of ``node``."""
    dtype = dtype_of(node)
    return (node if dtype == torch.float32 else cast_to(node, dtype)), dtype


def _operand(node: Any, dtype: torch.dtype) -> Node | None:
    """The tensor of ``dtype`` whose fp32 value ``node`` is."""
    if not is_tensor(node):
        return None
    source = uncast(node, dtype)
    return source if dtype_of(source) == dtype else None


def _silu(node: Node) -> Node | None:
    """``x`` of ``x / (1 + exp(-x))``, computed in fp32 and rounded once."""
    division, dtype = _unrounded(node)
    if not is_call(division, aten.div.Tensor):
        return None
    assert division is not None
    x, denominator = division.args
    if not is_call(denominator, aten.add.Tensor) or not is_number(denominator.args[1], 1):
        return None
    exp = denominator.args[0]
    if not is_call(exp, aten.exp.default) or not is_call(exp.args[0], aten.neg.default):
        return None
    return _operand(x, dtype) if exp.args[0].args[0] is x else None


def _gelu_tanh(node: Node) -> Node | None:
    """``x`` of ``0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))``, computed in fp32 and rounded once."""
    product, dtype = _unrounded(node)
    if not is_call(product, aten.mul.Tensor):
        return None
    for half, bell in commuted(product):
        if not is_call(half, aten.mul.Tensor) or not is_number(half.args[1], 0.5) or not _is_one_plus(bell):
            continue
        x, tanh = half.args[0], bell.args[0]
        if not is_call(tanh, aten.tanh.default) or not is_call(tanh.args[0], aten.mul.Tensor):
            continue
        inner, factor = tanh.args[0].args
        if not _is_close(factor, math.sqrt(2 / math.pi)) or not is_call(inner, aten.add.Tensor):
            continue
        linear, cubic = inner.args[0], inner.args[1]
        if linear is not x or not is_call(cubic, aten.mul.Tensor) or not _is_close(cubic.args[1], 0.044715):
            continue
        if _is_cube(cubic.args[0], x):
            return _operand(x, dtype)
    return None


def _gelu(node: Node) -> Node | None:
    """``x`` of ``0.5 x (1 + erf(x / sqrt(2)))``, computed in fp32 and rounded once."""
    product, dtype = _unrounded(node)
    if not is_call(product, aten.mul.Tensor):
        return None
    for half, bell in commuted(product):
        if not is_call(half, aten.mul.Tensor) or not is_number(half.args[1], 0.5) or not _is_one_plus(bell):
            continue
        x, erf = half.args[0], bell.args[0]
        if not is_call(erf, aten.erf.default) or not is_call(erf.args[0], aten.mul.Tensor):
            continue
        if erf.args[0].args[0] is x and _is_close(erf.args[0].args[1], math.sqrt(0.5)):
            return _operand(x, dtype)
    return None


def _is_one_plus(node: Any) -> bool:
    return is_call(node, aten.add.Tensor) and is_number(node.args[1], 1)


def _is_close(argument: Any, expected: float) -> bool:
    given = number(argument)
    return given is not None and math.isclose(given, expected, rel_tol=1e-12)


def _is_cube(node: Any, x: Node) -> bool:
    if is_call(node, aten.pow.Tensor_Scalar):
        return node.args[0] is x and node.args[1] == 3
    if not is_call(node, aten.mul.Tensor):
        return False
    return any(a is x and is_call(b, aten.mul.Tensor) and b.args == (x, x) for a, b in commuted(node))


def _clamped(activated: Node, up: Node) -> Gated | None:
    """GPT-OSS: ``(clamp(up) + 1) * (gate * sigmoid(alpha * gate))``, every step rounded to the storage dtype."""
    if not is_call(up, aten.add.Tensor) or number(up.args[1]) is None or not is_call(activated, aten.mul.Tensor):
        return None
    for gate, sigmoid in commuted(activated):
        if not is_call(sigmoid, aten.sigmoid.default) or not is_call(sigmoid.args[0], aten.mul.Tensor):
            continue
        scaled, alpha = sigmoid.args[0].args
        alpha = number(alpha)
        bounded, ranged = _clamp(gate), _clamp(up.args[0])
        if scaled is not gate or alpha is None or bounded is None or ranged is None:
            continue
        (gate_in, gate_low, gate_high), (up_in, up_low, up_high) = bounded, ranged
        if gate_low is not None or gate_high is None or up_high != gate_high or up_low != -gate_high:
            continue
        return Gated(gate_in, up_in, "silu", limit=gate_high, alpha=alpha, up_offset=float(up.args[1]))
    return None


def _limited(gate: Node, up: Node) -> Gated | None:
    """DeepSeek V4: the operands of SwiGLU are clamped, the gate from above only."""
    bounded, ranged = _clamp(gate), _clamp(up)
    if bounded is None or ranged is None:
        return None
    (gate_in, gate_low, limit), (up_in, up_low, up_high) = bounded, ranged
    if gate_low is not None or limit is None or up_high != limit or up_low != -limit:
        return None
    return Gated(gate_in, up_in, "silu", limit=limit)


def _clamp(node: Any) -> tuple[Node, float | None, float | None] | None:
    """``(x, low, high)`` of a clamp; rounding does not change a clamped value, so the dtype it is done in is free."""
    if not is_tensor(node):
        return None
    dtype, low, high = dtype_of(node), None, None
    inner = uncast(node, torch.float32)
    if is_call(inner, aten.clamp_max.default):
        inner, high = inner.args[0], number(inner.args[1])
    if is_call(inner, aten.clamp_min.default):
        inner, low = inner.args[0], number(inner.args[1])
    x = _operand(inner, dtype)
    return None if x is None or (low is None and high is None) else (x, low, high)


def match_silu_and_mul(product: Node) -> Match | Miss | None:
    found = gated(product)
    if found is None or found.activation != "silu":
        return None
    kwargs = {}
    if found.limit is not None:
        kwargs = {"limit": found.limit, "alpha": found.alpha, "up_offset": found.up_offset}
    return _match(product, found, torch.ops.deepinfer.silu_and_mul.default, kwargs)


def match_gelu_and_mul(product: Node) -> Match | Miss | None:
    found = gated(product)
    if found is None or not found.activation.startswith("gelu"):
        return None
    kwargs = {"approximate": "tanh"} if found.activation == "gelu_tanh" else {}
    return _match(product, found, torch.ops.deepinfer.gelu_and_mul.default, kwargs)


def _match(product: Node, found: Gated, op: OpOverload, kwargs: dict[str, Any]) -> Match | Miss:
    if not same_shape(found.gate, found.up):
        return Miss(f"gate {list(shape_of(found.gate))} and up {list(shape_of(found.up))} are broadcast")
    if dtype_of(found.gate) != dtype_of(found.up) or dtype_of(found.gate) not in FLOATS:
        return Miss(f"gate of {dtype_of(found.gate)} and up of {dtype_of(found.up)}")
    gate, up = part(found.gate), part(found.up)
    if gate is not None and up is not None and is_split_in_halves(gate, up):
        return Match(op, (gate.source,), (product,), kwargs, "one product, split")
    return Match(op, (found.gate, found.up), (product,), kwargs, "two products")


PATTERNS = [
    Pattern("silu_and_mul", "activation", (aten.mul.Tensor,), match_silu_and_mul),
    Pattern("gelu_and_mul", "activation", (aten.mul.Tensor,), match_gelu_and_mul),
]
