"""An RMSNorm of every head of q and k followed by their rotation, becoming one ``deepinfer.qk_norm_rope``.

The two parts are read by the patterns of their own families. A norm over all heads at once (OLMoE, MiniMax-M2) is none
of the heads, and one behind the rotation (Hunyuan) none in front of it: both stay two ops.
"""

import dataclasses
from typing import Any

import torch
from torch.fx import Node

from torch_deepinfer.inductor.matcher import SWAP_HEADS, Derived, Match, Miss, Pattern, aten, is_call
from torch_deepinfer.inductor.patterns import norm, rope


@dataclasses.dataclass
class Heads:
    """q or k: ``rotation`` turns the result of ``norm``, with tokens and heads ``swapped`` in between."""

    norm: norm.Norm
    rotation: rope.Rotation
    swapped: bool

    def is_like(self, other: "Heads") -> bool:
        """Whether one call can do both."""
        return (self.norm.eps, self.norm.form) == (other.norm.eps, other.norm.form)


def match_qk_norm_rope(anchor: Node) -> Match | Miss | None:
    both = heads_at(anchor)
    return call(both, rope.is_swapped([heads.rotation for heads in both])) if both else None


def heads_at(anchor: Node) -> list[Heads]:
    """q, or q and k that one call can do; none without a norm."""
    q = _heads(rope.rotation_at(anchor))
    if q is None:
        return []
    k = _heads(rope.partner_of(anchor, q.rotation))
    return [q] if k is None or not k.is_like(q) else [q, k]


def call(both: list[Heads], swapped: bool) -> Match:
    """``qk_norm_rope`` of q, or of q and k, as they are rotated or with tokens and heads ``swapped``."""
    q = both[0]
    missing = [None] * (2 - len(both))

    def arranged(given: Any, is_swapped: bool = False) -> Any:
        return given if is_swapped == swapped else Derived(aten.permute.default, given, (SWAP_HEADS,))

    arguments = [arranged(heads.norm.x, heads.swapped) for heads in both] + missing
    arguments += [heads.norm.weight for heads in both] + missing
    arguments += [arranged(table) for table in rope.cosines_and_sines(q.rotation)]
    kwargs = q.rotation.options()
    if q.norm.form != "cast_mul":
        kwargs["weight_form"] = q.norm.form
    return Match(
        torch.ops.deepinfer.qk_norm_rope.default,
        (*arguments, q.norm.eps),
        (*(heads.rotation.output for heads in both), *missing),
        kwargs,
        variant=f"{q.norm.form}, {q.rotation.style}" + (", pair" if len(both) == 2 else ""),
        permutation=SWAP_HEADS if swapped else None,
    )


def _heads(rotation: rope.Rotation | Miss | None) -> Heads | None:
    if not isinstance(rotation, rope.Rotation):
        return None
    swapped = is_call(rotation.x, aten.permute.default) and list(rotation.x.args[1]) == SWAP_HEADS
    output = rotation.x.args[0] if swapped else rotation.x
    nearby = [output]
    for _ in range(3):  # the weight, a cast, the product with the inverse of the norm
        nearby = [operand for node in nearby for operand in node.all_input_nodes]
        for node in nearby:
            found = norm.norm_at(node) if is_call(node, *norm.ANCHORS) else None
            if isinstance(found, norm.Norm) and found.output is output:
                return Heads(found, rotation, swapped)
    return None


PATTERNS = [Pattern("qk_norm_rope", "rope", rope.ANCHORS, match_qk_norm_rope)]
