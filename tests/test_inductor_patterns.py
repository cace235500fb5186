"""Each pattern on small graphs: the spellings that must be found, and near misses that must not change the result.

A near miss alters one thing about a matched chain. It may stay unmatched or be matched as what it is; what counts is
that the outcome is that of eager.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checking import assert_bit_equal
from graphs import Traced, swaps, traced

ALL = {"deepinfer.patterns": "all"}
LOW = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *LOW]


@torch.no_grad()
def run(function: Callable[..., Any], *args: Any, exact: bool = True, **options: Any) -> Traced:
    """Compiles, compares with eager, and returns what was compiled. ``exact``: bit for bit."""
    compiled = traced(function, {**ALL, **options})
    ours, eager = compiled(*args), function(*args)
    if isinstance(eager, torch.Tensor):
        ours, eager = (ours,), (eager,)
    for mine, theirs in zip(ours, eager, strict=True):
        assert mine.stride() == theirs.stride()
        if exact and mine.dtype in LOW:
            assert_bit_equal(mine, theirs)
        else:
            rtol, atol = (2**-7, 3e-5) if mine.dtype in LOW else (2e-6, 5e-6)
            torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol, equal_nan=True)
    return compiled


def found(function: Callable[..., Any], *args: Any, **options: Any) -> dict[str, int]:
    return swaps(run(function, *args, **options).report)


# -- RMSNorm -----------------------------------------------------------------------------------------------------------


def xhat(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    hidden = x.float()
    return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)


NORMS = {
    "cast_mul": lambda x, w: w * xhat(x).to(x.dtype),
    "cast_mul, swapped operands": lambda x, w: xhat(x).to(x.dtype) * w,
    "mul_cast": lambda x, w: (w * xhat(x)).to(x.dtype),
    "mul_cast, weight in float32": lambda x, w: (w.float() * xhat(x)).to(x.dtype),
    "one_plus": lambda x, w: (xhat(x) * (1.0 + w.float())).to(x.dtype),
    "none": lambda x, w: xhat(x).to(x.dtype),
    "h * h": lambda x, w: w * (x.float() * torch.rsqrt((x.float() * x.float()).mean(-1, True) + 1e-6)).to(x.dtype),
    "pow -0.5": lambda x, w: w * (x.float() * torch.pow(x.float().pow(2).mean(-1, True) + 1e-6, -0.5)).to(x.dtype),
    "eps first": lambda x, w: w * (x.float() * torch.rsqrt(1e-5 + x.float().square().mean(-1, True))).to(x.dtype),
    "named axis": lambda x, w: (
        w * (x.float() * torch.rsqrt(x.float().pow(2).mean(x.dim() - 1, True) + 0.1)).to(x.dtype)
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NORMS)
def test_spellings_of_the_norm(name, dtype):
    x, weight = torch.randn(3, 5, 32).to(dtype), torch.randn(32).to(dtype)
    assert found(NORMS[name], x, weight) == {"rms_norm": 1}
    residual = torch.randn_like(x)

    def with_residual(x, residual, weight):
        total = residual + x
        return NORMS[name](total, weight), total

    assert found(with_residual, x, residual, weight) == {"add_rms_norm": 1}


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["cast_mul", "mul_cast", "one_plus"])
def test_norm_of_mixed_dtypes(name, dtype, weight_dtype):
    # vllm#48324: bf16 activations with an fp32 weight.
    x, weight = torch.randn(3, 5, 32).to(dtype), torch.randn(32).to(weight_dtype)
    run(NORMS[name], x, weight)


def test_norm_of_a_transposed_view_keeps_its_strides():
    x = torch.randn(2, 7, 4, 16).bfloat16().transpose(1, 2)
    assert found(NORMS["cast_mul"], x, torch.randn(16).bfloat16()) == {"rms_norm": 1}
    # Other layouts would come back with other strides, and stay as they are.
    assert found(NORMS["cast_mul"], x.permute(1, 0, 2, 3), torch.randn(16).bfloat16()) == {}


NEAR_NORMS = {
    "other axis": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6)),
    "two axes": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + 1e-6)),
    "keepdim off": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1) + 1e-6).unsqueeze(-1)),
    "keepdim off, broadcast": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1) + 1e-6)),
    "cube": lambda x, w: w * (x * torch.rsqrt(x.pow(3).abs().mean(-1, True) + 1e-6)),
    "x times y": lambda x, w: w * (x * torch.rsqrt((x * x.sin()).abs().mean(-1, True) + 1e-6)),
    "sum": lambda x, w: w * (x * torch.rsqrt(x.pow(2).sum(-1, True) + 1e-6)),
    "no eps": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, True))),
    "negative eps": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, True) - 1e-6)),
    "eps tensor": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, True) + w.abs().min())),
    "scaled eps": lambda x, w: w * (x * torch.rsqrt(torch.add(x.pow(2).mean(-1, True), 1e-3, alpha=2.0))),
    "inverse power": lambda x, w: w * (x * (x.pow(2).mean(-1, True) + 1e-6).pow(-0.25)),
    "other rows": lambda x, w: w * (x.flip(0) * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-6)),
    "weight of another axis": lambda x, w: w[: x.shape[0], None] * xhat(x),
    "weight per row": lambda x, w: (x * 2) * xhat(x),
    "2 + w": lambda x, w: xhat(x) * (2.0 + w),
    "w - 1": lambda x, w: xhat(x) * (w - 1.0),
    "1 + 2 w": lambda x, w: xhat(x) * torch.add(torch.ones_like(w), w, alpha=2.0),
    "rsqrt used elsewhere": lambda x, w: (lambda r: (w * (x * r), r))(torch.rsqrt(x.pow(2).mean(-1, True) + 1e-6)),
    "normed used elsewhere": lambda x, w: (lambda n: (w * n, n))(xhat(x)),
    "mean used elsewhere": lambda x, w: (lambda m: (w * (x * torch.rsqrt(m + 1e-6)), m))(x.pow(2).mean(-1, True)),
    "statistics in the storage dtype": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-6)),
    "rms_norm of torch": lambda x, w: F.rms_norm(x, (x.shape[-1],), w, 1e-6),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NEAR_NORMS)
def test_near_misses_of_the_norm(name, dtype):
    x, weight = torch.randn(32, 32).to(dtype), torch.randn(32).to(dtype)
    run(NEAR_NORMS[name], x, weight)


NEAR_RESIDUALS = {
    "broadcast residual": lambda x, r, w: NORMS["cast_mul"](x + r[:1], w),
    "broadcast row": lambda x, r, w: NORMS["cast_mul"](x + r[0], w),
    "scaled residual": lambda x, r, w: NORMS["cast_mul"](torch.add(x, r, alpha=0.5), w),
    "constant": lambda x, r, w: NORMS["cast_mul"](x + 1.0, w),
    "residual of another dtype": lambda x, r, w: NORMS["cast_mul"](x + r.half(), w),
    "difference": lambda x, r, w: NORMS["cast_mul"](x - r, w),
    "end of a rotation": lambda x, r, w: NORMS["cast_mul"](x * r + torch.cat((-x[:, 16:], x[:, :16]), -1) * r, w),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NEAR_RESIDUALS)
def test_near_misses_of_the_residual(name, dtype):
    x, residual, weight = torch.randn(4, 32).to(dtype), torch.randn(4, 32).to(dtype), torch.randn(32).to(dtype)
    assert "add_rms_norm" not in found(NEAR_RESIDUALS[name], x, residual, weight)


# -- rotary embedding --------------------------------------------------------------------------------------------------


def angles(tokens: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = torch.outer(torch.arange(tokens).float(), 100.0 ** -(torch.arange(dim // 2) / dim))
    frequencies = torch.cat((frequencies, frequencies), -1)[None]
    return frequencies.cos().to(dtype), frequencies.sin().to(dtype)


def turn_half(x):
    low, high = x.chunk(2, -1)
    return torch.cat((-high, low), -1)


def turn_half_back(x):
    low, high = x.chunk(2, -1)
    return torch.cat((high, -low), -1)


def turn_pairs(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def half(x, cos, sin):
    return x * cos + turn_half(x) * sin


def half_back(x, cos, sin):
    return x * cos + turn_half_back(x) * sin


def half_in_float32(x, cos, sin):
    return half(x.float(), cos.float(), sin.float()).to(x.dtype)


def partial(x, cos, sin):
    turned = half(x[..., :8], cos[..., :8], sin[..., :8])
    return torch.cat((turned, x[..., 8:]), -1)


def split(x, cos, sin):
    cos, sin = cos[..., :8], sin[..., :8]
    low, high = torch.chunk(x, 2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def split_back(x, cos, sin):
    cos, sin = cos[..., :8], sin[..., :8]
    low, high = torch.chunk(x, 2, dim=-1)
    return torch.cat((low * cos + high * sin, high * cos - low * sin), -1)


def interleaved_to_half(x, cos, sin):
    cos, sin = cos[..., :8], sin[..., :8]
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), -1)


def pairs(x, cos, sin):
    cos, sin = (table[..., :8].repeat_interleave(2, -1) for table in (cos, sin))
    return x * cos + turn_pairs(x) * sin


def turned_then_widened(x, cos, sin):
    """Ernie 4.5."""
    cos, sin = (table[..., :8].repeat_interleave(2, -1).float() for table in (cos, sin))
    return (x.float() * cos + turn_pairs(x).float() * sin).to(x.dtype)


def complex_numbers(x, cos, sin):
    unit = torch.complex(cos[..., :8].float(), sin[..., :8].float())
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * unit
    return torch.view_as_real(turned).flatten(-2).type_as(x)


ROTATIONS = [
    half, half_back, half_in_float32, partial, split, split_back, interleaved_to_half, pairs, turned_then_widened,
    complex_numbers,
]  # fmt: skip


def heads_first(rotate):
    def apply(q, k, cos, sin):
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    return apply


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotate", ROTATIONS)
def test_spellings_of_the_rotation(rotate, dtype):
    q, k = torch.randn(2, 5, 4, 16).to(dtype), torch.randn(2, 5, 2, 16).to(dtype)
    cos, sin = angles(5, 16, dtype)
    assert found(heads_first(rotate), q, k, cos, sin) == {"rotary_embedding": 1}
    assert found(lambda x, cos, sin: rotate(x, cos, sin), q[:, :, 0], cos, sin) == {"rotary_embedding": 1}


def crossed(x, cos, sin):
    return turn_half(x) * cos + x * sin


def other_half(x, cos, sin):
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-low, high), -1) * sin


def both_negative(x, cos, sin):
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, -low), -1) * sin


def uneven(x, cos, sin):
    return x * cos + torch.cat((-x[..., 6:], x[..., :6]), -1) * sin


def other_tensor(x, cos, sin):
    return x * cos + turn_half(x.flip(0)) * sin


def along_heads(x, cos, sin):
    low, high = x.chunk(2, -2)
    return x * cos + torch.cat((-high, low), -2) * sin


def difference(x, cos, sin):
    return x * cos - turn_half(x) * sin


def sine_twice(x, cos, sin):
    low, high = x.chunk(2, -1)
    cos, sin = cos[..., :8], sin[..., :8]
    return torch.cat((low * cos - high * sin, high * sin + low * cos), -1)


def wrong_sign(x, cos, sin):
    low, high = x.chunk(2, -1)
    cos, sin = cos[..., :8], sin[..., :8]
    return torch.cat((low * cos - high * sin, high * cos - low * sin), -1)


def turned_is_used(x, cos, sin):
    turned = turn_half(x)
    return x * cos + turned * sin, turned.sum()


def product_is_used(x, cos, sin):
    product = x * cos
    return product + turn_half(x) * sin, product.sum()


def odd_first(x, cos, sin):
    return x * cos + torch.stack((-x[..., ::2], x[..., 1::2]), -1).flatten(-2) * sin


def rest_of_another(x, cos, sin):
    return torch.cat((half(x[..., :8], cos[..., :8], sin[..., :8]), x.flip(0)[..., 8:]), -1)


def rest_first(x, cos, sin):
    return torch.cat((x[..., :8], half(x[..., 8:], cos[..., 8:], sin[..., 8:])), -1)


def one_angle_for_all(x, cos, sin):
    return x * cos[..., :1] + turn_half(x) * sin[..., :1]


NEAR_ROTATIONS = [
    crossed, other_half, both_negative, uneven, other_tensor, along_heads, difference, sine_twice, wrong_sign,
    turned_is_used, product_is_used, odd_first, rest_of_another, rest_first, one_angle_for_all,
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotate", NEAR_ROTATIONS)
def test_near_misses_of_the_rotation(rotate, dtype):
    run(rotate, torch.randn(2, 5, 16).to(dtype), *angles(5, 16, dtype))


def test_k_that_needs_q_is_rotated_apart():
    def chained(q, k, cos, sin):
        q = half(q, cos, sin)
        return q, half(k + q.mean(1, keepdim=True), cos, sin)

    q, k = torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    assert found(chained, q, k, *angles(5, 16, torch.float32)) == {"rotary_embedding": 2}


def test_q_and_k_with_other_angles_are_rotated_apart():
    def apart(q, k, cos, sin):
        return half(q, cos, sin), half(k, sin, cos)

    q, k = torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    assert found(apart, q, k, *angles(5, 16, torch.float32)) == {"rotary_embedding": 2}


def test_angles_computed_twice_are_one():
    def together(q, k, cos, sin):
        return half(q, cos.split(1)[0], sin[None, 0]), half(k, cos.split(1)[0], sin[None, 0])

    q, k = torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    assert found(together, q, k, *angles(5, 16, torch.float32)) == {"rotary_embedding": 1}


def test_angles_drawn_twice_are_two():
    def apart(q, k, cos, sin):
        return half(q, torch.bernoulli(cos), sin), half(k, torch.bernoulli(cos), sin)

    compiled = traced(apart, ALL)
    compiled(torch.randn(2, 5, 16), torch.randn(2, 5, 16), *(table.abs() for table in angles(5, 16, torch.float32)))
    assert swaps(compiled.report) == {"rotary_embedding": 2}


def test_float32_tables_with_products_rounded_to_16_bits():
    def rounded(x, cos, sin):
        return (x * cos).to(x.dtype) + (turn_half(x) * sin).to(x.dtype)

    run(rounded, torch.randn(2, 5, 16).bfloat16(), *angles(5, 16, torch.float32))
