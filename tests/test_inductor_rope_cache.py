"""Rotations whose k goes to a cache, and v to another one: what is found, what is not, and where the caches stay."""

import copy
import re

import pytest
import torch
import transformers
from checking import assert_bit_equal
from graphs import swaps, traced
from test_inductor_patterns import (
    ALL,
    DTYPES,
    NORMS,
    ROTATIONS,
    angles,
    half,
    interleaved_to_half,
    partial,
    split,
    split_back,
)
from tiny_models import decode_inputs, prompt, tiny_model
from torch._inductor.utils import run_and_get_code

from torch_deepinfer.inductor import report

ROTATION, NORMED = {"rotary_embedding_cache_": 1}, {"qk_norm_rope_cache_": 1}
NAMES = [*ROTATION, *NORMED]
APART = {"rotary_embedding": 1}
LENGTH, SIZE = 12, 16


def inputs(dtype, tokens=1, batch=2):
    q, k, v = (torch.randn(batch, tokens, count, SIZE).to(dtype) for count in (4, 2, 2))
    keys, values = torch.randn(2, batch, 2, LENGTH, SIZE).to(dtype)
    position = torch.arange(tokens) + 3
    turns = (table[:, 2:] for table in angles(2 + tokens, SIZE, dtype))
    return q, k, v, *torch.randn(2, SIZE).to(dtype), *turns, keys, values, position


def index_copy(cache, position, rows):
    """As the static cache of transformers does it."""
    cache.index_copy_(2, position, rows)
    return cache


def assigned(cache, position, rows):
    cache[:, :, position] = rows
    return cache


def attend(q, keys, values):
    """Anything that needs all of it."""
    return q.float().sum(-1).mean(1) + keys.float().mean((1, 2, 3))[:, None] * values.float().mean((1, 2, 3))[:, None]


def step(rotate, norm=None, write=index_copy, attention=attend):
    def apply(q, k, v, q_weight, k_weight, cos, sin, keys, values, position):
        if norm is not None:
            q, k = norm(q, q_weight), norm(k, k_weight)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q, k = (rotate(x.transpose(1, 2), cos, sin) for x in (q, k))
        keys, values = write(keys, position, k), write(values, position, v.transpose(1, 2))
        return q, attention(q, keys, values)

    return apply


@torch.no_grad()
def found(function, *given, exact=True, dynamic=None):
    """What is swapped; results and caches are those of eager."""
    compiled = traced(function, ALL, dynamic=dynamic)
    ours, theirs = copy.deepcopy(given), copy.deepcopy(given)
    actual, expected = compiled(*ours), function(*theirs)
    for mine, eager in zip([*actual, *ours], [*expected, *theirs], strict=True):
        strides = zip(eager.shape, mine.stride(), eager.stride(), strict=True)
        assert all(size == 1 or ours == theirs for size, ours, theirs in strides)
        if exact and mine.dtype in (torch.bfloat16, torch.float16, torch.int64):
            assert_bit_equal(mine, eager)
        else:
            torch.testing.assert_close(mine, eager, rtol=1e-5, atol=1e-5 if exact else 2e-2)
    return swaps(compiled.report)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("rotate", ROTATIONS)
def test_rotations(rotate, tokens, dtype):
    exact = rotate.__name__ != "complex_numbers"  # torch fuses a multiplication with an addition
    # The op keeps the heads of a token together. Some spellings do not, which makes no difference to one token.
    together = tokens == 1 or rotate not in (partial, split, split_back, interleaved_to_half)
    assert found(step(rotate), *inputs(dtype, tokens), exact=exact) == (ROTATION if together else APART)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NORMS)
def test_norms(name, dtype):
    assert found(step(half, NORMS[name]), *inputs(dtype)) == NORMED


@pytest.mark.parametrize("write", [index_copy, assigned])
@pytest.mark.parametrize("rotate", [half, interleaved_to_half, partial])
def test_writes(rotate, write):
    assert found(step(rotate, NORMS["one_plus"], write), *inputs(torch.bfloat16)) == NORMED
    assert found(step(rotate, write=write), *inputs(torch.bfloat16)) == ROTATION


def test_no_columns_that_are_not_rotated():
    """As Phi-3 does it."""

    def rotate(x, cos, sin):
        return torch.cat((half(x[..., :SIZE], cos, sin), x[..., SIZE:]), -1)

    assert found(step(rotate), *inputs(torch.bfloat16)) == ROTATION


