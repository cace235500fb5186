"""Rotary position embedding of q and k in the spellings of transformers, becoming one ``deepinfer.rotary_embedding``.

One tensor is read at a time, from the ``cat`` (or ``view_as_complex``) that the spelling cannot do without. Two
tensors that are rotated by the same cos and sin are then joined; the nodes of cos and sin are what q and k have in
common, while everything else about them (number of heads, norms in front) may differ.
"""

import dataclasses
from typing import Any

import torch
from torch.fx import Node

from torch_deepinfer.inductor.matcher import (
    CAST,
    FLOATS,
    LOW_PRECISION,
    SWAP_HEADS,
    Derived,
    Match,
    Miss,
    Part,
    Pattern,
    argument,
    aten,
    depends_on,
    dtype_of,
    is_call,
    is_dense,
    is_even_and_odd,
    is_last_dim,
    is_split_in_halves,
    only_user,
    part,
    same,
    same_shape,
    same_value,
    shape_of,
    uncast,
    users,
    value,
)


@dataclasses.dataclass
class Rotation:
    """``output`` is ``x`` rotated by the angles whose cosine and sine, or complex unit, are the nodes ``angles``."""

    x: Node
    output: Node
    angles: tuple[Node, ...]
    style: str
    inverse: bool = False
    rotary_dim: int | None = None

    def is_like(self, other: "Rotation") -> bool:
        """Whether one call can rotate both tensors."""
        return self._kind() == other._kind() and all(map(same_value, self.angles, other.angles))

    def options(self) -> dict[str, Any]:
        """The keyword arguments of the op, where they are not the default."""
        kwargs: dict[str, Any] = {"style": self.style} if self.style != "half" else {}
        if self.inverse:
            kwargs["inverse"] = True
        if self.rotary_dim is not None:
            kwargs["rotary_dim"] = self.rotary_dim
        return kwargs

    def _kind(self) -> tuple[Any, ...]:
        x = value(self.x)
        return self.style, self.inverse, self.rotary_dim, x.dtype, x.dim(), x.shape[-1]


def match_rotary_embedding(anchor: Node) -> Match | Miss | None:
    q = rotation_at(anchor)
    if not isinstance(q, Rotation):
        return q
    if dtype_of(q.x) not in FLOATS:
        return Miss(f"rotation of {dtype_of(q.x)}")
    k = partner_of(anchor, q)
    rotated = [q] if k is None else [q, k]
    return call(rotated, is_swapped(rotated))


def call(rotated: list[Rotation], swapped: bool) -> Match:
    """``rotary_embedding`` of q, or of q and k, as they are or with tokens and heads ``swapped``."""
    q, *k = rotated
    arguments: list[Any] = [rotation.x for rotation in rotated] + [None] * (not k)
    arguments += cosines_and_sines(q)
    if swapped:
        # Work on the [batch, tokens, heads, dim] tensors behind the transposed views: the result has their strides.
        arguments = [given and Derived(aten.permute.default, given, (SWAP_HEADS,)) for given in arguments]
    op = torch.ops.deepinfer.rotary_embedding.default
    outputs = (q.output, k[0].output if k else None)
    variant = q.style + (", pair" if k else "")
    return Match(op, tuple(arguments), outputs, q.options(), variant, SWAP_HEADS if swapped else None)


def cosines_and_sines(rotation: Rotation) -> list[Any]:
    """The two tables of a rotation."""
    if len(rotation.angles) == 2:
        return list(rotation.angles)
    pairs = Derived(aten.view_as_real.default, rotation.angles[0], ())
    return [Derived(aten.select.int, pairs, (-1, index)) for index in (0, 1)]


def is_swapped(rotated: list[Rotation]) -> bool:
    """Whether some result has the strides of a [batch, tokens, heads, dim] tensor, and none has other ones."""
    if value(rotated[0].angles[0]).dim() != 4:
        return False
    outputs = [rotation.output for rotation in rotated]
    return all(is_dense(output, SWAP_HEADS) for output in outputs) and not all(map(is_dense, outputs))


