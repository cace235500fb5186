"""Reading FX graphs: what a pattern returns, and the small questions that patterns ask about nodes.

A pattern looks at one *anchor* node (a ``topk``, an ``rsqrt``, a ``cat``) and walks its neighbourhood. It answers

- ``None``: this anchor has nothing to do with the pattern,
- ``Miss``: it looks like the pattern but differs in a way that the fused op cannot express; the reason is reported,
- ``Match``: these output nodes can be computed by this op from these arguments.

Patterns never modify the graph, with one exception: arguments may be described as a :class:`Derived` view of a node,
which is only created when the match is swapped in.
"""

import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten
prims = torch.ops.prims

CAST = prims.convert_element_type.default
LOW_PRECISION = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *LOW_PRECISION)


@dataclasses.dataclass(frozen=True)
class Derived:
    """A value that does not exist in the graph yet: ``op(node, *args, **kwargs)``, of which all may be derived."""

    op: Any
    node: "Node | Derived"
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)


def resolve(argument: Any, call: Callable[..., Any], made: dict[int, Any]) -> Any:
    """``argument``, or what ``call(op, *args, **kwargs)`` makes of a derived one; ``made`` holds what there is."""
    if not isinstance(argument, Derived):
        return argument
    if id(argument) not in made:
        args = [resolve(given, call, made) for given in (argument.node, *argument.args)]
        kwargs = {name: resolve(given, call, made) for name, given in argument.kwargs.items()}
        made[id(argument)] = call(argument.op, *args, **kwargs)
    return made[id(argument)]


@dataclasses.dataclass
class Match:
    """``outputs[i]`` is the i-th result of ``op(*args, **kwargs)``; None where the graph has no use for it. The results
    of an op are followed by the new values of the arguments that it writes.

    ``variant`` names the form that was found. With ``permutation`` every result that the op returns is permuted before
    it replaces a node; with ``view`` it is made contiguous and gets this shape. The graph computes the outputs from the
    inputs of the op and from ``known`` nodes, whose values the pattern has worked out and the op does without.
    """

    op: OpOverload
    args: tuple[Any, ...]
    outputs: tuple[Node | None, ...]
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    variant: str = ""
    permutation: list[int] | None = None
    view: list[Any] | None = None
    known: tuple[Node, ...] = ()

    @property
    def inputs(self) -> list[Node]:
        """The nodes that the op reads."""
        found: dict[Node, None] = {}
        pending = [*self.args, *self.kwargs.values()][::-1]
        while pending:
            given = pending.pop()
            if isinstance(given, Derived):
                pending += [given.node, *given.args, *given.kwargs.values()][::-1]
            elif isinstance(given, Node):
                found[given] = None
        return list(found)


@dataclasses.dataclass
class Miss:
    """Nearly the pattern; ``reason`` says what stands in the way."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A matcher and the calls that it is tried on. ``name`` is also the name of the op that it swaps in."""

    name: str
    family: str
    anchors: tuple[OpOverload, ...]
    match: Callable[[Node], "Match | Miss | None"]


def is_call(node: Any, *targets: Any) -> bool:
    """Whether ``node`` calls one of ``targets``. A sum with a factor, ``a + alpha * b``, is not what patterns mean."""
    if not isinstance(node, Node) or node.op != "call_function" or node.target not in targets:
        return False
    return node.kwargs.get("alpha", 1) == 1


def value(node: Node) -> Any:
    """The fake tensor (or tuple of them) that ``node`` produces."""
    return node.meta["val"]


def is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def dtype_of(node: Node) -> torch.dtype:
    return value(node).dtype


def shape_of(node: Node) -> torch.Size:
    return value(node).shape


def same(a: Any, b: Any) -> bool:
    """Whether two sizes are equal without adding a guard."""
    return statically_known_true(a == b)


def same_shape(a: Node, b: Node) -> bool:
    return len(shape_of(a)) == len(shape_of(b)) and all(map(same, shape_of(a), shape_of(b)))


