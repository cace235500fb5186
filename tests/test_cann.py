"""With CANN: its compiler takes every NPU kernel. Needs no NPU."""

import pytest
from chips import ascend_archs

from torch_deepinfer import jit


def _compiler() -> str:
    try:
        return jit.ascend_compiler().identity
    except RuntimeError:
        return ""


@pytest.mark.cann
@pytest.mark.skipif(not _compiler() or "host model" in _compiler(), reason="no bisheng of CANN here")
@pytest.mark.parametrize("arch", ["dav-2201", "dav-3510"])
def test_every_kernel_compiles(arch):
    for kernel in jit.ascend_samples():
        if arch in ascend_archs(kernel):
            jit.compile(kernel, arch)