def partner_of(anchor: Node, q: Rotation) -> Rotation | None:
    """The next rotation by the same angles, unless it needs the result of this one."""
    node = anchor.next
    while node.op != "output":
        if is_call(node, *ANCHORS):
            k = rotation_at(node)
            if isinstance(k, Rotation) and k.is_like(q):
                return None if depends_on(k.x, q.output) else k
        node = node.next
    return None


def rotation_at(anchor: Node) -> Rotation | Miss | None:
    """The rotation that the call ``anchor``, one of ``ANCHORS``, is part of."""
    if is_call(anchor, aten.view_as_complex.default):
        return _complex(anchor)
    if not is_last_dim(anchor, argument(anchor, 1, "dim", 0)) or len(anchor.args[0]) != 2:
        return None
    first, second = anchor.args[0]
    return _halves(anchor, first, second) or _rotate_half(anchor, first, second) or _rotate_pairs(anchor, first, second)


# -- x * cos + rotate(x) * sin -----------------------------------------------------------------------------------------


def _rotate_half(anchor: Node, first: Any, second: Any) -> Rotation | Miss | None:
    """``cat(-x[R/2:], x[:R/2])`` times sin, plus ``x`` times cos; with the other sign it is the inverse."""
    inverse = is_call(second, aten.neg.default)
    if inverse == is_call(first, aten.neg.default):
        return None
    high, low = (first, second.args[0]) if inverse else (first.args[0], second)
    low_part, high_part = part(low), part(high)
    if low_part is None or high_part is None or not is_split_in_halves(low_part, high_part):
        return None
    return _turned(anchor, low_part.source, "half", inverse)


def _rotate_pairs(anchor: Node, first: Any, second: Any) -> Rotation | Miss | None:
    """``stack(-x[1::2], x[0::2])`` flattened, times sin, plus ``x`` times cos."""
    flat = only_user(anchor, aten.view.default)
    if flat is None or not is_call(first, aten.unsqueeze.default) or not is_call(second, aten.unsqueeze.default):
        return None
    inverse = is_call(second.args[0], aten.neg.default)
    if inverse == is_call(first.args[0], aten.neg.default) or shape_of(anchor)[-1] != 2:
        return None
    odd, even = first.args[0], second.args[0]
    odd, even = (odd, even.args[0]) if inverse else (odd.args[0], even)
    even_part, odd_part = part(even), part(odd)
    if even_part is None or odd_part is None or not is_even_and_odd(even_part, odd_part):
        return None
    if value(flat).dim() != value(even).dim() or not same(shape_of(flat)[-1], shape_of(even_part.source)[-1]):
        return None
    return _turned(flat, even_part.source, "interleaved", inverse)


def _turned(turned: Node, x: Node, style: str, inverse: bool) -> Rotation | Miss | None:
    """``turned`` is ``x`` rotated by a right angle: finds ``x * cos + turned * sin``."""
    widened = only_user(turned, CAST)
    if widened is not None and dtype_of(widened) == torch.float32:  # after the turn, which rounds nothing
        wide = [user for user in users(x, CAST) if dtype_of(user) == torch.float32]
        return _turned(widened, wide[0], style, inverse) if len(wide) == 1 else None
    sine = only_user(turned, aten.mul.Tensor)
    total = only_user(sine, aten.add.Tensor) if sine is not None else None
    if sine is None or total is None:
        return None
    cosine = total.args[0] if total.args[1] is sine else total.args[1]
    if not is_call(cosine, aten.mul.Tensor) or x not in cosine.args:
        return None
    cos, sin = _other(cosine, x), _other(sine, turned)
    if dtype_of(cos) != dtype_of(sin) or shape_of(cos)[-1] != shape_of(x)[-1] or shape_of(sin)[-1] != shape_of(x)[-1]:
        return Miss("cos and sin do not have one column per column of x")
    return _finished(x, total, (cos, sin), style, inverse)


# -- the two halves of the result one by one ---------------------------------------------------------------------------


