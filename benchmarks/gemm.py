"""Matrix products against torch's own: grouped_mm and fused_experts; on a GPU also the dense, batched and float8 ones.

The stock column of fused_experts is the expert layer as transformers writes it for its grouped_mm implementation: sort
the ids, gather the tokens, two grouped products around the activation, weights, inverse order, sum.
"""

from collections.abc import Callable
from functools import partial
from itertools import cycle

import torch
import torch.nn.functional as F
from harness import Bench

from torch_deepinfer import ops


def stock_experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    tokens, topk = topk_ids.shape
    experts = gate_up.shape[0]
    ids, order = torch.sort(topk_ids.reshape(-1))
    counts = torch.histc(ids.float() if x.device.type == "cpu" else ids.int(), bins=experts, min=0, max=experts - 1)
    offsets = torch.cumsum(counts, 0, dtype=torch.int32)
    hidden = torch._grouped_mm(x[order // topk], gate_up.transpose(-2, -1), offs=offsets)
    gate, up = hidden.chunk(2, dim=-1)
    y = torch._grouped_mm(F.silu(gate) * up, down.transpose(-2, -1), offs=offsets)
    weighted = y * topk_weights.reshape(-1)[order].unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=x.device)
    return weighted[inverse].view(tokens, topk, -1).sum(dim=1).to(x.dtype)


def rotating(function: Callable[..., torch.Tensor], inputs: list[tuple]) -> Callable[[], torch.Tensor]:
    """Calls with one input after the other, so that experts come out of memory as between the layers of a model."""
    turn = cycle(inputs)
    return lambda: function(*next(turn))


def bench_experts(
    bench: Bench, experts: int, hidden: int, intermediate: int, topk: int, dense_columns: bool = False
) -> None:
    """One expert layer. ``dense_columns``: weights stored as [E, K, N], as GPT-OSS does."""
    device = bench.args.device
    name = f"{experts} x {hidden}x{intermediate} k {topk}" + (" [E, K, N]" if dense_columns else "")
    cases = [(tokens, {"op": "fused_experts", "shape": f"{name}, T {tokens}"}) for tokens in bench.args.tokens]
    cases = [case for case in cases if bench.wanted(case[1])]
    if not cases:
        return
    make = partial(torch.empty, dtype=torch.bfloat16, device=device)
    gate_up = make(experts, 2 * intermediate, hidden).normal_(std=hidden**-0.5)
    down = make(experts, hidden, intermediate).normal_(std=intermediate**-0.5)
    if dense_columns:
        gate_up, down = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (gate_up, down))
    for tokens, case in cases:
        x = make(tokens, hidden).normal_()
        routings = [torch.rand(tokens, experts, device=device).softmax(-1).topk(topk) for _ in range(8)]
        inputs = [(x, gate_up, down, routing.indices, routing.values) for routing in routings]
        hit = sum(routing.indices.unique().numel() for routing in routings) // len(routings)
        bench.row(
            case,
            {
                "ours": rotating(ops.fused_experts, inputs),
                "eager": rotating(stock_experts, inputs),
                "stock": rotating(torch.compile(stock_experts, dynamic=False), inputs),
            },
            hit * (gate_up[0].nbytes + down[0].nbytes) + 2 * x.nbytes,
        )


def bench_grouped_mm(bench: Bench, experts: int, rows: int, k: int, n: int) -> None:
    case = {"op": "grouped_mm", "shape": f"{experts} x [{rows}, {k}] x [{k}, {n}]"}
    if not bench.wanted(case):
        return
    make = partial(torch.empty, dtype=torch.bfloat16, device=bench.args.device)
    x, weight = make(experts * rows, k).normal_(), make(experts, n, k).normal_().transpose(1, 2)
    offsets = torch.arange(rows, (experts + 1) * rows, rows, dtype=torch.int32, device=x.device)
    bench.row(
        case,
        {
            "ours": partial(ops.grouped_mm, x, weight, offsets),
            "stock": partial(torch.compile(torch._grouped_mm, dynamic=False), x, weight, offs=offsets),
        },
        x.nbytes + weight.nbytes + experts * rows * n * 2,
    )


# Columns and depths of DeepSeek-V3's projections.
WEIGHTS = [(2112, 7168), (576, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048)]
MORE_WEIGHTS = [(256, 7168), (129280, 7168)]  # its router and its vocabulary


def bench_gemm(bench: Bench, m: int, n: int, k: int) -> None:
    case = {"op": "gemm", "shape": f"[{m}, {k}] x [{k}, {n}]"}
    if not bench.wanted(case):
        return
    make = partial(torch.empty, dtype=torch.bfloat16, device=bench.args.device)
    a, b = make(m, k).normal_(), make(n, k).normal_().t()
    functions = {"ours": partial(ops.gemm, a, b), "stock": partial(torch.matmul, a, b)}
    bench.row(case, functions, a.nbytes + b.nbytes + 2 * m * n)


