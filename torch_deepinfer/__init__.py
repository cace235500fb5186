"""Fused inference kernels as torch ops, and a torch.compile backend that swaps them into unchanged models.

Importing this package loads the native library and registers ``torch.ops.deepinfer.*``. It touches no device and
imports nothing beyond torch. ``torch.compile(model, backend="deepinfer")`` finds the backend through its entry point,
also in a process that never imported the package.
"""

from pathlib import Path

import torch

__version__ = "0.1.0"

_library = Path(__file__).with_name("libtorch_deepinfer.so")
if not _library.exists():
    raise ImportError(f"torch_deepinfer: {_library.name} is missing; build it with `pip install -e .`")
torch.ops.load_library(str(_library))

from torch_deepinfer import jit, ops  # noqa: E402

__all__ = ["__version__", "jit", "ops"]
