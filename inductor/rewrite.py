"""Swapping matches in: one walk over an inference graph at Inductor's joint stage.

A match is only swapped if the result is the same graph to everybody else: each replaced value keeps its shape, dtype
and, where it leaves the graph, its strides; nothing inside the match is needed elsewhere; the new order is topological.
Every reason not to swap ends up in the report.
"""

import dataclasses
import math
import operator
import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from torch_deepinfer.inductor import masks, packages
from torch_deepinfer.inductor.matcher import (
    CAST,
    Match,
    Miss,
    Pattern,
    aten,
    resolve,
    same,
    same_value,
    value,
)
from torch_deepinfer.inductor.patterns import PATTERNS
from torch_deepinfer.inductor.settings import Settings

# Values that may stay in use outside of a match: they cost next to nothing to keep.
_CHEAP = {
    CAST,
    aten.view.default,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.alias.default,
}
_PROVENANCE = ("stack_trace", "nn_module_stack", "original_aten", "source_fn_stack", "from_node", "seq_nr", "custom")


@dataclasses.dataclass
class Rewrites:
    """What happened to the matches of one or more graphs."""

    swapped: Counter[str] = dataclasses.field(default_factory=Counter)
    declined: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)  # (pattern, reason)
    missed: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)  # (pattern, reason)

    def update(self, other: "Rewrites") -> None:
        self.swapped.update(other.swapped)
        self.declined.update(other.declined)
        self.missed.update(other.missed)

    def clear(self) -> None:
        for counter in (self.swapped, self.declined, self.missed):
            counter.clear()


def rewrite(graph: Graph, settings: Settings, patterns: Sequence[Pattern] = PATTERNS) -> Rewrites:
    """Swaps in place what ``settings`` allows; graphs that training needs are left alone.

    Raises:
        RuntimeError: ``strict`` or ``expect`` of the settings is not met.
    """
    done = Rewrites()
    if _is_training(graph):
        return done
    for node in graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
        graph.erase_node(node)  # torch.export writes down dtypes, which the graph knows, and makes users of values so
    graph.eliminate_dead_code()
    masks.forget()
    counted: dict[Node, bool] = {}  # nodes of earlier matches; True if swapped, so about to be removed
    for pattern in patterns:
        for node in list(graph.nodes):
            is_anchor = node.op == "call_function" and node.target in pattern.anchors
            if not is_anchor or counted.get(node):
                continue
            found = pattern.match(node)
            if isinstance(found, Miss):
                if node not in counted:
                    done.missed[pattern.name, found.reason + _source_line(node)] += 1
            elif found is not None:
                _decide(graph, pattern.name, found, settings, done, counted)
        if done.swapped[pattern.name]:
            stable_topological_sort(graph)
            graph.eliminate_dead_code()
    masks.forget()
    graph.lint()
    _check_expectations(done, settings)
    return done


def _decide(
    graph: Graph, name: str, match: Match, settings: Settings, done: Rewrites, counted: dict[Node, bool]
) -> None:
    """Swaps the match in or notes why not."""
    inside = _inside(match)
    reason = settings.declines(name, value(match.inputs[0]).device.type, _rows(match))
    if reason is not None and not inside.isdisjoint(counted):
        return  # a part of a larger match that was declined as well
    reason = reason or _obstacle(match, inside) or _difference(match)
    if V.aot_compilation:
        reason = reason or packages.declines(match)
    counted.update(dict.fromkeys(inside, reason is None))
    if reason is not None:
        done.declined[name, reason] += 1
        return
    _swap(graph, match)
    for node in sorted(inside, reverse=True):
        if not node.users:  # torch leaves a call that might draw random numbers, and what it reads
            graph.erase_node(node)
    done.swapped[name] += 1


def _is_training(graph: Graph) -> bool:
    return any(str(node.target).startswith("tangents") for node in graph.nodes if node.op == "placeholder")