# [batch, heads, tokens, dim] <-> [batch, tokens, heads, dim]: models keep the second in memory and show the first.
SWAP_HEADS = [0, 2, 1, 3]
# A matrix for each expert, transposed.
SWAP_MATRICES = [0, 2, 1]


def is_dense(node: Node, order: list[int] | None = None) -> bool:
    """Whether the tensor is contiguous once its dimensions are in this order."""
    shape, stride, expected = shape_of(node), value(node).stride(), 1
    order = list(range(len(shape))) if order is None else order
    if len(order) != len(shape):
        return False
    for dim in reversed(order):
        if not same(shape[dim], 1) and not same(stride[dim], expected):
            return False
        expected *= shape[dim]
    return True


def is_last_dim(node: Node, dim: int) -> bool:
    """Whether ``dim`` is the last dimension of the tensor ``node``."""
    return dim in (-1, value(node).dim() - 1)


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a call, given by position or by name."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def users(node: Node, *targets: Any) -> list[Node]:
    """The calls of ``targets`` that use ``node``."""
    return [user for user in node.users if is_call(user, *targets)]


def only_user(node: Node, *targets: Any) -> Node | None:
    """The one user of ``node``, if it is a call of one of ``targets``."""
    if len(node.users) != 1:
        return None
    user = next(iter(node.users))
    return user if is_call(user, *targets) else None


def item(node: Node, index: int) -> Node | None:
    """The ``node[index]`` of a call with several results, if the graph uses it."""
    for user in users(node, operator.getitem):
        if user.args[1] == index:
            return user
    return None


def result_of(node: Any, *targets: Any) -> tuple[Node, int] | None:
    """``(call, index)`` if ``node`` is ``call[index]`` of a call of one of ``targets``."""
    if not is_call(node, operator.getitem) or not is_call(node.args[0], *targets):
        return None
    return node.args[0], node.args[1]


def same_value(a: Any, b: Any, depth: int = 8) -> bool:
    """Whether two nodes are the same one, or the same few calls of the same one: nothing merges repeated calls yet."""
    if a is b:
        return True
    if depth == 0 or not is_call(a, b.target if isinstance(b, Node) else None) or a.kwargs != b.kwargs:
        return False
    if len(a.args) != len(b.args) or torch.Tag.nondeterministic_seeded in getattr(a.target, "tags", ()):
        return False
    return all(
        same_value(x, y, depth - 1) if isinstance(x, Node) else not isinstance(y, Node) and x == y
        for x, y in zip(a.args, b.args, strict=True)
    )


def depends_on(node: Node, ancestor: Node) -> bool:
    """Whether ``node`` is computed from ``ancestor``."""
    pending, seen = [node], set()
    while pending:
        current = pending.pop()
        if current is ancestor:
            return True
        if current not in seen and ancestor < current:
            seen.add(current)
            pending.extend(current.all_input_nodes)
    return False


@dataclasses.dataclass(frozen=True)
class Part:
    """``source[..., start : start + step * length : step]``."""

    source: Node
    start: int
    length: int
    step: int = 1


def part(node: Any) -> Part | None:
    """Which part of the last dimension of which tensor ``node`` is, when it comes from a slice, split or chunk."""
    if is_call(node, aten.slice.Tensor):
        source = node.args[0]
        size, length = shape_of(source)[-1], shape_of(node)[-1]
        start, step = argument(node, 2, "start") or 0, argument(node, 4, "step", 1)
        if not is_last_dim(source, argument(node, 1, "dim", 0)) or not _all_ints(size, length, start, step):
            return None
        return Part(source, max(start + size, 0) if start < 0 else min(start, size), length, step)
    found = result_of(node, aten.split.Tensor, aten.split_with_sizes.default)
    if found is None:
        return None
    split, index = found
    source, sizes = split.args[0], split.args[1]
    if not is_last_dim(source, argument(split, 2, "dim", 0)) or isinstance(sizes, Node):
        return None
    sizes = [sizes] * (index + 1) if isinstance(sizes, int) else sizes
    length = shape_of(node)[-1]
    return Part(source, sum(sizes[:index]), length) if _all_ints(length, *sizes) else None