def float8(*size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_().to(torch.float8_e4m3fn)


def bench_fp8_gemm(bench: Bench, m: int, n: int, k: int) -> None:
    """Scales of 1 x 128 and 128 x 128, against one scale for each tensor and for each row and column."""
    case = {"op": "fp8_gemm", "shape": f"[{m}, {k}] x [{k}, {n}]"}
    if not bench.wanted(case):
        return
    make = partial(torch.rand, device="cuda")
    a, b = float8(m, k), float8(n, k).t()
    a_scale, b_scale = make(k // 128, (m + 3) // 4 * 4).t()[:m], make((n + 127) // 128, k // 128).t()
    functions = {
        "ours": partial(ops.fp8_gemm, a, b, a_scale, b_scale),
        "stock": partial(torch._scaled_mm, a, b, make(()), make(()), out_dtype=torch.bfloat16),
        "rows": partial(torch._scaled_mm, a, b, make(m, 1), make(1, n), out_dtype=torch.bfloat16),
    }
    bench.row(case, functions, a.nbytes + b.nbytes + 2 * m * n)


def bench_large_groups(bench: Bench, experts: int, rows: int, n: int, k: int) -> None:
    """Experts with 0.7 to 1.3 times `rows` rows each."""
    case = {"op": "grouped_mm", "shape": f"{experts} x about {rows} rows, [{k}, {n}]"}
    if not bench.wanted(case):
        return
    make = partial(torch.empty, dtype=torch.bfloat16, device="cuda")
    offsets = ((0.7 + 0.6 * torch.rand(experts, device="cuda")) * rows).int().cumsum(0).int()
    x, weight = make(int(offsets[-1]), k).normal_(), make(experts, n, k).normal_().transpose(1, 2)
    functions = {
        "ours": partial(ops.grouped_mm, x, weight, offsets),
        "stock": partial(torch._grouped_mm, x, weight, offs=offsets),
    }
    bench.row(case, functions, x.nbytes + weight.nbytes + 2 * x.shape[0] * n)


def bench_fp8_groups(bench: Bench, experts: int, rows: int, n: int, k: int) -> None:
    """The same for float8 with scales of 1 x 128 and 128 x 128, against one scale for each row and column."""
    case = {"op": "fp8_grouped_mm", "shape": f"{experts} x about {rows} rows, [{k}, {n}]"}
    if not bench.wanted(case):
        return
    make = partial(torch.rand, device="cuda")
    counts = ((0.7 + 0.6 * make(experts)) * rows / 16).int() * 16  # torch wants multiples of 16
    offsets, total = counts.cumsum(0).int(), int(counts.sum())
    x, weight = float8(total, k), float8(experts, n, k).transpose(1, 2)
    x_scale, weight_scale = make(k // 128, total).t(), make(experts, n // 128, k // 128).transpose(1, 2)
    functions = {
        "ours": partial(ops.fp8_grouped_mm, x, weight, offsets, x_scale, weight_scale),
        "stock": partial(torch._scaled_grouped_mm, x, weight, make(total), make(experts, n), offs=offsets),
    }
    bench.row(
        case,
        {name: partial(function, out_dtype=torch.bfloat16) for name, function in functions.items()},
        x.nbytes + weight.nbytes + 2 * total * n,
    )


def bench_outer(bench: Bench, experts: int, rows: int, m: int, n: int) -> None:
    case = {"op": "grouped_outer", "shape": f"{experts} x about {rows} rows, [{m}, {n}]"}
    if not bench.wanted(case):
        return
    make = partial(torch.empty, dtype=torch.bfloat16, device="cuda")
    offsets = ((0.7 + 0.6 * torch.rand(experts, device="cuda")) * rows).int().cumsum(0).int()
    x, y = make(int(offsets[-1]), m).normal_(), make(int(offsets[-1]), n).normal_()
    functions = {
        "ours": partial(ops.grouped_outer, x, y, offsets),
        "stock": partial(torch._grouped_mm, x.t(), y, offs=offsets),
    }
    bench.row(case, functions, x.nbytes + y.nbytes + 2 * experts * m * n)


def bench_bmm(bench: Bench, tokens: int, heads: int, rank: int, width: int) -> None:
    """bhr,hdr->bhd, as absorbed MLA needs it."""
    case = {"op": "bmm", "shape": f"{tokens} tokens, {heads} heads, {rank} to {width}"}
    if not bench.wanted(case):
        return
    make = partial(torch.empty, dtype=torch.bfloat16, device="cuda")
    x, weight = make(tokens, heads, rank).normal_(), make(heads, width, rank).normal_()
    operands = x.transpose(0, 1), weight.transpose(1, 2)
    functions = {"ours": partial(ops.bmm, *operands, rows_first=True), "stock": partial(torch.bmm, *operands)}
    bench.row(case, functions, x.nbytes + weight.nbytes + 2 * tokens * heads * width)


def bench_products(bench: Bench) -> None:
    for m in (1, 16, 64, 128, 512, 4096):
        for n, k in WEIGHTS + MORE_WEIGHTS:
            bench_gemm(bench, m, n, k)
    bench_gemm(bench, 8192, 8192, 8192)
    for m in (64, 128, 4096):
        for n, k in WEIGHTS:
            bench_fp8_gemm(bench, m, n, k)
    for experts, rows in ((4, 8192), (8, 4096)):
        for n, k in ((6144, 7168), (7168, 3072), (4096, 4096), (4096, 2048)):
            bench_large_groups(bench, experts, rows, n, k)
            bench_fp8_groups(bench, experts, rows, n, k)
    for m, n in ((4096, 7168), (7168, 2048)):
        bench_outer(bench, 8, 4096, m, n)
    for tokens in (4, 128, 4096):
        bench_bmm(bench, tokens, 128, 512, 128)


def main() -> None:
    bench = Bench("gemm", __doc__)
    bench.parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16, 64, 512])
    bench_experts(bench, experts=128, hidden=2048, intermediate=768, topk=8)
    bench_experts(bench, experts=16, hidden=576, intermediate=1536, topk=4)
    bench_experts(bench, experts=8, hidden=2880, intermediate=2880, topk=4, dense_columns=True)
    for rows in (1, 4, 32):
        bench_grouped_mm(bench, 32, rows, 2048, 1536)
    if bench.args.device == "cuda":
        bench_products(bench)
    bench.finish()


if __name__ == "__main__":
    main()
