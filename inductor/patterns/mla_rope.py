"""The heads of latent attention, becoming one ``deepinfer.mla_qk_rope``.

The rotations of q and of the shared key are read by the pattern of their own family. Here is how their results are put
behind the columns that are not rotated: by a ``cat``, or by two copies into an empty tensor. Where a cache takes the
rotated key in between, or anything else does, the op returns that key, and the model puts the keys together later: that
is a pattern of its own, ``mla_q_rope``, since it gains less.
"""

import torch
from torch.fx import Node

from torch_deepinfer.inductor.matcher import (
    FLOATS,
    Match,
    Miss,
    Part,
    Pattern,
    argument,
    aten,
    dtype_of,
    is_call,
    is_last_dim,
    only_user,
    part,
    same,
    same_shape,
    shape_of,
)
from torch_deepinfer.inductor.patterns import rope


def match_mla_qk_rope(anchor: Node) -> Match | Miss | None:
    return _match(anchor, whole_keys=True)


def match_mla_q_rope(anchor: Node) -> Match | Miss | None:
    return _match(anchor, whole_keys=False)


def _match(anchor: Node, whole_keys: bool) -> Match | Miss | None:
    first = rope.rotation_at(anchor)
    if not isinstance(first, rope.Rotation) or dtype_of(first.x) not in FLOATS or first.rotary_dim is not None:
        return None
    second = rope.partner_of(anchor, first)
    if second is None:
        return None
    q, k = (first, second) if _query(first) is not None else (second, first)
    query = _query(q)
    if query is None:
        return None
    source, q_output = query
    keys = _joined(k.output)
    if (keys is not None) != whole_keys:
        return None
    k_nope, k_output = keys or (None, k.output)
    return Match(
        torch.ops.deepinfer.mla_qk_rope.default,
        (source, k_nope, k.x, *rope.cosines_and_sines(q)),
        (q_output, k_output),
        q.options(),
        variant=q.style,
    )


def _query(q: rope.Rotation) -> tuple[Node, Node] | None:
    """The tensor whose last columns are rotated, and the result, which has its other columns as well."""
    joined, turned = _joined(q.output), part(q.x)
    if joined is None or turned is None:
        return None
    nope, output = joined
    source = turned.source
    if part(nope) != Part(source, 0, turned.start) or turned != Part(source, turned.start, turned.length):
        return None
    return (source, output) if turned.start + turned.length == shape_of(source)[-1] else None


def _joined(turned: Node) -> tuple[Node, Node] | None:
    """What ``turned``, for all heads or for each of them, is put behind, and the result."""
    found = _put_together(turned)
    if found is None:
        return None
    nope, output = found
    is_alike = dtype_of(nope) == dtype_of(turned) == dtype_of(output)
    return found if is_alike and all(map(same, shape_of(nope)[:-1], shape_of(output)[:-1])) else None


def _put_together(turned: Node) -> tuple[Node, Node] | None:
    viewed = only_user(turned, aten.view.default)  # of the same shape: so torch broadcasts what is assigned
    last = viewed if viewed is not None and same_shape(viewed, turned) else turned
    last = only_user(last, aten.expand.default) or last
    whole = only_user(last, aten.cat.default)
    if whole is not None:
        if not is_last_dim(whole, argument(whole, 1, "dim", 0)) or len(whole.args[0]) != 2:
            return None
        nope = whole.args[0][0]
        return (nope, whole) if whole.args[0][1] is last and nope is not last else None
    copied = only_user(last, aten.copy.default)
    outer = only_user(copied, aten.slice_scatter.default) if copied is not None else None
    if copied is None or outer is None or copied.args[1] is not last or outer.args[1] is not copied:
        return None
    inner = outer.args[0]
    if not is_call(inner, aten.slice_scatter.default):
        return None
    if not is_call(inner.args[0], aten.empty.memory_format, aten.full.default):
        return None
    width, columns = shape_of(outer)[-1], _columns(inner)
    if columns is None or columns.start != 0 or _columns(outer) != Part(outer, columns.length, width - columns.length):
        return None
    return (inner.args[1].args[1], outer) if is_call(inner.args[1], aten.copy.default) else None


def _columns(scatter: Node) -> Part | None:
    """Which columns a ``slice_scatter`` overwrites."""
    start, length = argument(scatter, 3, "start") or 0, shape_of(scatter.args[1])[-1]
    if not is_last_dim(scatter, argument(scatter, 2, "dim", 0)) or not isinstance(start, int):
        return None
    return Part(scatter, start, length, argument(scatter, 5, "step", 1))


PATTERNS = [
    Pattern("mla_qk_rope", "rope", rope.ANCHORS, match_mla_qk_rope),
    Pattern("mla_q_rope", "rope", rope.ANCHORS, match_mla_q_rope),
]