def test_dynamic_shapes():
    def apply(q, *given):
        assert q.shape[-1] == SIZE  # as models know it
        return step(half)(q, *given)

    assert found(apply, *inputs(torch.bfloat16, 5, batch=3), dynamic=True) == ROTATION


def test_positions_from_the_end():
    *given, position = inputs(torch.bfloat16, 2)
    assert found(step(half, write=assigned), *given, position - 4) == ROTATION


def test_angles_of_two_dimensions():
    def rotate(x, cos, sin):
        return half(x, cos[0, 0], sin[0, 0])

    assert found(step(rotate), *inputs(torch.bfloat16)) == APART


def test_k_first():
    def apply(q, k, v, _, __, cos, sin, keys, values, position):
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        k = half(k.transpose(1, 2), cos, sin)
        keys, values = index_copy(keys, position, k), index_copy(values, position, v.transpose(1, 2))
        q = half(q.transpose(1, 2), cos, sin)
        return q, attend(q, keys, values)

    assert found(apply, *inputs(torch.bfloat16)) == ROTATION


# -- near misses -------------------------------------------------------------------------------------------------------


def changed(change):
    """``change`` gets the rotated q and k, v, the caches and the position, and returns a result."""

    def apply(q, k, v, _, __, cos, sin, keys, values, position):
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q, k = (half(x.transpose(1, 2), cos, sin) for x in (q, k))
        return (change(q, k, v.transpose(1, 2), keys, values, position),)

    return apply


def both(q, k, v, keys, values, position):
    return attend(q, index_copy(keys, position, k), index_copy(values, position, v))


def read_before(q, k, v, keys, values, position):
    return both(q, k, v, keys, values, position) + keys.clone().sum()


def read_as_it_was(q, k, v, keys, values, position):
    before = keys.sum((1, 2, 3))[:, None].float()
    return both(q, k, v, keys, values, position) + before


def a_copy_is_written(q, k, v, keys, values, position):
    return attend(q, keys.index_copy(2, position, k), values.index_copy(2, position, v))


def written_twice(q, k, v, keys, values, position):
    result = both(q, k, v, keys, values, position)
    keys[:, :, 0] = 1
    return result


def two_layers(q, k, v, keys, values, position):
    return both(q, k, v, keys, values, position) + both(q, 2 * v, v.sin(), keys, values, position)


def one_cache(q, k, v, keys, values, position):
    index_copy(keys, position, k)
    return attend(q, keys, index_copy(keys, position, v))


def view_of_a_cache(q, k, v, keys, values, position):
    index_copy(keys[:, :, 2:], position, k)
    return attend(q, keys, index_copy(values, position, v))


def other_positions(q, k, v, keys, values, position):
    return attend(q, index_copy(keys, position, k), index_copy(values, position + 1, v))


def added(q, k, v, keys, values, position):
    keys.index_put_((torch.arange(2)[:, None, None], torch.arange(2)[:, None], position), k, accumulate=True)
    return attend(q, keys, index_copy(values, position, v))


def other_dimension(q, k, v, keys, values, position):
    return attend(q, keys.index_copy_(1, position[:1] % 2, k.repeat(1, 1, LENGTH, 1)[:, :1]), values)


def keys_alone(q, k, v, keys, values, position):
    return attend(q, index_copy(keys, position, k), values + v)


def k_is_used(q, k, v, keys, values, position):
    return both(q, k, v, keys, values, position) + k.float().mean()


def v_from_q(q, k, v, keys, values, position):
    return both(q, k, q[:, :2] + v, keys, values, position)


def v_from_the_keys(q, k, v, keys, values, position):
    index_copy(keys, position, k)
    return attend(q, keys, index_copy(values, position, v + keys.amax()))


def scaled(q, k, v, keys, values, position):
    return both(q, 2 * k, v, keys, values, position)


def q_is_written(q, k, v, keys, values, position):
    return attend(k, index_copy(keys, position, q[:, :2].contiguous()), index_copy(values, position, v))


