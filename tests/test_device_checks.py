"""Indices out of range on a GPU: poisoned by default (tested with each op), exceptions with DEEPINFER_CHECK=1."""

import os
import subprocess
import sys

import pytest
import torch

CHECKED = """
import pytest, torch
from torch_deepinfer import ops

def cuda(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device="cuda")

x = torch.randn(2, 8, device="cuda")
bad_calls = {
    r"moe_expert_map: topk_ids must lie in \\[-1, 4\\), got 4": lambda: ops.moe_expert_map(cuda([0, 4], [1, 2]), 4),
    r"moe_permute: rows_to_slots must lie in \\[-1, 4\\), got 7": lambda: ops.moe_permute(x, cuda(0, 7), 2),
    r"moe_unpermute: slots_to_rows must lie in \\[-1, 2\\), got -2": lambda: ops.moe_unpermute(x, cuda([0, -2])),
    r"rotary_embedding: positions must lie in \\[0, 5\\), got 5": lambda: ops.rotary_embedding(
        x, None, torch.rand(5, 8, device="cuda"), torch.rand(5, 8, device="cuda"), cuda(0, 5, dtype=torch.int64)
    ),
    r"rotary_embedding_cache_: cache_position must lie in \\[0, 5\\), got 5": lambda: ops.rotary_embedding_cache_(
        *[torch.rand(1, 1, 2, 8, device="cuda")] * 3, *[torch.rand(8, device="cuda")] * 2,
        *torch.rand(2, 1, 2, 5, 8, device="cuda"), cuda(5)
    ),
}
for message, call in bad_calls.items():
    with pytest.raises(ValueError, match=message):
        call()
ops.moe_expert_map(cuda([0, 3], [1, -1]), 4)
torch.cuda.synchronize()
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_exceptions_on_request():
    environment = os.environ | {"DEEPINFER_CHECK": "1"}
    subprocess.run([sys.executable, "-c", CHECKED], env=environment, check=True, timeout=300)
