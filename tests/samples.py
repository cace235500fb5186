"""One small valid call of every op: (args, kwargs), for the tests that hold for all of them."""

from collections.abc import Callable
from typing import Any

import torch

Sample = tuple[tuple, dict[str, Any]]


def _norm(residual: bool) -> Sample:
    x = torch.randn(3, 5, 16).bfloat16()
    return (x, *([torch.randn_like(x)] if residual else []), torch.randn(16).bfloat16(), 1e-6), {}


def _rope() -> Sample:
    q, k = torch.randn(2, 5, 4, 16).transpose(1, 2), torch.randn(2, 5, 2, 16).transpose(1, 2)
    return (q, k, torch.rand(5, 8), torch.rand(5, 8)), {"style": "interleaved"}


def _qk_norm_rope() -> Sample:
    (q, k, *angles), kwargs = _rope()
    return (q, k, torch.rand(16), torch.rand(16), *angles, 1e-6), kwargs


def _rope_cache(norms: bool) -> Sample:
    q, k, v = (torch.randn(2, 3, heads, size) for heads, size in ((4, 16), (2, 16), (2, 12)))
    caches = torch.zeros(2, 2, 7, 16), torch.zeros(2, 2, 7, 12)
    weights = [torch.rand(16), torch.rand(16)] if norms else []
    position = torch.tensor([5, 0, 3])
    return (q, k, v, *weights, torch.rand(3, 1, 8), torch.rand(3, 1, 8), *caches, position, *[1e-6] * norms), {}


def _mla_qk_rope() -> Sample:
    kv, k_rope = torch.randn(5, 4, 20).bfloat16(), torch.randn(5, 1, 8).bfloat16()
    return (torch.randn(5, 4, 24).bfloat16(), kv[..., :16], k_rope, torch.rand(5, 1, 4), torch.rand(5, 1, 4)), {}


def _gated() -> Sample:
    return (torch.randn(6, 20).bfloat16(), torch.randn(6, 20).bfloat16()), {}


def _ids() -> torch.Tensor:
    return torch.tensor([[0, 3], [2, 1], [3, -1], [1, 0], [2, 3]])


def _gemm() -> Sample:
    return (torch.randn(7, 16), torch.randn(16, 9)), {"bias": torch.randn(9), "c": torch.randn(7, 9), "scale": 0.5}


def _gemm_inplace() -> Sample:
    operands = torch.randn(7, 16).bfloat16(), torch.randn(16, 9).bfloat16()
    return (torch.randn(7, 9), *operands), {"accumulate": True}


def _e4m3(*size: int) -> torch.Tensor:
    return torch.randn(*size).to(torch.float8_e4m3fn)


def _fp8_gemm() -> Sample:
    return (_e4m3(7, 160), _e4m3(9, 160).t(), torch.rand(7, 2), torch.rand(2, 1)), {}


def _fp8_grouped_mm() -> Sample:
    offsets = torch.tensor([2, 2, 5], dtype=torch.int32)
    return (_e4m3(7, 160), _e4m3(3, 160, 8), offsets, torch.rand(7, 2), torch.rand(3, 2, 1)), {}


def _fp8_masked_mm() -> Sample:
    counts = torch.tensor([2, 0], dtype=torch.int32)
    return (_e4m3(2, 3, 160), _e4m3(2, 160, 8), counts, torch.rand(2, 3, 2), torch.rand(2, 2, 8)), {}


def _bmm() -> Sample:
    return (torch.randn(3, 7, 16), torch.randn(3, 16, 9)), {"rows_first": True}


def _bmm_inplace() -> Sample:
    return (torch.randn(3, 7, 9), torch.randn(3, 7, 16).bfloat16(), torch.randn(3, 16, 9).bfloat16()), {}


def _grouped_outer() -> Sample:
    return (torch.randn(7, 16), torch.randn(7, 9), torch.tensor([2, 2, 5], dtype=torch.int32)), {}


def _attention() -> Sample:
    q, k, v = torch.randn(2, 5, 4, 16).transpose(1, 2), torch.randn(2, 2, 7, 16), torch.randn(2, 2, 7, 8)
    return (q, k, v, torch.rand(2, 1, 1, 7) < 0.7), {}


def _mqa_logits() -> Sample:
    begins, ends = torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([5, 4, 3], dtype=torch.int32)
    return (_e4m3(3, 4, 32), _e4m3(5, 32), torch.rand(5), torch.rand(3, 4), begins, ends), {}


def _paged_mqa_logits() -> Sample:
    cache = torch.zeros(3, 4 * (32 + 4), dtype=torch.uint8)
    cache[:, : 4 * 32] = _e4m3(3, 4 * 32).view(torch.uint8)
    cache[:, 4 * 32 :] = torch.rand(3, 4).view(torch.uint8)
    lengths, table = torch.tensor([[5, 6]], dtype=torch.int32), torch.tensor([[2, 0]], dtype=torch.int32)
    return (_e4m3(1, 2, 4, 32), cache.view(3, 4, 36), torch.rand(2, 4), lengths, table, 7), {}


def _masked_mm() -> Sample:
    return (torch.randn(4, 3, 16), torch.randn(4, 16, 8), torch.tensor([3, 0, 1, 2], dtype=torch.int32)), {}


