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


OLD = os.environ.get("DEEPINFER_STANDIN_SOC", "").startswith("Ascend910")  # without float8


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


def quant_uneven() -> None:
    compare(ops.quantize_per_token_group, bf16(5, 300), 100, dtype=torch.int8)


def quant_groups() -> None:
    compare(ops.quantize_per_token_group, bf16(61, 1024), 128, dtype=torch.int8, round_scale=True)


def quant_groups_many() -> None:
    compare(ops.quantize_per_token_group, bf16(600, 256), 32, dtype=torch.int8)


def quant_groups_bad() -> None:
    x = bf16(40, 1024)
    x[3, 200], x[17, 3] = torch.nan, -torch.inf
    codes(lambda x: ops.quantize_per_token_group(x, 32, dtype=E4M3)[0], x)


def quant_long() -> None:
    compare(ops.quantize_per_token, bf16(3, 50000), dtype=torch.int8)


E4M3, E2M1 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2


def quant_e4m3() -> None:
    codes(ops.quantize_per_block, bf16(2, 70, 260), [16, 60], dtype=E4M3, scale_dtype=torch.int32)


def quant_given() -> None:
    x = torch.randn(30, 96) * 100
    x[3, 40], x[4, 50] = torch.nan, torch.inf
    codes(ops.quantize_with_scales, x, torch.rand(2, 3), [16, 32], dtype=E4M3)


def quant_columns() -> None:
    codes(ops.quantize_per_channel, bf16(300, 200), 100, dtype=E2M1, scale_layout="column")


def quant_columns_int8() -> None:
    compare(ops.quantize_per_channel, bf16(300, 200), 100, dtype=torch.int8)


def norm_quant() -> None:
    compare(ops.rms_norm_quant, bf16(300, 256), bf16(256), 1e-6, group_size=32, dtype=torch.int8, rtol=2)


def silu_quant() -> None:
    slots = torch.randperm(300).int()
    slots[::7] = -1
    compare(ops.silu_and_mul_quant, bf16(300, 512), row_weights=torch.rand(300), rows_to_slots=slots,
            dtype=torch.int8, rtol=2)  # fmt: skip


def dequant() -> None:
    pair = ops.quantize_per_token_group(torch.randn(40, 200), 40, dtype=E2M1, scale_dtype=torch.float8_e8m0fnu)
    compare(ops.dequantize, *pair, [1, 40])


def dequant_int8() -> None:
    compare(ops.dequantize, *ops.quantize_per_token_group(torch.randn(1200, 300), 30, dtype=torch.int8), [1, 30])


def codes(op, *args, **kwargs) -> None:
    """As :func:`compare`, of bytes."""

    def plain(result):
        results = result if isinstance(result, tuple) else (result,)
        return tuple(t.contiguous().view(torch.uint8) for t in results)

    compare(lambda *a, **k: plain(op(*a, **k)), *args, **kwargs)


def rope() -> None:
    q, k = torch.randn(3, 5, 12, 80).bfloat16(), torch.randn(3, 5, 2, 80).bfloat16()
    positions = torch.randint(50, (3, 5, 1))
    compare(ops.rotary_embedding, q, k, bf16(50, 32), bf16(50, 32), positions, "interleaved", rotary_dim=64)


def rope_floats() -> None:
    x = torch.randn(40, 200, 64)
    compare(ops.rotary_embedding, x, None, torch.randn(40, 1, 32), torch.randn(40, 1, 32))


def rope_halves() -> None:
    q, k = bf16(3, 5, 12, 80), bf16(3, 5, 2, 80)
    positions = torch.randint(50, (3, 5, 1))
    compare(ops.rotary_embedding, q, k, bf16(50, 32), bf16(50, 32), positions, rotary_dim=64)


def qk_norm() -> None:
    """Against the two ops one after the other, on the NPU: roots may differ from those of a CPU."""
    q, weight, cos, sin = (x.npu() for x in (bf16(30, 12, 80), bf16(80), bf16(30, 1, 40), bf16(30, 1, 40)))
    fused = ops.qk_norm_rope(q, None, weight, None, cos, sin, 1e-6)[0]
    apart = ops.rotary_embedding(ops.rms_norm(q, weight, 1e-6), None, cos, sin)[0]
    close(fused, apart.cpu(), 0.0)


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


def permute_scales() -> None:
    rows_to_slots, *_ = ops.moe_expert_map(expert_ids(), 40, alignment=8)
    compare(ops.moe_permute_scaled, bf16(700, 64), torch.rand(700, 3), rows_to_slots, 3, scale_layout="column")


def unpermute_scales() -> None:
    _, slots_to_rows, *_ = ops.moe_expert_map(expert_ids(), 40, alignment=8)
    rows = torch.randn(2500, 100).to(E4M3)
    compare(ops.moe_unpermute_scaled, rows, torch.rand(2500), slots_to_rows, torch.rand(700, 3))


def gelu_long() -> None:
    compare(ops.gelu_and_mul, 3 * torch.randn(3, 30001), torch.randn(3, 30001), rtol=1e-5)


def norm_long() -> None:
    """Five chunks a row: in more of them, the first ones would be written long before they are read again."""
    size = 25001 if OLD else 40001
    compare(ops.add_rms_norm, bf16(3, size), bf16(3, size), bf16(size), 1e-6, rtol=2**-7)


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


def topk() -> None:
    """Rows of several chunks, without ties and with them."""
    compare(ops.topk, torch.randn(2, 9000), 300)
    x = torch.randint(0, 40, (9, 30000)).bfloat16() + torch.arange(30000).bfloat16() / 4096
    compare(ops.topk, x, 700)


def topk_sorted() -> None:
    x = torch.randn(5, 9000)
    x[:, ::3], x[:2, 5::17], x[2:, 7:1500:31] = -0.0, -torch.nan, torch.nan
    x[:, 1::3].clamp_(max=0)
    compare(ops.topk, x, 3100, sorted=True)


def topk_windows() -> None:
    """More than a core holds."""
    x = torch.randint(0, 9, (2, 20001)).half()
    compare(ops.topk, x, 9000, sorted=True, index_dtype=torch.int64)
    compare(ops.topk, x, 9000)
