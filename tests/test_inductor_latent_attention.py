"""Attention of latent heads whose parts stay apart: what is found, and near misses; the values on a GPU."""

import pytest
import torch
from graphs import swaps, traced
from test_inductor_mla_rope import cats
from test_inductor_moe import traced_for_cuda
from test_inductor_patterns import angles, half

from torch_deepinfer import jit
from torch_deepinfer.inductor.patterns import attention_prefill

aten = torch.ops.aten
HEADS, NOPE, ROPE, V, TOKENS = 4, 128, 64, 128, attention_prefill.LEAST_TOKENS


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(jit, "available", lambda: True)
    monkeypatch.setattr(attention_prefill, "_is_hopper", lambda: True)


def inputs(dtype=torch.bfloat16, tokens=TOKENS, nope=NOPE, rope=ROPE):
    q = torch.randn(2, tokens, HEADS, nope + rope).to(dtype)
    kv = torch.randn(2, tokens, HEADS, nope + V).to(dtype)
    return q, kv, torch.randn(2, tokens, 8 + rope).to(dtype), *angles(tokens, rope, dtype)


def interleaved_to_half(x, cos, sin):
    even, odd, columns = x[..., ::2], x[..., 1::2], cos.shape[-1] // 2
    cos, sin = cos[..., :columns], sin[..., :columns]
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), -1)


def layer(q, kv, kv_a, cos, sin, rotate=interleaved_to_half, then=None, nope=NOPE, causal=True, by_torch=False):
    """As DeepSeek-V3 has it; ``then`` goes on with query and key."""
    rope = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q_nope, q_rope = q.transpose(1, 2).split([nope, rope], -1)
    k_nope, values = kv.transpose(1, 2).split([nope, V], -1)
    k_rope = rotate(kv_a[..., -rope:].unsqueeze(1), cos, sin)
    query, key = cats(q_nope, rotate(q_rope, cos, sin)), cats(k_nope, k_rope)
    if by_torch:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, values, is_causal=causal)
    else:
        out = aten._scaled_dot_product_cudnn_attention.default(query, key, values, None, False, 0.0, causal)[0]
    out = out.transpose(1, 2).flatten(2)
    return out if then is None else (out, then(query, key))


def found(*tensors, **change):
    swapped = traced_for_cuda(lambda *given: layer(*given, **change), *tensors).swapped
    return swapped["prefill_attention"], swapped["latent_attention"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rotate", [half, interleaved_to_half])
@pytest.mark.parametrize("causal", [True, False])
def test_found(hopper, dtype, rotate, causal):
    assert found(*inputs(dtype), rotate=rotate, causal=causal) == (1, 1)


def test_sizes(hopper):
    assert found(*inputs(nope=64, rope=64), nope=64) == (1, 1)
    assert found(*inputs(nope=96, rope=32), nope=96) == (1, 0)


def test_whole_heads_are_used_as_well(hopper):
    assert found(*inputs(), then=lambda query, key: query.sum()) == (1, 0)
    assert found(*inputs(), then=lambda query, key: key[..., :1] + 1) == (1, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@torch.no_grad()
@pytest.mark.parametrize("rotate", [half, interleaved_to_half])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values(rotate, dtype):
    tensors = [tensor.cuda() for tensor in inputs(dtype, tokens=333)]

    def function(*given):
        return layer(*given, rotate=rotate, by_torch=True)

    run = traced(function, {"deepinfer.patterns": "all"})
    ours = run(*tensors)
    exact = layer(*(tensor.double() for tensor in tensors), rotate=rotate, by_torch=True)
    assert (ours - exact).abs().max() <= 1.2 * (function(*tensors) - exact).abs().max()
    assert swaps(run.report).get("latent_attention") == (torch.cuda.get_device_capability() == (9, 0))