def _source_line(node: Node) -> str:
    """The line of the model that ``node`` was traced from, for the report."""
    lines = re.findall(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")
    return f" ({os.path.basename(lines[-1][0])}:{lines[-1][1]})" if lines else ""


def _rows(match: Match) -> Any:
    """Number of vectors that the op works on."""
    return math.prod(value(match.inputs[0]).shape[:-1])


def _inside(match: Match) -> set[Node]:
    """The nodes between the inputs of the op and its outputs, outputs included."""
    inputs = {*match.inputs, *match.known}
    inside: set[Node] = set()
    pending = [output for output in match.outputs if output is not None]
    while pending:
        node = pending.pop()
        # Sizes are no part of the computation; they can come from anywhere.
        if node in inside or not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
            continue
        if any(same_value(node, given) for given in inputs):
            continue
        inside.add(node)
        pending.extend(node.all_input_nodes)
    return inside


def _obstacle(match: Match, inside: set[Node]) -> str | None:
    """Why the nodes of the match cannot go away together, if so."""
    device_type = value(match.inputs[0]).device.type
    key = str(torch._C._dispatch_key_for_device(device_type))
    is_prim = match.op.namespace == "prims"  # those are spelled out before they run
    if not is_prim and not torch._C._dispatch_has_kernel_for_dispatch_key(match.op.name(), key):
        return f"the op has no {device_type} kernel"
    outputs = {output for output in match.outputs if output is not None}
    for node in inside - outputs:
        if node.op != "call_function" and not _is_scalar_constant(node):
            return "the result depends on something that is not an input of the op"
        is_free = node.target in _CHEAP or not node.all_input_nodes
        if not is_free and not inside.issuperset(node.users):
            return "a value in the middle is used elsewhere"
    if _depends_on(match.inputs, outputs, inside):
        return "one input of the op is computed from one of its outputs"
    return None


def _is_scalar_constant(node: Node) -> bool:
    """Whether the node is a number that the graph holds as a tensor: the pattern has looked at its value."""
    return node.op == "get_attr" and value(node).dim() == 0


def _depends_on(inputs: Sequence[Node], outputs: set[Node], inside: set[Node]) -> bool:
    """Whether an input can be reached from an output along users outside of the match."""
    last = max(inputs)
    seen: set[Node] = set()
    pending = [user for output in outputs for user in output.users if user not in inside]
    while pending:
        node = pending.pop()
        if node in inputs:
            return True
        if node not in seen and node < last:
            seen.add(node)
            pending.extend(node.users)
    return False


def _difference(match: Match) -> str | None:
    """What the rest of the graph would notice of the swap, or what the op does not take."""
    try:
        results = _fake_results(match)
    except ValueError as error:
        return str(error)
    returned = len(match.op._schema.returns)
    for index, (output, result) in enumerate(zip(match.outputs, results, strict=True)):
        if output is None:
            continue
        if match.permutation is not None and index < returned:
            result = result.permute(match.permutation)
        if match.view is not None:
            result = result.contiguous().view(map_arg(match.view, value))
        was = value(output)
        if was.dtype != result.dtype:
            return f"the op returns {result.dtype} where the graph has {was.dtype}"
        if was.dim() != result.dim() or not all(map(same, was.shape, result.shape)):
            return f"the op returns shape {list(result.shape)} where the graph has {list(was.shape)}"
        pairs = zip(was.shape, was.stride(), result.stride(), strict=True)
        if not all(same(size, 1) or same(stride, ours) for size, stride, ours in pairs):
            return "the op returns other strides than the graph has"
    return None


def _fake_results(match: Match) -> list[torch.Tensor]:
    """What the op returns for the fake inputs."""

    def call(op: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_arg((args, kwargs), value)
        return op(*args, **kwargs)

    made: dict[int, Any] = {}
    with _fake_mode(match):
        args = [resolve(argument, call, made) for argument in match.args]
        kwargs = {name: resolve(argument, call, made) for name, argument in match.kwargs.items()}
        op, args, kwargs = _functional(match.op, args, kwargs)
        results = call(op, *args, **kwargs)
        if isinstance(results, torch.Tensor):
            results = (results,)
        return list(results)


def _functional(op: Any, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, list[Any], dict[str, Any]]:
    """The call as a graph holds it that mutates nothing.

    An op that writes arguments is wrapped: the results are those of the op, then the new values of these arguments.
    Inductor unwraps it again and copies only what others need as it was.
    """
    if not op._schema.is_mutable:
        return op, args, kwargs
    given = {argument.name: value for argument, value in zip(op._schema.arguments, args, strict=False)} | kwargs
    written = [argument.name for argument in op._schema.arguments if argument.is_write]
    bases = [given.pop(name) for name in written]
    places = {f"_{name}_base_index": index for index, name in enumerate(written)}
    return auto_functionalized_v2, [op], given | places | {"_all_bases": bases}


def _fake_mode(match: Match) -> FakeTensorMode:
    fake_mode = detect_fake_mode([value(node) for node in match.inputs])
    assert fake_mode is not None
    return fake_mode


def _swap(graph: Graph, match: Match) -> None:
    outputs = [output for output in match.outputs if output is not None]
    provenance = {key: outputs[0].meta[key] for key in _PROVENANCE if key in outputs[0].meta}

    def call(op: Any, *args: Any, **kwargs: Any) -> Node:
        node = graph.call_function(op, args, kwargs)
        node.meta |= provenance
        args, kwargs = map_arg((args, kwargs), value)
        node.meta["val"] = op(*args, **kwargs)
        return node

    made: dict[int, Any] = {}
    # An early output can have users before a late input: the caller sorts the graph again.
    first, last = min(outputs), max(match.inputs)
    with _fake_mode(match), graph.inserting_before(first if last < first else last.next):
        arguments = [resolve(argument, call, made) for argument in match.args]
        kwargs = {name: resolve(argument, call, made) for name, argument in match.kwargs.items()}
        if V.aot_compilation:
            kwargs = packages.arguments(match.op, kwargs)
        op, arguments, kwargs = _functional(match.op, arguments, kwargs)
        node = call(op, *arguments, **kwargs)
        for index, output in enumerate(match.outputs):
            if output is None:
                continue
            result = node if len(match.outputs) == 1 else call(operator.getitem, node, index)
            if value(result).dtype != value(output).dtype:
                result = call(CAST, result, value(output).dtype)
            if match.permutation is not None and index < len(match.op._schema.returns):
                result = call(aten.permute.default, result, match.permutation)
            if match.view is not None:
                result = call(aten.clone.default, result, memory_format=torch.contiguous_format)
                result = call(aten.view.default, result, match.view)
            output.replace_all_uses_with(result)


def _check_expectations(done: Rewrites, settings: Settings) -> None:
    if settings.strict and done.missed:
        lines = "\n  ".join(f"{name}: {reason}" for name, reason in done.missed)
        raise RuntimeError(f"deepinfer.strict: this looks like a pattern but is none\n  {lines}")
    for name, count in settings.expect:
        if done.swapped[name] != count:
            raise RuntimeError(
                f"deepinfer.expect: {count} x {name} expected, {done.swapped[name]} swapped in this graph"
            )
