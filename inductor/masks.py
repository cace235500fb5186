"""Attention masks that no input of the graph has a say in: their values are worked out while compiling.

Models build their mask from positions that they count themselves, and would hand attention a matrix that says no more
than "causal". Kernels that know so much skip half of the work, and read no mask.
"""

import dataclasses
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node
from torch.fx.node import map_aggregate, map_arg

from torch_deepinfer.inductor.matcher import aten, is_call, is_tensor, number, shape_of

MOST_ELEMENTS = 1 << 27  # of a tensor that is worked out
MOST_NODES = 500
# What is added to a score to hide it, or less: torch writes this into masks of every dtype for cuDNN.
LOWEST = torch.finfo(torch.float16).min


@dataclasses.dataclass(frozen=True)
class Span:
    """What a token sees: everything, or if ``causal`` itself and the ``before`` tokens in front of it, or all there."""

    causal: bool
    before: int | None = None

    @property
    def is_window(self) -> bool:
        return self.before is not None


_spans: dict[Node, Span | None] = {}


def span_of(mask: Node) -> Span | None:
    """What ``mask``, ``[batch, heads, tokens, positions]`` of booleans or of what is added to scores, lets through.

    None if inputs of the graph decide about it, or if it is nothing that a :class:`Span` can express.
    """
    if mask not in _spans:
        condition = _condition(mask)
        with unset_fake_temporarily(), torch.no_grad():
            _spans[mask] = _measure(mask) if condition is None else span_of(condition)
    return _spans[mask]


def forget() -> None:
    """The layers of a model share masks, so what was worked out is kept: until the graph is done with."""
    _spans.clear()


def _condition(mask: Node) -> Node | None:
    """Where the mask lets scores through, if it is spelled ``where(condition, 0, lowest)`` of the shape of it."""
    if is_call(mask, aten.expand.default):
        return mask.args[0] if shape_of(mask)[2:] == shape_of(mask.args[0])[2:] else None
    if not is_call(mask, aten.where.self):
        return None
    condition, visible, hidden = mask.args
    if is_call(condition, aten.logical_not.default, aten.bitwise_not.default):
        condition, visible, hidden = condition.args[0], hidden, visible
    lowest = number(hidden)
    is_spelled = number(visible) == 0 and lowest is not None and lowest <= LOWEST
    return condition if is_spelled and shape_of(condition) == shape_of(mask) else None


def _measure(mask: Node) -> Span | None:
    worked_out = _work_out(mask)
    if worked_out is None or worked_out.dim() != 4:
        return None
    if worked_out.dtype == torch.bool:
        visible = worked_out
    else:
        visible = worked_out == 0
        if not (visible | (worked_out <= LOWEST)).all():
            return None
    first = visible[0, 0]
    if not (visible == first).all():
        return None
    if first.all():
        return Span(causal=False)
    tokens, positions = first.shape
    if tokens != positions or not first.any():
        return None
    at = torch.arange(tokens)
    distance = at[:, None] - at
    before = int(distance[first].max())
    if not torch.equal(first, (distance >= 0) & (distance <= before)):
        return None
    return Span(causal=True, before=None if before == tokens - 1 else before)


def _work_out(node: Node) -> torch.Tensor | None:
    """The value of ``node`` on a CPU; None if that takes inputs, random numbers, unknown sizes or too much memory."""
    nodes: dict[Node, None] = {}
    pending = [node]
    while pending:
        current = pending.pop()
        if current in nodes:
            continue
        nodes[current] = None
        if len(nodes) > MOST_NODES or not _is_simple(current):
            return None
        pending.extend(current.all_input_nodes)
    values: dict[Node, Any] = {}
    try:
        for current in sorted(nodes):
            if current.op == "get_attr":
                values[current] = getattr(current.graph.owning_module, str(current.target)).cpu()
                continue
            args, kwargs = map_arg((current.args, _on_cpu(current.kwargs)), values.__getitem__)
            values[current] = current.target(*args, **kwargs)
    except (RuntimeError, NotImplementedError):  # nothing that a CPU can do
        return None
    return values[node]


def _is_simple(node: Node) -> bool:
    if not is_tensor(node) or node.op not in ("call_function", "get_attr"):
        return False
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return False
    sizes = shape_of(node)
    if not all(isinstance(size, int) for size in sizes):
        return False
    return len(sizes) == 0 if node.op == "get_attr" else sizes.numel() <= MOST_ELEMENTS


def _on_cpu(kwargs: Any) -> Any:
    kwargs = {name: given for name, given in kwargs.items() if name != "pin_memory"}
    return map_aggregate(kwargs, lambda given: torch.device("cpu") if isinstance(given, torch.device) else given)
