"""The operators, one module per family. Each is also callable as ``torch.ops.deepinfer.<name>``."""

from torch_deepinfer.ops.norm import add_rms_norm, rms_norm

__all__ = [
    "add_rms_norm",
    "rms_norm",
]
