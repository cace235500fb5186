"""Experts: two matrix products for every token and each of its k experts, a gated activation between, a weighted sum.

The anchor is the sum over the k experts of a token, and everything is read backwards from there. Models spell it out
in three ways; each becomes one ``deepinfer.fused_experts``.
"""

from torch.fx import Node

from torch_deepinfer.inductor.matcher import Match, Miss, Pattern, aten
from torch_deepinfer.inductor.patterns.gemm_batched import match_batched
from torch_deepinfer.inductor.patterns.gemm_dense import match_dense
from torch_deepinfer.inductor.patterns.gemm_experts import swap
from torch_deepinfer.inductor.patterns.gemm_grouped import match_grouped


def match_experts(total: Node) -> Match | Miss | None:
    found = match_grouped(total) or match_batched(total) or match_dense(total)
    return found if found is None or isinstance(found, Miss) else swap(total, found)


PATTERNS = [Pattern("fused_experts", "gemm", (aten.sum.dim_IntList,), match_experts)]
