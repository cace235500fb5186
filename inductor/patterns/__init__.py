"""All patterns in the order in which they are tried: one that covers more nodes comes before one that it contains."""

from torch_deepinfer.inductor.matcher import Pattern
from torch_deepinfer.inductor.patterns import (
    activation,
    attention_decode,
    attention_grouped,
    attention_latent,
    attention_packed,
    attention_prefill,
    attention_sinks,
    attention_span,
    gemm,
    gemm_shared,
    gemm_widened,
    mla_rope,
    moe,
    norm,
    qk_norm_rope,
    rope,
    rope_cache,
    sampling,
    topk,
)

PATTERNS: list[Pattern] = [
    *gemm.PATTERNS,
    *gemm_shared.PATTERNS,
    *gemm_widened.PATTERNS,
    *moe.PATTERNS,
    *mla_rope.PATTERNS,
    *rope_cache.PATTERNS,
    *qk_norm_rope.PATTERNS,
    *norm.PATTERNS,
    *rope.PATTERNS,
    *activation.PATTERNS,
    *sampling.PATTERNS,
    *topk.PATTERNS,
    *attention_sinks.PATTERNS,
    *attention_decode.PATTERNS,
    *attention_prefill.PATTERNS,
    *attention_latent.PATTERNS,
    *attention_span.PATTERNS,
    *attention_grouped.PATTERNS,
    *attention_packed.PATTERNS,
]
NAMES = tuple(pattern.name for pattern in PATTERNS)
FAMILIES = tuple(dict.fromkeys(pattern.family for pattern in PATTERNS))
