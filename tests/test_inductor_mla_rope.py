"""Latent attention's heads: the spellings that become one op, with the keys or without, and near misses."""

import pytest
import torch
from graphs import swaps, traced
from test_inductor_patterns import ALL, DTYPES, ROTATIONS, angles, found, half, interleaved_to_half, partial
from tiny_models import FAMILIES, build, prompt

HEADS, NOPE, ROPE, V = 4, 8, 16, 12


def inputs(dtype: torch.dtype, tokens: int = 5) -> tuple[torch.Tensor, ...]:
    """What the projections return, the shared key inside of its one, and the tables."""
    q = torch.randn(2, tokens, HEADS, NOPE + ROPE).to(dtype)
    kv = torch.randn(2, tokens, HEADS, NOPE + V).to(dtype)
    return q, kv, torch.randn(2, tokens, 10 + ROPE).to(dtype), *angles(tokens, ROPE, dtype)


def cats(nope, rope):
    return torch.cat((nope, rope.expand(-1, nope.shape[1], -1, -1)), -1)


def copies(nope, rope):
    whole = nope.new_empty(*nope.shape[:-1], NOPE + ROPE)
    whole[..., :NOPE].copy_(nope)
    whole[..., NOPE:].copy_(rope.expand(-1, nope.shape[1], -1, -1))
    return whole


def assigned(nope, rope):
    """Without expanding what one head has, and into zeros."""
    whole = nope.new_zeros(*nope.shape[:-1], NOPE + ROPE)
    whole[..., :NOPE] = nope
    whole[..., NOPE:] = rope
    return whole


JOINS = [cats, copies, assigned]


def parts(q, kv, kv_a):
    q_nope, q_rope = q.transpose(1, 2).split([NOPE, ROPE], -1)
    k_nope, _ = kv.transpose(1, 2).split([NOPE, V], -1)
    return q_nope, q_rope, k_nope, kv_a[..., -ROPE:].unsqueeze(1)


def latent(rotate, join=cats, cached=False):
    """As all models of the family: [batch, heads, tokens, dim]. A cache takes the shared key before keys are made."""

    def apply(q, kv, kv_a, cos, sin):
        q_nope, q_rope, k_nope, k_rope = parts(q, kv, kv_a)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q_rope, k_rope = rotate(q_rope, cos, sin), rotate(k_rope, cos, sin)
        return join(q_nope, q_rope), k_rope if cached else join(k_nope, k_rope)

    return apply


ONE, Q, APART = {"mla_qk_rope": 1}, {"mla_q_rope": 1}, {"rotary_embedding": 1}
WHOLE = [rotate for rotate in ROTATIONS if rotate is not partial]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotate", WHOLE)
@pytest.mark.parametrize("join", JOINS)
def test_spellings(rotate, join, dtype):
    exact = rotate.__name__ != "complex_numbers"  # torch fuses a multiplication with an addition
    assert found(latent(rotate, join), *inputs(dtype), exact=exact) == ONE
    assert found(latent(rotate, join, cached=True), *inputs(dtype), exact=exact) == Q


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cached", [False, True])
def test_one_token(cached, dtype):
    assert found(latent(interleaved_to_half, copies, cached), *inputs(dtype, tokens=1)) == (Q if cached else ONE)


def test_dynamic_shapes():
    compiled = traced(latent(half, copies), ALL, dynamic=True)
    for tokens in (5, 7):
        given = inputs(torch.bfloat16, tokens)
        with torch.no_grad():
            for ours, eager in zip(compiled(*given), latent(half, copies)(*given), strict=True):
                assert torch.equal(ours, eager) and ours.stride() == eager.stride()
    assert swaps(compiled.report) == ONE


def test_tokens_first():
    def apply(q, kv, kv_a, cos, sin):
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
        k_rope = half(kv_a[..., None, -ROPE:], cos, sin)
        q_rope = half(q[..., NOPE:], cos, sin)
        keys = torch.cat((kv[..., :NOPE], k_rope.expand(-1, -1, HEADS, -1)), -1)
        return torch.cat((q[..., :NOPE], q_rope), -1), keys

    assert found(apply, *inputs(torch.bfloat16)) == ONE


def test_keys_with_columns_of_their_own():
    """As in an indexer: the key of the only head is split like q."""

    def apply(q, kv, kv_a, cos, sin):
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        heads = [x.split([NOPE, ROPE], -1) for x in (q.transpose(1, 2), kv_a[..., -NOPE - ROPE :].unsqueeze(1))]
        return [torch.cat((nope, half(rope, cos, sin)), -1) for nope, rope in heads]

    assert found(apply, *inputs(torch.bfloat16)) == ONE


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("use_cache", "expected"), [(False, "mla_qk_rope"), (True, "mla_q_rope")])
@torch.no_grad()
def test_without_a_low_rank_projection_of_q(use_cache, expected):
    """As in DeepSeek-V2-Lite; the cache keeps the rotated key."""
    configuration, changes = FAMILIES["deepseek_v2"]
    model = build(configuration, {**changes, "q_lora_rank": None}, torch.bfloat16)
    compiled = traced(model, ALL)
    logits = compiled(input_ids=prompt(), use_cache=use_cache).logits
    assert swaps(compiled.report)[expected] == 2
    torch.testing.assert_close(logits, model(input_ids=prompt()).logits, rtol=0.1, atol=0.1)


