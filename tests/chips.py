"""What tests have to know about Ascend chips."""

import re

from torch_deepinfer.jit import Kernel


def ascend_archs(kernel: Kernel) -> list[str]:
    """For which an Ascend C kernel is: the 950 alone has float8, and what goes with it."""
    new = re.search("Code::e4m3|Code::e2m1|ScaleType::e8m0|ScaleType::packed", kernel.source)
    return ["dav-3510"] if new else ["dav-2201", "dav-3510"]
