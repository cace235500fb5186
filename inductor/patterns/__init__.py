"""All patterns in the order in which they are tried: one that covers more nodes comes before one that it contains."""

from torch_deepinfer.inductor.matcher import Pattern
from torch_deepinfer.inductor.patterns import activation, attention, gemm, moe, norm, qk_norm_rope, rope, sampling, topk

PATTERNS: list[Pattern] = [
    *gemm.PATTERNS,
    *moe.PATTERNS,
    *qk_norm_rope.PATTERNS,
    *norm.PATTERNS,
    *rope.PATTERNS,
    *activation.PATTERNS,
    *sampling.PATTERNS,
    *topk.PATTERNS,
    *attention.PATTERNS,
]
NAMES = tuple(pattern.name for pattern in PATTERNS)
FAMILIES = tuple(dict.fromkeys(pattern.family for pattern in PATTERNS))
