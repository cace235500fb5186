"""A rotation of q and k, with or without norms, whose k goes to a cache at once, and v to another one: one
``deepinfer.rotary_embedding_cache_`` or ``deepinfer.qk_norm_rope_cache_``.

The graph is functional: a cache is an input, ``index_put`` makes a new one of it, which attention reads, and a
``copy_`` at the end of the graph makes that the value of the input. The op writes its caches where they are, if the
compiler finds that nobody needs the old values any more. So only caches are taken that are inputs, that nothing else
reads, and that keep what is written here.
"""

import dataclasses
from typing import Any

import torch
from torch.fx import Node

from torch_deepinfer.inductor.matcher import (
    SWAP_HEADS,
    Derived,
    Match,
    Miss,
    Pattern,
    aten,
    depends_on,
    dtype_of,
    is_call,
    only_user,
    same,
    same_value,
    shape_of,
    users,
    value,
)
from torch_deepinfer.inductor.patterns import qk_norm_rope, rope

PUTS = (aten.index_put.default,)


@dataclasses.dataclass
class _Write:
    """``cache[:, :, position] = rows``, whose result is ``output``."""

    output: Node
    cache: Node
    position: Node
    rows: Node


def match_rotary_embedding_cache(anchor: Node) -> Match | Miss | None:
    q = rope.rotation_at(anchor)
    if not isinstance(q, rope.Rotation):
        return None
    k = rope.partner_of(anchor, q)
    if k is None:
        return None
    if _write_of(q.output) is not None:
        q, k = k, q
    return _cached(torch.ops.deepinfer.rotary_embedding_cache_.default, q, k, rope.call([q, k], swapped=True))


def match_qk_norm_rope_cache(anchor: Node) -> Match | Miss | None:
    both = qk_norm_rope.heads_at(anchor)
    if len(both) != 2:
        return None
    if _write_of(both[0].rotation.output) is not None:
        both.reverse()
    q, k = (heads.rotation for heads in both)
    return _cached(torch.ops.deepinfer.qk_norm_rope_cache_.default, q, k, qk_norm_rope.call(both, swapped=True))


def _cached(op: Any, q: rope.Rotation, k: rope.Rotation, rotated: Match) -> Match | Miss | None:
    """What ``rotated`` does to q and k by ``op`` instead, if k goes to a cache and v as well."""
    keys = _write_of(k.output)
    if keys is None or any(value(node).dim() != 4 for node in (q.x, k.x, *q.angles)):
        return None
    values = _next_write(keys)
    if values is None:
        return Miss("keys go to a cache, values do not")
    if depends_on(values.rows, q.output) or depends_on(values.rows, keys.output):
        return Miss("the values depend on the rotated q and k")
    for written in (keys, values):
        if written.cache.op not in ("placeholder", "get_attr"):
            return None  # what a window is cut from, for instance
        reason = _obstacle(written)
        if reason is not None:
            return Miss(reason)
    # What comes behind cos and sin, which is eps, comes behind the caches.
    angles = 2 + [argument.name for argument in rotated.op._schema.arguments].index("cos")
    v = Derived(aten.permute.default, values.rows, (SWAP_HEADS,))
    caches = keys.cache, values.cache, _slots(keys)
    arguments = (*rotated.args[:2], v, *rotated.args[2:angles], *caches, *rotated.args[angles:])
    return dataclasses.replace(rotated, op=op, args=arguments, outputs=(q.output, keys.output, values.output))


def _write_of(rows: Node) -> _Write | None:
    """Where the only user of ``rows`` puts them."""
    rows = only_user(rows, aten.clone.default) or rows  # a cat with the columns that do not rotate, if there are none
    put = only_user(rows, *PUTS)
    written = _write_at(put) if put is not None else None
    return written if written is not None and written.rows is rows else None


def _write_at(put: Node) -> _Write | None:
    """``cache[:, :, position] = rows`` of a cache and rows of four dimensions."""
    cache, indices, rows, *accumulate = put.args
    if any(accumulate) or put.kwargs or len(indices) != 3 or indices[0] is not None or indices[1] is not None:
        return None
    position = indices[2]
    if value(cache).dim() != 4 or value(rows).dim() != 4 or value(position).dim() != 1:
        return None
    if dtype_of(position) not in (torch.int32, torch.int64) or not same(shape_of(rows)[2], shape_of(position)[0]):
        return None
    return _Write(put, cache, position, rows)


def _next_write(keys: _Write) -> _Write | None:
    """What is put next at the same position of another cache."""
    node = keys.output.next
    while node.op != "output":
        written = _write_at(node) if is_call(node, *PUTS) else None
        if written is not None and same_value(written.position, keys.position):
            return written
        node = node.next
    return None


def _obstacle(written: _Write) -> str | None:
    """Why the cache could not be written where it is, if so."""
    kept = [copy for copy in users(written.cache, aten.copy_.default) if copy.args[0] is written.cache]
    if len(kept) != 1 or kept[0].args[1] is not written.output:
        return "the cache does not keep what is written"
    if {*written.cache.users} != {written.output, *kept}:
        return "the cache is read before it is written, or as it was"
    return None


def _slots(keys: _Write) -> Derived:
    """The positions, of which negative ones count from the end for ``index_put``."""
    negative = Derived(aten.lt.Scalar, keys.position, (0,))
    length = shape_of(keys.cache)[2]
    if not isinstance(length, int):
        length = Derived(aten.sym_size.int, keys.cache, (2,))
    from_end = Derived(aten.add.Tensor, keys.position, (length,))
    return Derived(aten.where.self, negative, (from_end, keys.position))


PATTERNS = [
    Pattern("qk_norm_rope_cache_", "rope", rope.ANCHORS, match_qk_norm_rope_cache),
    Pattern("rotary_embedding_cache_", "rope", rope.ANCHORS, match_rotary_embedding_cache),
]
