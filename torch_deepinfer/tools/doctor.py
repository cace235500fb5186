"""``deepinfer doctor``: what this machine has, and what the package makes of it."""

import os
import platform

import torch

import torch_deepinfer
from torch_deepinfer import jit
from torch_deepinfer.tools import ascend


def _gpus() -> list[str]:
    if torch.version.cuda is None:
        return ["none: this torch is built without CUDA"]
    if not torch.cuda.is_available():
        return ["none: torch sees no GPU"]
    lines = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        memory = device.total_memory / 2**30
        lines.append(f"{index}: {device.name}, {memory:.0f} GiB, kernels for {jit.device_arch(index)}")
    return lines


def _compiler() -> list[str]:
    try:
        found = jit.compiler()
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()
    return [f"{found.identity}, {found.path}"]


def _cache() -> list[str]:
    lines = []
    for root in jit.cache_roots():
        nearest = next(path for path in [root, *root.parents] if path.exists())
        writable = nearest.is_dir() and os.access(nearest, os.W_OK)
        count = len(list(root.glob("v1/entries/*/manifest.txt")))
        lines.append(f"{root}: {count} kernels{'' if writable else ', read-only'}")
    return lines


def _count(pattern: str) -> int:
    return len(list(jit.source_root().glob(pattern)))


def run() -> int:
    """Prints the report; returns 0."""
    sections = {
        "torch_deepinfer": [f"{torch_deepinfer.__version__}, {os.path.dirname(torch_deepinfer.__file__)}"],
        "torch": [f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, Python {platform.python_version()}"],
        "CPU": [f"{torch.get_num_threads()} threads, {jit.cpu_isa()} kernels"],
        "GPU": _gpus(),
        "CUDA compiler": _compiler(),
        **ascend.sections(),
        "kernel sources": [
            f"{jit.source_root()}: {_count('cuda/*.cuh')} CUDA headers, {_count('npu/*.h')} Ascend C headers"
        ],
        "kernel cache": [*_cache(), f"kept below {jit.cache_size_limit() / 2**20:.0f} MiB each"],
    }
    for title, lines in sections.items():
        for line in lines:
            print(f"{title:16} {line}")
            title = ""
    return 0