def _all_ints(*sizes: Any) -> bool:
    return all(isinstance(size, int) for size in sizes)


def is_split_in_halves(first: Part, second: Part) -> bool:
    """Whether the two parts are the first and the second half of one tensor."""
    half = first.length
    halves = Part(first.source, 0, half), Part(first.source, half, half)
    return (first, second) == halves and shape_of(first.source)[-1] == 2 * half


def is_even_and_odd(first: Part, second: Part) -> bool:
    """Whether the two parts are the even and the odd elements of one tensor."""
    half = first.length
    pairs = Part(first.source, 0, half, 2), Part(first.source, 1, half, 2)
    return (first, second) == pairs and shape_of(first.source)[-1] == 2 * half


def number(argument: Any) -> float | int | None:
    """A constant, given as a Python number or as a 0-d tensor filled with one; None if compiling does not know it."""
    if isinstance(argument, bool):
        return None
    if isinstance(argument, (int, float)):
        return argument
    if is_call(argument, CAST, aten.lift_fresh_copy.default):
        return number(argument.args[0])
    if is_call(argument, aten.scalar_tensor.default):
        return number(argument.args[0])
    if is_call(argument, aten.full.default) and len(argument.args[0]) == 0:
        return number(argument.args[1])
    held = held_number(argument) if is_tensor(argument) and value(argument).dim() == 0 else None
    return None if isinstance(held, bool) else held


def held_number(node: Any) -> float | int | bool | None:
    """The number in a tensor of one element that the graph holds."""
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    constant = getattr(node.graph.owning_module, str(node.target), None)
    if not isinstance(constant, torch.Tensor) or constant.numel() != 1:
        return None
    with unset_fake_temporarily():
        return constant.item()


def is_number(argument: Any, expected: float) -> bool:
    return number(argument) == expected


def commuted(node: Node) -> Iterator[tuple[Any, Any]]:
    """The two operands of a commutative call in both orders."""
    yield node.args[0], node.args[1]
    yield node.args[1], node.args[0]


def uncast(node: Any, *sources: torch.dtype) -> Any:
    """``node`` without a cast from one of ``sources`` in front of it."""
    if is_call(node, CAST) and dtype_of(node.args[0]) in sources:
        return node.args[0]
    return node


def cast_to(node: Any, dtype: torch.dtype) -> Node | None:
    """The operand of ``node`` if ``node`` is a cast to ``dtype``."""
    return node.args[0] if is_call(node, CAST) and node.args[1] == dtype else None


def softmax_operand(node: Any) -> Node | None:
    """``x`` if ``node`` is the decomposed softmax of the fp32 tensor ``x`` over its last dimension."""
    if not is_call(node, aten.div.Tensor):
        return None
    exp, total = node.args
    if not is_call(exp, aten.exp.default) or not is_sum_over_last(total, exp):
        return None
    shifted = exp.args[0]
    if not is_call(shifted, aten.sub.Tensor):
        return None
    operand, largest = shifted.args
    if not is_call(largest, aten.amax.default) or largest.args[0] is not operand:
        return None
    dims, keep = argument(largest, 1, "dim"), argument(largest, 2, "keepdim", False)
    if dtype_of(operand) != torch.float32 or not keep or len(dims) != 1 or not is_last_dim(operand, dims[0]):
        return None
    return operand


def is_sum_over_last(node: Any, operand: Node, keepdim: bool = True) -> bool:
    """Whether ``node`` is ``operand.sum(-1, keepdim=keepdim)`` without a change of dtype."""
    if not is_call(node, aten.sum.dim_IntList) or node.args[0] is not operand or node.kwargs.get("dtype"):
        return False
    dims, keep = argument(node, 1, "dim"), argument(node, 2, "keepdim", False)
    return bool(keep) == keepdim and dims is not None and len(dims) == 1 and is_last_dim(operand, dims[0])
