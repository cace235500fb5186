"""The operators, one module per family. Each is also callable as ``torch.ops.deepinfer.<name>``.

Autocast leaves them alone: they compute in the dtypes they are given. ``moe_permute`` and ``moe_unpermute`` have
gradients; the others are for inference and their outputs never require one.
"""

import torch

from torch_deepinfer.ops.activation import gelu_and_mul, silu_and_mul, silu_and_mul_quant
from torch_deepinfer.ops.attention import attention
from torch_deepinfer.ops.gemm import (
    bmm,
    bmm_,
    fused_experts,
    gemm,
    gemm_,
    grouped_mm,
    grouped_outer,
    grouped_outer_,
    masked_mm,
    masked_mm_,
)
from torch_deepinfer.ops.gemm_fp8 import fp8_fused_experts as fp8_fused_experts  # made of others
from torch_deepinfer.ops.gemm_fp8 import fp8_gemm, fp8_grouped_mm, fp8_masked_mm, fp8_masked_mm_
from torch_deepinfer.ops.moe import (
    moe_expert_map,
    moe_permute,
    moe_permute_scaled,
    moe_router,
    moe_unpermute,
    moe_unpermute_scaled,
)
from torch_deepinfer.ops.mqa_logits import mqa_logits, paged_mqa_logits
from torch_deepinfer.ops.norm import add_rms_norm, add_rms_norm_quant, rms_norm, rms_norm_quant
from torch_deepinfer.ops.quant import (
    dequantize,
    quantization_scales,
    quantize_per_block,
    quantize_per_channel,
    quantize_per_token,
    quantize_per_token_group,
    quantize_with_scales,
)
from torch_deepinfer.ops.rope import (
    mla_qk_rope,
    qk_norm_rope,
    qk_norm_rope_cache_,
    rotary_embedding,
    rotary_embedding_,
    rotary_embedding_cache_,
)
from torch_deepinfer.ops.sampling import draw, sample, spec_verify
from torch_deepinfer.ops.sampling import penalize_logits as penalize_logits  # made of others
from torch_deepinfer.ops.sampling import spec_budget_select as spec_budget_select  # made of others
from torch_deepinfer.ops.sampling import top_log_probs as top_log_probs  # made of others
from torch_deepinfer.ops.topk import topk

__all__ = [
    "add_rms_norm",
    "add_rms_norm_quant",
    "attention",
    "bmm",
    "bmm_",
    "dequantize",
    "draw",
    "fp8_gemm",
    "fp8_grouped_mm",
    "fp8_masked_mm",
    "fp8_masked_mm_",
    "fused_experts",
    "gelu_and_mul",
    "gemm",
    "gemm_",
    "grouped_mm",
    "grouped_outer",
    "grouped_outer_",
    "masked_mm",
    "masked_mm_",
    "mla_qk_rope",
    "moe_expert_map",
    "moe_permute",
    "moe_permute_scaled",
    "moe_router",
    "moe_unpermute",
    "moe_unpermute_scaled",
    "mqa_logits",
    "paged_mqa_logits",
    "qk_norm_rope",
    "qk_norm_rope_cache_",
    "quantization_scales",
    "quantize_per_block",
    "quantize_per_channel",
    "quantize_per_token",
    "quantize_per_token_group",
    "quantize_with_scales",
    "rms_norm",
    "rms_norm_quant",
    "rotary_embedding",
    "rotary_embedding_",
    "rotary_embedding_cache_",
    "sample",
    "silu_and_mul",
    "silu_and_mul_quant",
    "spec_verify",
    "topk",
]

# Without a rule of its own, an op's outputs would get torch's backward that warns and yields no gradient.
_library = torch.library.Library("deepinfer", "IMPL")
for _name in __all__:
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"deepinfer::{_name}", "Autograd"):
        _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")