def _grouped_mm() -> Sample:
    return (torch.randn(7, 16), torch.randn(4, 16, 8), torch.tensor([2, 2, 5, 7], dtype=torch.int32)), {}


def _fused_experts() -> Sample:
    weights = torch.randn(4, 24, 16).bfloat16(), torch.randn(4, 16, 12).bfloat16()
    return (torch.randn(5, 16).bfloat16(), *weights, _ids(), torch.rand(5, 2)), {}


def _permute() -> Sample:
    return (torch.randn(3, 8), torch.tensor([0, 3, -1, 5], dtype=torch.int32), 2), {}


def _unpermute() -> Sample:
    slots = torch.tensor([[0, 2], [-1, 1]], dtype=torch.int32)
    return (torch.randn(3, 8), slots, torch.rand(2, 2)), {}


def _permute_scaled() -> Sample:
    (x, *rest), _ = _permute()
    return (x.to(torch.float8_e4m3fn), torch.rand(3, 2), *rest), {"scale_layout": "column"}


def _unpermute_scaled() -> Sample:
    (y, *rest), _ = _unpermute()
    return (y.to(torch.float8_e4m3fn), torch.rand(3, 1), *rest), {}


def _with_scales() -> Sample:
    return (torch.randn(4, 64).bfloat16(), torch.rand(4, 2) + 0.5, [1, 32]), {"dtype": torch.int8}


def _dequantize() -> Sample:
    return (torch.randn(4, 64).to(torch.float8_e4m3fn), torch.rand(4, 2), [1, 32]), {}


def _topk() -> Sample:
    rows = torch.tensor([3, 0, 40, 17], dtype=torch.int32)
    return (torch.randn(4, 40).bfloat16(), 8, rows, rows), {"sorted": True, "index_dtype": torch.int64}


SAMPLES: dict[str, Callable[[], Sample]] = {
    "rms_norm": lambda: _norm(residual=False),
    "add_rms_norm": lambda: _norm(residual=True),
    "rms_norm_quant": lambda: (_norm(residual=False)[0], {"group_size": 8}),
    "add_rms_norm_quant": lambda: (_norm(residual=True)[0], {"group_size": 8}),
    "rotary_embedding": _rope,
    "rotary_embedding_": _rope,
    "qk_norm_rope": _qk_norm_rope,
    "rotary_embedding_cache_": lambda: _rope_cache(norms=False),
    "qk_norm_rope_cache_": lambda: _rope_cache(norms=True),
    "mla_qk_rope": _mla_qk_rope,
    "silu_and_mul": _gated,
    "silu_and_mul_quant": lambda: (_gated()[0], {"group_size": 8, "scale_dtype": torch.int32}),
    "gelu_and_mul": _gated,
    "moe_router": lambda: ((torch.randn(5, 8), 2), {"renormalize": True}),
    "moe_expert_map": lambda: ((_ids(), 4), {"alignment": 2}),
    "moe_permute": _permute,
    "moe_unpermute": _unpermute,
    "moe_permute_scaled": _permute_scaled,
    "moe_unpermute_scaled": _unpermute_scaled,
    "fp8_gemm": _fp8_gemm,
    "fp8_grouped_mm": _fp8_grouped_mm,
    "fp8_masked_mm": _fp8_masked_mm,
    "fp8_masked_mm_": lambda: ((torch.randn(2, 3, 8), *_fp8_masked_mm()[0]), {}),
    "gemm": _gemm,
    "gemm_": _gemm_inplace,
    "bmm": _bmm,
    "bmm_": _bmm_inplace,
    "grouped_mm": _grouped_mm,
    "grouped_outer": _grouped_outer,
    "grouped_outer_": lambda: ((torch.randn(3, 16, 9), *_grouped_outer()[0]), {"accumulate": True}),
    "attention": _attention,
    "mqa_logits": _mqa_logits,
    "paged_mqa_logits": _paged_mqa_logits,
    "masked_mm": _masked_mm,
    "masked_mm_": lambda: ((torch.randn(4, 3, 8), *_masked_mm()[0]), {}),
    "fused_experts": _fused_experts,
    "quantize_per_token_group": lambda: ((torch.randn(4, 64).bfloat16(), 32), {}),
    "quantize_per_block": lambda: ((torch.randn(8, 64).bfloat16(), [4, 32]), {}),
    "quantize_per_token": lambda: ((torch.randn(4, 64).bfloat16(),), {"dtype": torch.int8}),
    "quantize_per_channel": lambda: ((torch.randn(8, 64).bfloat16(), 4), {}),
    "quantization_scales": lambda: ((torch.randn(8, 64).bfloat16(), [4, 32]), {"scale_dtype": torch.int32}),
    "quantize_with_scales": _with_scales,
    "dequantize": _dequantize,
    "topk": _topk,
    "sample": lambda: ((torch.randn(4, 40).bfloat16(), torch.arange(4)), {"return_log_probs": True}),
    "draw": lambda: ((torch.randn(4, 40).bfloat16(),), {"temperature": 0.0, "top_k": 5, "keepdim": True}),
    "spec_verify": lambda: ((torch.randn(2, 4, 20), torch.randint(20, (2, 3)), None, torch.arange(2)), {}),
}

DIFFERENTIABLE = {"moe_permute", "moe_unpermute"}
