"""Run-time compilation as Python sees it: with which compiler, for which device, into which cache.

Kernels are compiled by the library itself when an op first needs them; nothing here has to be called for that. This
module is for the command line, for tests, and for compiling kernels on a machine that has no GPU.
"""

import os
import sys
from pathlib import Path
from typing import NamedTuple

import torch

_ops = torch.ops.deepinfer


class Kernel(NamedTuple):
    """A kernel to compile: the entry's name and a source of a few lines that includes the kernel's header."""

    name: str
    source: str


class Compiled(NamedTuple):
    """Where a kernel came from (``memory``, ``disk`` or ``compiled``), its cache folder or "", compiler warnings."""

    origin: str
    path: str
    log: str


class Compiler(NamedTuple):
    """Kind and version, and the file that was found."""

    identity: str
    path: str


def compile(kernel: Kernel, arch: str, flags: str = "") -> Compiled:
    """Compiles a kernel, or finds it in the cache. Needs no GPU.

    Args:
        kernel: one of :func:`samples`, or any other source.
        arch: ``"sm_90a"``, ``"sm_100a"``, ...; ``"dav-2201"`` (Ascend 910B) or ``"dav-3510"`` (950), with bisheng.
        flags: further compiler flags, separated by blanks. ``--ptxas-options=-v`` puts registers and spills in the log.

    Raises:
        RuntimeError: no compiler was found, it does not know the architecture, or it rejects the source; with the
            kernel's name, the compiler's message and the command.
        ValueError: ``arch`` or the kernel's name is malformed.
    """
    return Compiled(*_ops._jit_compile(kernel.name, kernel.source, arch, flags))


def samples() -> list[Kernel]:
    """Typical kernels of every family: what warm-up compiles, and what the tests compile for each architecture."""
    return [Kernel(*_ops._jit_sample(i)) for i in range(_ops._jit_sample_count())]


def ascend_samples() -> list[Kernel]:
    """The same of the families that have NPU kernels, in Ascend C."""
    return [Kernel(*_ops._jit_ascend_sample(i)) for i in range(_ops._jit_ascend_sample_count())]


def compiler() -> Compiler:
    """The compiler of this process. Raises RuntimeError, saying what was looked at and how to get one."""
    return Compiler(*_ops._jit_compiler())


def ascend_compiler() -> Compiler:
    """bisheng, if there is one. Raises RuntimeError, saying what was looked at and how to get it."""
    return Compiler(*_ops._jit_ascend_compiler())


def available() -> bool:
    """Whether CUDA kernels can be compiled and run here: a GPU of compute capability 8.0 or newer, and a compiler."""
    try:
        found = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
        return found and bool(compiler())
    except RuntimeError:
        return False


def device_arch(device: int = 0) -> str:
    """The architecture that kernels are compiled for on a CUDA device."""
    major, minor = torch.cuda.get_device_capability(device)
    return _ops._jit_arch(10 * major + minor)


def npu_arch(device: int = 0) -> str:
    """The same of an NPU. Raises RuntimeError: there is no CANN, or are no kernels for the chip."""
    return _ops._jit_npu_arch(device)


def cache_roots() -> list[Path]:
    """The cache folders, in the order in which they are searched; the first that can be written takes new kernels."""
    return [Path(root) for root in _ops._jit_cache_roots().splitlines()]


def cache_size_limit() -> int:
    """The size in bytes beyond which a cache folder gives up the kernels used least recently."""
    return _ops._jit_cache_size()


def source_root() -> Path:
    """The folder with the kernels' headers."""
    return Path(_ops._jit_source_root())


def cpu_isa() -> str:
    """The instruction set that the CPU kernels use: ``avx512``, ``avx2`` or ``generic``."""
    return _ops._cpu_isa()


# NVRTC comes in a Python package of its own, which need not be installed beside torch.
_ops._jit_add_package_folders("\n".join(path for path in sys.path if os.path.isabs(path)))
