"""moe ops against stock torch.compile of the plain code that models carry."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness import Bench

from torch_deepinfer import ops

TOKENS = {"cpu": (1, 64, 512, 4096), "cuda": (1, 64, 4096, 16384, 65536)}
# Experts, choices of a token and hidden size of the dispatch: Qwen3-MoE on a CPU, DeepSeek-V3 on a GPU.
DISPATCH = {"cpu": (128, 8, 2048), "cuda": (256, 8, 7168)}


def deepseek_v3_router(logits: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """256 experts in 8 groups, 4 groups kept, top 8, renormalised and scaled."""
    scores = logits.float().sigmoid()
    keys = scores + bias
    groups = keys.unflatten(-1, (8, -1))
    group_scores = groups.topk(2, dim=-1).values.sum(-1)
    kept = group_scores.topk(4, dim=-1, sorted=False).indices
    mask = torch.zeros_like(group_scores).scatter_(1, kept, 1)
    mask = mask.unsqueeze(-1).expand_as(groups).reshape(keys.shape)
    ids = keys.masked_fill(~mask.bool(), -torch.inf).topk(8, dim=-1, sorted=False).indices
    weights = scores.gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, ids


def softmax_router(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, ids = logits.softmax(dim=-1, dtype=torch.float).topk(8, dim=-1)
    return (values / values.sum(-1, keepdim=True)).to(logits.dtype), ids


def topk_softmax_router(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, ids = logits.topk(4, dim=-1)
    return values.softmax(dim=-1, dtype=values.dtype), ids


def sort_by_expert(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sorted_ids, order = torch.sort(ids.reshape(-1))
    counts = torch.histc(sorted_ids.float(), bins=experts, min=0, max=experts - 1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return order, inverse, counts.cumsum(0, dtype=torch.int32)


def gather_rows(x: torch.Tensor, order: torch.Tensor, topk: int) -> torch.Tensor:
    return x[order // topk]


def weighted_sum(y: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    weighted = y * weights.reshape(-1)[order].unsqueeze(-1)
    return weighted[inverse].unflatten(0, weights.shape).sum(dim=1).to(y.dtype)


def compiled(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    return partial(torch.compile(function, dynamic=False), *arguments)


def routers(bench: Bench) -> None:
    device = bench.args.device
    bias = 0.1 * torch.randn(256, device=device)
    grouped = {"bias": bias, "score": "sigmoid", "num_groups": 8, "topk_groups": 4}
    grouped |= {"renormalize": True, "renorm_eps": 1e-20, "scale": 2.5}
    after = {"score_after_topk": True, "weights_dtype": torch.bfloat16}
    for tokens in TOKENS[device]:
        logits = torch.randn(tokens, 256, device=device)
        bench.row(
            {"op": "moe_router grouped", "shape": f"{tokens}x256 top 8, fp32"},
            {
                "ours": partial(ops.moe_router, logits, 8, **grouped),
                "stock": compiled(deepseek_v3_router, logits, bias),
            },
            logits.nbytes + tokens * 8 * 12,
        )
        logits = torch.randn(tokens, 128, device=device).bfloat16()
        bench.row(
            {"op": "moe_router softmax", "shape": f"{tokens}x128 top 8, bf16"},
            {
                "ours": partial(ops.moe_router, logits, 8, renormalize=True, weights_dtype=torch.bfloat16),
                "stock": compiled(softmax_router, logits),
            },
            logits.nbytes + tokens * 8 * 10,
        )
        logits = torch.randn(tokens, 32, device=device).bfloat16()
        bench.row(
            {"op": "moe_router after top-k", "shape": f"{tokens}x32 top 4, bf16"},
            {"ours": partial(ops.moe_router, logits, 4, **after), "stock": compiled(topk_softmax_router, logits)},
            logits.nbytes + tokens * 4 * 10,
        )


def dispatch(bench: Bench) -> None:
    device = bench.args.device
    experts, topk, hidden_size = DISPATCH[device]
    for tokens in TOKENS[device]:
        shape = {"shape": f"{tokens}x{topk} of {experts}"}
        rows = {"shape": f"{tokens}x{topk} rows of {hidden_size}"}
        ids = torch.rand(tokens, experts, device=device).argsort(-1)[:, :topk].contiguous()
        weights = torch.rand(tokens, topk, device=device)
        x = torch.randn(tokens, hidden_size, device=device).bfloat16()
        order, inverse, _ = sort_by_expert(ids, experts)
        rows_to_slots, slots_to_rows, *_ = ops.moe_expert_map(ids, experts)
        y = ops.moe_permute(x, rows_to_slots, topk)
        bench.row(
            {"op": "moe_expert_map", **shape},
            {"ours": partial(ops.moe_expert_map, ids, experts), "stock": compiled(sort_by_expert, ids, experts)},
            ids.nbytes + 2 * rows_to_slots.nbytes,
        )
        bench.row(
            {"op": "moe_permute", **rows},
            {
                "ours": partial(ops.moe_permute, x, rows_to_slots, topk, slots_to_rows),
                "stock": compiled(gather_rows, x, order, topk),
            },
            x.nbytes + y.nbytes,
        )
        bench.row(
            {"op": "moe_unpermute", **rows},
            {
                "ours": partial(ops.moe_unpermute, y, slots_to_rows, weights),
                "stock": compiled(weighted_sum, y, order, inverse, weights),
            },
            x.nbytes + y.nbytes,
        )


def main() -> None:
    bench = Bench("moe", __doc__)
    routers(bench)
    dispatch(bench)
    bench.finish()


if __name__ == "__main__":
    main()
