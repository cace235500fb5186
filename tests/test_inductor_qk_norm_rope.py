"""Norms of q and k in front of a rotation: the spellings that become one op, and near misses."""

import pytest
import torch
from test_inductor_patterns import DTYPES, NORMS, ROTATIONS, angles, found, half, partial, xhat

HEADS = [4, 2]


def inputs(dtype: torch.dtype, size: int = 16) -> tuple[torch.Tensor, ...]:
    q, k = (torch.randn(2, 5, heads, size).to(dtype) for heads in HEADS)
    return q, k, *torch.randn(2, size).to(dtype), *angles(5, size, dtype)


def norm_then_swap(norm, rotate):
    """As Qwen3 does: [batch, tokens, heads, dim] is normed, and rotated as [batch, heads, tokens, dim]."""

    def apply(q, k, q_weight, k_weight, cos, sin):
        q, k = norm(q, q_weight).transpose(1, 2), norm(k, k_weight).transpose(1, 2)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    return apply


def swap_then_norm(norm, rotate):
    """As Gemma 3 does."""

    def apply(q, k, q_weight, k_weight, cos, sin):
        q, k = norm(q.transpose(1, 2), q_weight), norm(k.transpose(1, 2), k_weight)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    return apply


def tokens_first(norm, rotate):
    def apply(q, k, q_weight, k_weight, cos, sin):
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
        return rotate(norm(q, q_weight), cos, sin), rotate(norm(k, k_weight), cos, sin)

    return apply


ORDERS = [norm_then_swap, swap_then_norm, tokens_first]
ONE = {"qk_norm_rope": 1}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("order", ORDERS)
def test_spellings_of_the_norm(order, name, dtype):
    assert found(order(NORMS[name], half), *inputs(dtype)) == ONE


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotate", ROTATIONS)
@pytest.mark.parametrize("order", ORDERS)
def test_spellings_of_the_rotation(order, rotate, dtype):
    assert found(order(NORMS["cast_mul"], rotate), *inputs(dtype)) == ONE


def test_q_alone():
    def apply(q, weight, cos, sin):
        return half(NORMS["one_plus"](q, weight).transpose(1, 2), cos.unsqueeze(1), sin.unsqueeze(1))

    q, _, weight, _, cos, sin = inputs(torch.bfloat16)
    assert found(apply, q, weight, cos, sin) == ONE


def q_normed(norm, other):
    def apply(q, k, q_weight, k_weight, cos, sin):
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
        return half(norm(q, q_weight), cos, sin), half(other(k, k_weight), cos, sin)

    return apply


def normed_is_used(q, k, q_weight, k_weight, cos, sin):
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    normed = NORMS["cast_mul"](k, k_weight)
    return half(NORMS["cast_mul"](q, q_weight), cos, sin), half(normed, cos, sin), normed.sum()


def scaled_between(q, k, q_weight, k_weight, cos, sin):
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    q, k = (2 * NORMS["cast_mul"](x, weight) for x, weight in ((q, q_weight), (k, k_weight)))
    return half(q, cos, sin), half(k, cos, sin)


def all_heads_at_once(q, k, q_weight, k_weight, cos, sin):
    """As OLMoE and MiniMax-M2 do."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    normed = [
        NORMS["cast_mul"](x.flatten(2), weight.repeat(x.shape[2])).view(x.shape)
        for x, weight in ((q, q_weight), (k, k_weight))
    ]
    return [half(x, cos, sin) for x in normed]


def behind_the_rotation(q, k, q_weight, k_weight, cos, sin):
    """As Hunyuan does."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return NORMS["cast_mul"](half(q, cos, sin), q_weight), NORMS["cast_mul"](half(k, cos, sin), k_weight)


def of_the_rotated_part(q, k, q_weight, k_weight, cos, sin):
    cos, sin = cos.unsqueeze(2)[..., :8], sin.unsqueeze(2)[..., :8]
    return [
        torch.cat((half(NORMS["cast_mul"](x[..., :8], weight[:8]), cos, sin), x[..., 8:]), -1)
        for x, weight in ((q, q_weight), (k, k_weight))
    ]


def other_permutation(q, k, q_weight, k_weight, cos, sin):
    cos, sin = cos.squeeze(0)[:, None, None], sin.squeeze(0)[:, None, None]
    q, k = (NORMS["cast_mul"](x, weight).permute(1, 0, 2, 3) for x, weight in ((q, q_weight), (k, k_weight)))
    return half(q, cos, sin), half(k, cos, sin)


NEAR = {
    "other forms": (q_normed(NORMS["cast_mul"], NORMS["one_plus"]), {"qk_norm_rope": 2}),
    "other eps": (q_normed(NORMS["cast_mul"], NORMS["eps first"]), {"qk_norm_rope": 2}),
    "only q": (q_normed(NORMS["cast_mul"], lambda k, weight: k * weight), ONE | {"rotary_embedding": 1}),
    "only k": (q_normed(lambda q, weight: q * weight, NORMS["cast_mul"]), ONE | {"rotary_embedding": 1}),
    "no weight in float32": (q_normed(*[lambda x, w: xhat(x).to(x.dtype)] * 2), ONE),
    "normed is used": (normed_is_used, {"rms_norm": 2, "rotary_embedding": 1}),
    "scaled between": (scaled_between, {"rms_norm": 2, "rotary_embedding": 1}),
    "all heads at once": (all_heads_at_once, {"rms_norm": 2, "rotary_embedding": 1}),
    "behind the rotation": (behind_the_rotation, {"rms_norm": 2, "rotary_embedding": 1}),
    "of the rotated part": (of_the_rotated_part, ONE),
    "other permutation": (other_permutation, {"rms_norm": 2}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NEAR)
def test_near_misses(name, dtype):
    function, expected = NEAR[name]
    assert found(function, *inputs(dtype)) == expected


def test_rotation_of_a_part_norms_the_whole_head():
    assert found(norm_then_swap(NORMS["cast_mul"], partial), *inputs(torch.bfloat16)) == ONE


def test_one_token():
    q, k, q_weight, k_weight, cos, sin = inputs(torch.bfloat16)
    arguments = q[:, :1].contiguous(), k[:, :1].contiguous(), q_weight, k_weight, cos[:, :1], sin[:, :1]
    assert found(norm_then_swap(NORMS["cast_mul"], half), *arguments) == ONE
