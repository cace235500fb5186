"""``torch.topk`` of long rows. Short ones, such as those of routers, are left to torch.

Which of several equal elements ``torch.topk`` takes is left open by torch; the op takes those of the lower index.
"""

import torch
from torch.fx import Node

from torch_deepinfer.inductor.matcher import (
    FLOATS,
    Match,
    Pattern,
    argument,
    aten,
    dtype_of,
    is_last_dim,
    item,
    shape_of,
)

LEAST_ROW = 8192


def match_topk(anchor: Node) -> Match | None:
    x, k = anchor.args[0], anchor.args[1]
    if not isinstance(x, Node) or not isinstance(k, int) or not shape_of(x):
        return None
    size = shape_of(x)[-1]
    if not isinstance(size, int) or size < LEAST_ROW or dtype_of(x) not in FLOATS:
        return None
    if not is_last_dim(x, argument(anchor, 2, "dim", -1)) or not argument(anchor, 3, "largest", True):
        return None
    values, indices = item(anchor, 0), item(anchor, 1)
    if values is None and indices is None:
        return None
    kwargs = {"sorted": True, "index_dtype": torch.int64}
    return Match(torch.ops.deepinfer.topk.default, (x, k), (values, indices), kwargs)


PATTERNS = [Pattern("topk", "topk", (aten.topk.default,), match_topk)]
