"""The index logits of sparse attention against torch.compile of the plain code, in bfloat16."""

from functools import partial

import torch
from harness import Bench

from torch_deepinfer import ops


def plain_logits(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    logits = torch.einsum("sht,sh->st", torch.einsum("shd,td->sht", q, k).relu(), weights)
    token = torch.arange(k.shape[0], device=k.device)
    return torch.where(token < ends[:, None], logits, -torch.inf)


def bench_prefill(bench: Bench, queries: int, tokens: int, heads: int) -> None:
    """The last `queries` of `tokens`, each of which sees those before it."""
    case = {"op": "mqa_logits", "shape": f"{queries} queries, {tokens} tokens, {heads} heads"}
    if not bench.wanted(case):
        return
    device = bench.args.device
    q, k = torch.randn(queries, heads, 128, device=device), torch.randn(tokens, 128, device=device)
    weights, scale = torch.rand(queries, heads, device=device), torch.rand(tokens, device=device)
    ends = torch.arange(tokens - queries + 1, tokens + 1, device=device).int()
    codes = (t.to(torch.float8_e4m3fn) for t in (q, k))
    stock = partial(torch.compile(plain_logits, dynamic=False), q.bfloat16(), k.bfloat16(), weights.bfloat16(), ends)
    bench.row(
        case,
        {"ours": partial(ops.mqa_logits, *codes, scale, weights, torch.zeros_like(ends), ends), "stock": stock},
        q.numel() + k.numel() + 4 * queries * tokens,
    )


def main() -> None:
    bench = Bench("mqa_logits", __doc__)
    shapes = [(2048, 8192, 64), (2048, 8192, 32)] if bench.args.device == "cuda" else [(16, 2048, 64), (64, 1024, 32)]
    for shape in shapes:
        bench_prefill(bench, *shape)
    bench.finish()


if __name__ == "__main__":
    main()