def near(change):
    """``change`` makes the two results of the parts and of the rotation."""

    def apply(q, kv, kv_a, cos, sin):
        q_nope, q_rope, k_nope, k_rope = parts(q, kv, kv_a)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return change(q_nope, half(q_rope, cos, sin), k_nope, half(k_rope, cos, sin))

    return apply


def overlapping(nope, rope):
    whole = nope.new_empty(*nope.shape[:-1], NOPE + ROPE)
    whole[..., :NOPE] = nope
    whole[..., NOPE - 2 : -2] = rope
    return whole[..., :-2].clone()


def in_the_middle(nope, rope):
    whole = nope.new_ones(*nope.shape[:-1], 2 + NOPE + ROPE)
    whole[..., 2 : 2 + NOPE] = nope
    whole[..., 2 + NOPE :] = rope
    return whole


def into(base):
    def join(nope, rope):
        whole = base.repeat(*nope.shape[:-1], NOPE + ROPE)
        whole[..., :NOPE] = nope
        whole[..., NOPE:] = rope
        return whole

    return join


def rounded(nope, rope):
    whole = nope.new_empty(*nope.shape[:-1], NOPE + ROPE)
    whole[..., :NOPE] = nope.double() * 1.001
    whole[..., NOPE:] = rope
    return whole


NEAR = {
    "rotated in front": (lambda a, q, b, k: (torch.cat((q, a), -1), cats(b, k)), APART),
    "scaled": (lambda a, q, b, k: (cats(2 * a, q), cats(b, k)), APART),
    "of another tensor": (lambda a, q, b, k: (cats(b, q), cats(b, k)), APART),
    "in another order": (lambda a, q, b, k: (cats(a.flip(2), q), cats(b, k)), APART),
    "not all of it": (lambda a, q, b, k: (cats(a[..., 1:], q), cats(b, k)), APART),
    "q is used": (lambda a, q, b, k: (cats(a, q), cats(b, k), q.sin()), APART),
    "three parts": (lambda a, q, b, k: (torch.cat((a, q, a), -1), cats(b, k)), APART),
    "twice": (lambda a, q, b, k: (torch.cat((q, q), -1), cats(b, k)), APART),
    "tokens in a row": (lambda a, q, b, k: (torch.cat((a[..., :NOPE], q[..., :NOPE]), 2), cats(b, k)), APART),
    "q overlaps": (lambda a, q, b, k: (overlapping(a, q), cats(b, k)), APART),
    "q in the middle": (lambda a, q, b, k: (in_the_middle(a, q), cats(b, k)), APART),
    # q is found, and the key is rotated alone.
    "keys are used": (lambda a, q, b, k: (cats(a, q), cats(b, k), k.sin()), Q),
    "keys overlap": (lambda a, q, b, k: (cats(a, q), overlapping(b, k)), Q),
    "keys in the middle": (lambda a, q, b, k: (cats(a, q), in_the_middle(b, k)), Q),
    "keys rounded": (lambda a, q, b, k: (cats(a, q), rounded(b, k)), Q),
    "keys of one head": (lambda a, q, b, k: (cats(a, q), assigned(b, k)[:, :1] + cats(b[:, :1], k)), Q),
    "rotated keys in front": (lambda a, q, b, k: (cats(a, q), torch.cat((k.expand(-1, HEADS, -1, -1), b), -1)), Q),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NEAR)
def test_near_misses(name, dtype):
    change, expected = NEAR[name]
    assert found(near(change), *inputs(dtype)) == expected


def test_into_a_tensor_that_was_there():
    def apply(q, kv, kv_a, cos, sin, base):
        return near(lambda a, q, b, k: (cats(a, q), into(base)(b, k)))(q, kv, kv_a, cos, sin)

    assert found(apply, *inputs(torch.bfloat16), torch.ones(1, dtype=torch.bfloat16)) == Q


def test_more_columns_behind():
    def apply(q, kv, kv_a, cos, sin):
        q_nope, q_rope, _ = q.transpose(1, 2).split([NOPE - 2, ROPE, 2], -1)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return torch.cat((q_nope, half(q_rope, cos, sin)), -1), half(kv_a[..., -ROPE:].unsqueeze(1), cos, sin)[:, 0]

    assert found(apply, *inputs(torch.bfloat16)) == APART


def test_rotated_in_part():
    assert found(latent(partial), *inputs(torch.bfloat16)) == APART


def test_other_angles():
    def apply(q, kv, kv_a, cos, sin):
        q_nope, q_rope, k_nope, k_rope = parts(q, kv, kv_a)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return cats(q_nope, half(q_rope, cos, sin)), cats(k_nope, half(k_rope, sin, cos))

    assert found(apply, *inputs(torch.bfloat16)) == {"rotary_embedding": 2}


@torch.no_grad()
def test_the_rotation_is_left_to_its_own_pattern_where_this_one_is_off():
    for cached in (False, True):
        compiled = traced(latent(half, cached=cached), {"deepinfer.patterns": ["rotary_embedding"]})
        compiled(*inputs(torch.bfloat16))
        assert swaps(compiled.report) == APART
        assert {*compiled.report.patterns} == {"mla_q_rope" if cached else "mla_qk_rope", "rotary_embedding"}
