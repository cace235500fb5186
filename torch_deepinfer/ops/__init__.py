"""The operators, one module per family. Each is also callable as ``torch.ops.deepinfer.<name>``."""

from torch_deepinfer.ops.gemm import fused_experts, grouped_mm
from torch_deepinfer.ops.moe import moe_expert_map, moe_permute, moe_router, moe_unpermute
from torch_deepinfer.ops.norm import add_rms_norm, rms_norm
from torch_deepinfer.ops.rope import rotary_embedding, rotary_embedding_

__all__ = [
    "add_rms_norm",
    "fused_experts",
    "grouped_mm",
    "moe_expert_map",
    "moe_permute",
    "moe_router",
    "moe_unpermute",
    "rms_norm",
    "rotary_embedding",
    "rotary_embedding_",
]
