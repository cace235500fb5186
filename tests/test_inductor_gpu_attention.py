"""Attention on a GPU: whatever kernel of torch is called in the end, the results are those of eager."""

from typing import Any

import pytest
import torch
from graphs import swaps, traced
from test_inductor_attention import repeat
from test_inductor_masks import added, indexed
from test_inductor_sinks import spelled

from torch_deepinfer.inductor.patterns.attention_decode import MOST_TOKENS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]

TOKENS = 24


def check(function: Any, *tensors: torch.Tensor, disable: str = "") -> dict[str, int]:
    """What was swapped; the results are as near to those in float64 as eager's are."""
    with torch.no_grad():
        run = traced(function, {"deepinfer.patterns": "all", "deepinfer.disable": disable})
        ours, eager = run(*tensors), function(*tensors)
        exact = function(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors))
    assert ours.shape == eager.shape
    assert ours.dtype == eager.dtype
    assert (ours - exact).abs().max() <= 1.5 * (eager - exact).abs().max() + 4 * torch.finfo(eager.dtype).eps
    return swaps(run.report)


def inputs(dtype, tokens=TOKENS, positions=TOKENS, heads=8, shared=2, size=64, of_values=None, batch=2):
    q = torch.randn(batch, tokens, heads, size, device="cuda").to(dtype).transpose(1, 2)
    k = torch.randn(batch, shared, positions, size, device="cuda").to(dtype)
    return q, k, torch.randn(batch, shared, positions, of_values or size, device="cuda").to(dtype)


def attention(q, k, v, mask=None, **options):
    count = q.shape[1] // k.shape[1]
    return torch.nn.functional.scaled_dot_product_attention(
        q, repeat(k, count), repeat(v, count), attn_mask=mask, **options
    )


SHAPES: dict[str, dict[str, int]] = {
    "shared keys": {},
    "a head of keys for each head": {"shared": 8},
    "one head of keys": {"shared": 1},
    "large heads": {"size": 256},
    "heads of MLA": {"shared": 8, "size": 192, "of_values": 128},
    "one sequence": {"batch": 1},
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_causal(shape, dtype):
    tensors = inputs(dtype, **SHAPES[shape])
    batch = tensors[0].shape[0]
    assert check(lambda q, k, v: attention(q, k, v, indexed(device="cuda")[:batch]), *tensors) == {
        "maskless_attention": 1
    }


MANY = {
    "shared keys": {"size": 128},
    "small heads": {"size": 64, "shared": 8},
    "heads of MLA": {"shared": 8, "size": 192, "of_values": 128},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", MANY)
@pytest.mark.parametrize("causal", [False, True])
def test_many_tokens(shape, dtype, causal):
    def function(q, k, v):
        return attention(q.contiguous(), k, v, is_causal=causal).transpose(1, 2).flatten(2)

    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    done = check(function, *inputs(dtype, 300, 300, **MANY[shape]))
    assert ("prefill_attention" in done) == is_hopper


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("before", [1, 5])
def test_window(dtype, before):
    done = check(lambda q, k, v: attention(q, k, v, indexed(before, device="cuda")), *inputs(dtype))
    assert done == ({} if dtype == torch.float32 else {"maskless_attention": 1})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("length", [1, 24, 37])
def test_everything_is_seen(dtype, tokens, length):
    check(attention, *inputs(dtype, tokens, length))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 7, 24])
@pytest.mark.parametrize("length", [24, 37, 64, 300])
def test_a_mask_from_outside(dtype, tokens, length):
    seen = torch.rand(2, 1, tokens, length, device="cuda") < 0.5
    seen[..., 0] = True
    for mask in (seen, added(seen, -torch.inf, dtype), added(seen.expand(-1, 8, -1, -1), -torch.inf, dtype)):
        done = check(attention, *inputs(dtype, tokens, length), mask)
        pattern = "decode_attention" if tokens <= MOST_TOKENS else "grouped_query_attention"
        assert dtype == torch.float32 or done == {pattern: 1}, done


def test_a_cache_of_many_sequences():
    seen = torch.rand(64, 1, 1, 96, device="cuda") < 0.5
    seen[..., 0] = True
    tensors = inputs(torch.bfloat16, 1, 96, batch=64)
    assert check(attention, *tensors, seen) == {"decode_attention": 1}
    assert check(attention, *tensors, seen, disable="decode_attention") == {"grouped_query_attention": 1}


def test_latent_attention_of_a_token():
    tensors = inputs(torch.bfloat16, 1, 300, shared=8, size=192, of_values=128)
    seen = (torch.arange(300, device="cuda") < 77)[None, None, None]
    assert check(attention, *tensors, seen) == {"decode_attention": 1}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("before", [None, 5])
@pytest.mark.parametrize("shared", [2, 8])
def test_sinks(dtype, before, shared):
    def function(q, k, v, sinks):
        mask = added(indexed(before, device="cuda"), torch.finfo(dtype).min, dtype)
        return spelled(q, k, v, sinks, mask.to(q.dtype))

    sinks = (2 * torch.randn(8, device="cuda")).to(dtype)
    done = check(function, *inputs(dtype, shared=shared), sinks)
    assert done == ({"sink_attention": 1} if before is None or dtype != torch.float32 else {})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [37, 64])
def test_sinks_of_one_token(dtype, length):
    seen = torch.rand(2, 1, 1, length, device="cuda") < 0.5
    seen[0] = False  # the sinks take everything
    mask = added(seen, torch.finfo(dtype).min, dtype)
    done = check(spelled, *inputs(dtype, 1, length), torch.randn(8, device="cuda").to(dtype), mask)
    assert done == ({} if dtype == torch.float32 else {"sink_attention": 1})