READ = "the cache is read before it is written, or as it was"
NEAR = {
    read_as_it_was: READ,
    a_copy_is_written: "the cache does not keep what is written",
    written_twice: "the cache does not keep what is written",
    two_layers: "the cache does not keep what is written",
    one_cache: "the cache does not keep what is written",
    view_of_a_cache: None,
    other_positions: "keys go to a cache, values do not",
    added: None,
    other_dimension: None,
    keys_alone: "keys go to a cache, values do not",
    k_is_used: None,
    v_from_q: "the values depend on the rotated q and k",
    v_from_the_keys: "the values depend on the rotated q and k",
    scaled: None,
    q_is_written: None,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("near", NEAR, ids=lambda near: near.__name__)
def test_near_misses(near, dtype):
    """The rotation is found, and why no more of it."""
    assert found(changed(near), *inputs(dtype)) == APART
    compiled = traced(changed(near), ALL)
    with torch.no_grad():
        compiled(*inputs(dtype))
    missed = compiled.report.patterns.get("rotary_embedding_cache_")
    assert [*(re.sub(r" \(.*", "", reason) for reason in missed.missed)] == [NEAR[near]] if NEAR[near] else not missed


def test_what_is_read_afterwards_is_what_was_written():
    assert found(changed(read_before), *inputs(torch.bfloat16)) == ROTATION


def test_caches_that_share_memory():
    """Both are the same tensor: the compiler sees one input."""
    *given, keys, _, position = inputs(torch.bfloat16)

    def apply(*given):
        return changed(both)(*given[:-2], given[-2], given[-2], given[-1])

    assert found(apply, *given, keys, position) == APART


@torch.no_grad()
def test_the_rotation_is_left_to_its_own_pattern_where_this_one_is_off():
    for norm, name in [(None, "rotary_embedding"), (NORMS["cast_mul"], "qk_norm_rope")]:
        compiled = traced(step(half, norm), {"deepinfer.patterns": [name]})
        compiled(*inputs(torch.bfloat16))
        assert swaps(compiled.report) == {name: 1}


# -- caches in place ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replayed", [False, True], ids=["called", "replayed"])
@pytest.mark.parametrize(("norm", "name"), [(None, NAMES[0]), (NORMS["cast_mul"], NAMES[1])])
@torch.no_grad()
def test_no_cache_is_copied(device, norm, name, replayed):
    if device == "cpu" and replayed:
        pytest.skip("no graphs to replay on a CPU")
    given = [x.to(device) for x in inputs(torch.bfloat16)]
    expected = [x.clone() for x in given]
    options = {"triton.cudagraphs": replayed, "deepinfer.patterns": NAMES}
    compiled = torch.compile(step(half, norm), backend="deepinfer", options=options, fullgraph=True)
    keys, values, position = given[-3:]
    for cache in (keys, values, position):
        torch._dynamo.mark_static_address(cache)
    where = keys.data_ptr(), values.data_ptr()
    _, codes = run_and_get_code(compiled, *given)
    step(half, norm)(*expected)
    for _ in range(4):
        for each in (position, expected[-1]):
            each += 1
        compiled(*given)
        step(half, norm)(*expected)
        torch.testing.assert_close(keys, expected[-3], rtol=2**-6, atol=2**-6)
        assert_bit_equal(values, expected[-2])
    assert (keys.data_ptr(), values.data_ptr()) == where
    assert report().ops[name] == 1
    code = "\n".join(codes)
    assert f"{name}.default(" in code
    assert not re.search(rf"empty_strided\w*\(\(2, 2, {LENGTH}, {SIZE}\)", code)  # no room for a copy of a cache


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["llama", "qwen3", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_greedy_tokens(family):
    model = tiny_model(family, torch.float32)
    ids = prompt(2, 5)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, **options)
    config = transformers.CompileConfig(backend="deepinfer", fullgraph=True, dynamic=False, mode=None)
    config.options = {"deepinfer.patterns": NAMES}
    config._compile_all_devices = True  # transformers compiles on accelerators by itself
    torch._dynamo.utils.counters.clear()
    actual = model.generate(ids, **options, cache_implementation="static", compile_config=config)
    assert torch.equal(actual, expected)
    done = swaps(report())
    assert sum(done.values()) == 2 * report().graphs >= 2


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_models_with_a_static_cache():
    """What goes through a window is a part of the cache, or none."""
    for family, expected in {"llama": ROTATION, "qwen3": NORMED, "phi3": ROTATION, "gemma3_text": {}}.items():
        model = tiny_model(family, torch.bfloat16)
        compiled = traced(model, {"deepinfer.patterns": NAMES})
        compiled(**decode_inputs(model))
        assert swaps(compiled.report) == {name: 2 * count for name, count in expected.items()}
