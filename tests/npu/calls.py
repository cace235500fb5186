"""Calls that reach every branch of a kernel, and compare with the CPU op."""

import os

import pytest
import torch
from checking import assert_bit_equal

from torch_deepinfer import ops

needs_standin = [
    pytest.mark.npu,
    pytest.mark.skipif(not os.environ.get("DEEPINFER_STANDIN"), reason="needs the stand-in of `make test-npu`"),
]


def on_npu(value):
    """With the strides of the value."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.t().npu().t() if value.dim() == 2 and value.stride(0) == 1 else value.npu()


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def compare(op, *args, rtol: float = 0.0, **kwargs) -> None:
    """The op on the NPU against the op on the CPU; bit for bit unless a tolerance is given."""
    torch.set_num_threads(1)  # forked
    expected = op(*args, **kwargs)
    actual = op(*map(on_npu, args), **{name: on_npu(value) for name, value in kwargs.items()})
    pairs = zip(actual, expected, strict=True) if isinstance(expected, tuple) else [(actual, expected)]
    for npu, cpu in pairs:
        if rtol:
            close(npu, cpu, rtol)
        else:
            assert_bit_equal(npu, cpu)


def bf16(*size: int) -> torch.Tensor:
    return torch.randn(*size).bfloat16()


def norm() -> None:
    compare(ops.add_rms_norm, bf16(37, 333), bf16(37, 333), bf16(333), 1e-6, rtol=2**-7)


def norm_full() -> None:
    compare(ops.rms_norm, bf16(300, 4096), bf16(4096), 1e-6, rtol=2**-7)


def silu() -> None:
    weights = torch.rand(301)
    compare(ops.silu_and_mul, 3 * bf16(301, 777), bf16(301, 777), row_weights=weights, limit=7.0, rtol=2**-7)


def quant() -> None:
    compare(ops.quantize_per_token_group, bf16(61, 300), 100, dtype=torch.int8, round_scale=True)


def quant_long() -> None:
    compare(ops.quantize_per_token, bf16(3, 50000), dtype=torch.int8)


def rope() -> None:
    q, k = torch.randn(3, 5, 12, 80).bfloat16(), torch.randn(3, 5, 2, 80).bfloat16()
    positions = torch.randint(50, (3, 5, 1))
    compare(ops.rotary_embedding, q, k, bf16(50, 32), bf16(50, 32), positions, "interleaved", rotary_dim=64)


def rope_floats() -> None:
    x = torch.randn(40, 200, 64)
    compare(ops.rotary_embedding, x, None, torch.randn(40, 1, 32), torch.randn(40, 1, 32))


def expert_ids() -> torch.Tensor:
    return torch.randint(-1, 40, (700, 3))


def expert_map() -> None:
    compare(ops.moe_expert_map, expert_ids(), 40, alignment=8, first_expert=3)


def expert_map_long() -> None:
    compare(ops.moe_expert_map, torch.randint(-1, 7, (3000, 4)).int(), 7)


def permute() -> None:
    rows_to_slots, *_ = ops.moe_expert_map(expert_ids(), 40, alignment=8)
    compare(ops.moe_permute, bf16(700, 100), rows_to_slots, 3)
    compare(ops.moe_permute, torch.randn(700, 20000)[:2], torch.tensor([0, 1, -1]).int(), 1)


def unpermute() -> None:
    _, slots_to_rows, *_ = ops.moe_expert_map(expert_ids(), 40, alignment=8)
    compare(ops.moe_unpermute, bf16(2500, 100), slots_to_rows, torch.rand(700, 3))
    compare(ops.moe_unpermute, torch.randn(5, 20000), torch.tensor([[0, 4], [3, -1]]).int())


def router() -> None:
    options = {"bias": torch.randn(256), "score": "sigmoid", "num_groups": 8, "topk_groups": 4, "renormalize": True}
    compare(ops.moe_router, torch.randn(300, 256), 8, **options, renorm_eps=1e-20, rtol=1e-5)


def router_tiles() -> None:
    compare(ops.moe_router, torch.randn(2000, 40), 3, rtol=1e-5)


def router_any_row() -> None:
    """Rows with NaN and infinities, groups that do not start at 32 bytes."""
    logits = bf16(40, 60)
    logits[3, 5], logits[7, 9], logits[8] = torch.nan, torch.inf, -torch.inf
    options = {"score": "sqrt_softplus", "num_groups": 10, "topk_groups": 3, "group_score": "max"}
    compare(ops.moe_router, logits, 6, **options, rtol=1e-5)
    compare(ops.moe_router, logits, 6, score_after_topk=True, ids_dtype=torch.int32, rtol=1e-5)


def gelu_long() -> None:
    compare(ops.gelu_and_mul, 3 * torch.randn(3, 30001), torch.randn(3, 30001), rtol=1e-5)


def norm_long() -> None:
    compare(ops.add_rms_norm, bf16(3, 40001), bf16(3, 40001), bf16(40001), 1e-6, rtol=2**-7)


def gemm() -> None:
    """Parts of the depth in every memory, tails in every direction."""
    for b in (bf16(1100, 300), bf16(300, 1100).t()):
        compare(ops.gemm, bf16(150, 1100), b / 32, rtol=2**-6)
    compare(ops.gemm, bf16(1100, 70).t(), bf16(1100, 90) / 32, rtol=2**-6)


def gemm_tiles() -> None:
    """More tiles than cores, of which L0C holds two."""
    compare(ops.gemm, bf16(64, 40), bf16(40, 1400) / 6, rtol=2**-6)


def gemm_row() -> None:
    compare(ops.gemm, bf16(1, 700), bf16(300, 700).t() / 26, rtol=2**-6)


def gemm_finish() -> None:
    c, bias = bf16(150, 300), bf16(300)
    compare(ops.gemm, bf16(150, 40), bf16(40, 300) / 6, bias=bias, c=c, scale=0.5, rtol=2**-6)