def _halves(anchor: Node, first: Any, second: Any) -> Rotation | Miss | None:
    """``cat(a * cos - b * sin, b * cos + a * sin)`` of the two halves of x, or of its even and odd columns."""
    inverse = is_call(first, aten.add.Tensor)
    minus, plus = (second, first) if inverse else (first, second)
    if not is_call(minus, aten.sub.Tensor) or not is_call(plus, aten.add.Tensor) or minus.kwargs or plus.kwargs:
        return None
    products = [*minus.args, *plus.args]
    if not all(is_call(product, aten.mul.Tensor) for product in products):
        return None
    # In both results the cosine belongs to the half that is rotated, and the sine to the other one.
    for cos in products[0].args:
        own = _other(products[0], cos)
        for sin in products[1].args:
            other = _other(products[1], sin)
            if [{other, cos}, {own, sin}] not in ([set(p.args) for p in pair] for pair in (plus.args, plus.args[::-1])):
                continue
            low, high = (other, own) if inverse else (own, other)
            low_part, high_part = part(low), part(high)
            if low_part is None or high_part is None:
                continue
            if is_split_in_halves(low_part, high_part):
                return _finished(low_part.source, anchor, (cos, sin), "half", inverse)
            if is_even_and_odd(low_part, high_part):
                return _finished(low_part.source, anchor, (cos, sin), "interleaved_to_half", inverse)
    return None


# -- complex numbers ---------------------------------------------------------------------------------------------------


def _complex(anchor: Node) -> Rotation | Miss | None:
    """``view_as_real(view_as_complex(x as pairs) * unit)`` as flat rows again."""
    pairs = anchor.args[0]
    if not is_call(pairs, aten.view.default):
        return None
    x = pairs.args[0]
    product = only_user(anchor, aten.mul.Tensor)
    real = only_user(product, aten.view_as_real.default) if product is not None else None
    flat = only_user(real, aten.view.default) if real is not None else None
    if product is None or flat is None:
        return None
    unit = _other(product, anchor)
    if not value(unit).is_complex():
        return None
    if (
        value(pairs).dim() != value(x).dim() + 1
        or not same_shape(flat, x)
        or not same(2 * shape_of(pairs)[-2], shape_of(x)[-1])
    ):
        return Miss("the pairs are not neighbours in the last dimension")
    return _finished(x, flat, (unit,), "interleaved", inverse=False)


# -- shared ------------------------------------------------------------------------------------------------------------


def _other(node: Node, operand: Any) -> Any:
    """The operand of a binary call that is not ``operand``."""
    return node.args[1] if node.args[0] is operand else node.args[0]


def _finished(x: Node, total: Node, angles: tuple[Node, ...], style: str, inverse: bool) -> Rotation | Miss:
    """Follows a final rounding and the columns that partial rotation passes through."""
    output = total
    if dtype_of(total) == torch.float32 and dtype_of(angles[0]) in (torch.float32, torch.complex64):
        source = uncast(x, *LOW_PRECISION)
        rounded = only_user(total, CAST)
        if rounded is not None and dtype_of(rounded) == dtype_of(source):
            x, output = source, rounded
    if dtype_of(output) != dtype_of(x):
        return Miss(f"x of {dtype_of(x)} is rotated into {dtype_of(output)}")
    rotated = part(x)
    whole = only_user(output, aten.cat.default)
    if rotated is not None and rotated.start == 0 and whole is not None and len(whole.args[0]) == 2:
        rest = part(whole.args[0][1])
        width = shape_of(rotated.source)[-1]
        passed = Part(rotated.source, rotated.length, width - rotated.length)
        if whole.args[0][0] is output and rest == passed and is_last_dim(output, argument(whole, 1, "dim", 0)):
            return Rotation(rotated.source, whole, angles, style, inverse, rotated.length)
    return Rotation(x, output, angles, style, inverse)


ANCHORS = (aten.cat.default, aten.view_as_complex.default)
PATTERNS = [Pattern("rotary_embedding", "rope", ANCHORS, match_rotary_embedding)]
