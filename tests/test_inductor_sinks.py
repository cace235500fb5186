"""Attention with sinks, as GPT-OSS spells it: spellings, near misses, and what comes of it."""

from typing import Any

import pytest
import torch
from graphs import swaps, traced
from test_inductor_attention import repeat
from test_inductor_masks import BATCH, HEADS, SHARED, TOKENS, added, indexed, inputs, triangle

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def spelled(q, k, v, sinks, mask=None, *, scale=0.25, shifted=True, columns=-1, softmax_dtype=None, swapped=True):
    count = q.shape[1] // k.shape[1]
    scores = torch.matmul(q, repeat(k, count).transpose(2, 3)) * scale
    if mask is not None:
        scores = scores + mask
    column = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    scores = torch.cat([scores, column], dim=-1)
    if shifted:
        scores = scores - scores.max(dim=-1, keepdim=True).values
    weights = torch.softmax(scores, dim=-1, dtype=softmax_dtype or scores.dtype)[..., :columns].to(v.dtype)
    result = torch.matmul(weights, repeat(v, count)[:, :, : weights.shape[-1]])
    return result.transpose(1, 2).contiguous() if swapped else result


def sinks_of(dtype: torch.dtype) -> torch.Tensor:
    return (2 * torch.randn(HEADS)).to(dtype)


def check(function: Any, *tensors: torch.Tensor) -> int:
    """How often it was swapped; the results are as near to those in float64 as eager's are."""
    with torch.no_grad():
        run = traced(function, {"deepinfer.patterns": "all"})
        ours, eager = run(*tensors), function(*tensors)
        exact = function(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors))
    assert ours.shape == eager.shape
    assert ours.dtype == eager.dtype
    assert ours.is_contiguous()
    floor = 4 * torch.finfo(eager.dtype).eps
    assert (ours - exact).abs().max() <= 1.5 * (eager - exact).abs().max() + floor
    return swaps(run.report).get("sink_attention", 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", [{}, {"shifted": False}, {"softmax_dtype": torch.float32}, {"scale": 2.0}])
def test_spellings(dtype, change):
    def function(q, k, v, sinks):
        mask = added(indexed(), torch.finfo(dtype).min, dtype).to(q.dtype)
        return spelled(q, k, v, sinks, mask, **change)

    assert check(function, *inputs(dtype), sinks_of(dtype)) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_masks(dtype):
    """A window stays a mask on a CPU; so does what comes from outside."""

    def window(q, k, v, sinks):
        return spelled(q, k, v, sinks, added(indexed(before=4), torch.finfo(dtype).min, dtype).to(q.dtype))

    assert check(window, *inputs(dtype), sinks_of(dtype)) == 1
    seen = torch.rand(BATCH, 1, TOKENS, TOKENS) < 0.5
    seen[..., 0] = True
    assert check(spelled, *inputs(dtype), sinks_of(dtype), added(seen, torch.finfo(dtype).min, dtype)) == 1
    assert check(spelled, *inputs(dtype), sinks_of(dtype)) == 1


@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, -torch.inf])
def test_a_token_that_sees_nothing(lowest):
    """Its sink takes everything, and the result is zero."""
    seen = torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool)
    seen[:, :, 3] = False
    tensors = (*inputs(), sinks_of(torch.float32), added(seen, lowest))
    assert check(spelled, *tensors) == 1
    with torch.no_grad():
        result = traced(spelled, {"deepinfer.patterns": "all"})(*tensors)
    assert not result[:, 3].any()


@pytest.mark.parametrize("sink", [-1e4, 1e4])
def test_extreme_sinks(sink):
    assert check(spelled, *inputs(), torch.full((HEADS,), sink)) == 1


def test_one_token():
    seen = torch.rand(BATCH, 1, 1, TOKENS) < 0.7
    assert check(spelled, *inputs(tokens=1), sinks_of(torch.float32), added(seen, -3e38)) == 1


def test_heads_of_their_own():
    q, k, v = inputs()
    k, v = (repeat(t, HEADS // SHARED).contiguous() for t in (k, v))
    assert check(spelled, q, k, v, sinks_of(torch.float32)) == 1


def cut_elsewhere(q, k, v, sinks):
    return spelled(q, k, v, sinks, columns=-2)


def sinks_in_front(q, k, v, sinks):
    scores = q @ repeat(k, HEADS // SHARED).transpose(2, 3)
    column = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    weights = torch.softmax(torch.cat([column, scores], -1), -1)[..., 1:]
    return (weights @ repeat(v, HEADS // SHARED)).transpose(1, 2).contiguous()


def sinks_of_tokens(q, k, v, sinks):
    scores = q @ repeat(k, HEADS // SHARED).transpose(2, 3)
    column = torch.linspace(0, 1, TOKENS).reshape(1, 1, -1, 1).expand(q.shape[0], HEADS, -1, -1) + sinks[0]
    weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    return (weights @ repeat(v, HEADS // SHARED)).transpose(1, 2).contiguous()


def masks_of_heads(q, k, v, sinks):
    mask = triangle().float() * sinks.reshape(1, -1, 1, 1)
    return spelled(q, k, v, sinks, mask)


def more_of_it(q, k, v, sinks):
    """The weights are a result as well."""
    scores = q @ repeat(k, HEADS // SHARED).transpose(2, 3)
    column = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    result = (weights @ repeat(v, HEADS // SHARED)).transpose(1, 2).contiguous()
    return result + weights.sum()


@pytest.mark.parametrize("function", [cut_elsewhere, sinks_in_front, sinks_of_tokens, masks_of_heads, more_of_it])
def test_near_misses(function):
    assert check(function, *inputs(), sinks_of(torch.float32)) == 0
