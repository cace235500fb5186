"""Estimates of the NPU kernels from what they do on the model of a core. No measurements: no Ascend chip was at hand.

    python tests/npu/standin.py tests/npu/estimates.py [the beginnings of names]

The model counts, on the busiest core, vector instructions, the units of 256 bytes that they process, copies,
accesses of the scalar unit, and the fractals that the matrix unit loads and multiplies. Public figures of the chips and
guesses for what is not public make times of them.
"""

import os
import subprocess
import sys
from collections import Counter
from typing import NamedTuple

CORES_OF_THE_STANDIN = 8  # and half as many cube cores, as on the chips


class Chip(NamedTuple):
    """Public figures: vector cores, GHz, GB/s of memory."""

    soc: str
    cores: int
    clock: float
    bandwidth: float


CHIPS = {"910B": Chip("Ascend910B1", 40, 1.8, 1600), "950": Chip("Ascend950PR_9599", 64, 1.65, 3500)}

# Guesses, in cycles: to start a vector instruction, to issue a copy, for an access of the scalar unit.
VECTOR_START, COPY_ISSUE, SCALAR = 12, 60, 8
# A product of fractals takes a cycle, its instruction eight to start (both public). Guesses: bytes a cycle that a core
# reads out of the L2 cache (products of 128 x 256 tiles, which take 96, are published near the peak), and out of L1.
PRODUCT_START, FROM_L2, FROM_L1 = 8, 128, 256

# name: (tokens, bytes of a token that must move, the call for so many tokens)
CALLS = {
    "rms_norm, 7168": (4096, 4 * 7168, "ops.rms_norm(bf16(n, 7168), bf16(7168), 1e-6)"),
    "add_rms_norm, 7168": (4096, 8 * 7168, "ops.add_rms_norm(bf16(n, 7168), bf16(n, 7168), bf16(7168), 1e-6)"),
    "rms_norm, 128 heads of 128": (
        4096,
        4 * 128 * 128,
        "ops.rms_norm(bf16(n, 128, 128), bf16(128), 1e-6)",
    ),
    "silu_and_mul, 2048": (4096, 6 * 2048, "ops.silu_and_mul(bf16(n, 4096))"),
    "rms_norm_quant, int8, whole rows of 7168": (
        4096,
        3 * 7168,
        "ops.rms_norm_quant(bf16(n, 7168), bf16(7168), 1e-6, group_size=-1, dtype=torch.int8)",
    ),
    "silu_and_mul_quant, e4m3, whole rows of 2048": (
        4096,
        5 * 2048,
        "ops.silu_and_mul_quant(bf16(n, 4096), group_size=-1)",
    ),
    "quantize_per_token, 7168": (4096, 3 * 7168, "ops.quantize_per_token(bf16(n, 7168), dtype=torch.int8)"),
    "quantize_per_token_group, 7168": (
        4096,
        3 * 7168,
        "ops.quantize_per_token_group(bf16(n, 7168), dtype=torch.int8)",
    ),
    "quantize_per_token_group, e4m3, 7168": (4096, 3 * 7168, "ops.quantize_per_token_group(bf16(n, 7168))"),
    "quantize_per_token_group, e2m1 of 32, 7168": (
        4096,
        7168 * 2.5,
        "ops.quantize_per_token_group(bf16(n, 7168), 32, dtype=torch.float4_e2m1fn_x2, scale_dtype=torch.int32)",
    ),
    "quantize_per_block, e4m3, 7168": (4096, 3 * 7168, "ops.quantize_per_block(bf16(128 * max(1, n // 128), 7168))"),
    "dequantize, e4m3 of 128, 7168": (
        4096,
        3 * 7168,
        "ops.dequantize(torch.zeros(n, 7168, dtype=torch.float8_e4m3fn).npu(), torch.ones(n, 56).npu(), [1, 128])",
    ),
    "rotary_embedding, 32 heads of 128": (
        4096,
        4 * 32 * 128,
        "ops.rotary_embedding(bf16(n, 32, 128), None, bf16(n, 1, 64), bf16(n, 1, 64))",
    ),
    "qk_norm_rope, 32 heads of 128": (
        4096,
        4 * 32 * 128,
        "ops.qk_norm_rope(bf16(n, 32, 128), None, bf16(128), None, bf16(n, 1, 64), bf16(n, 1, 64), 1e-6)",
    ),
    "moe_router, softmax, top 8 of 128": (4096, 2 * 128 + 96, "ops.moe_router(bf16(n, 128), 8)"),
    "moe_router, DeepSeek-V3": (
        4096,
        4 * 256 + 96,
        "ops.moe_router(torch.randn(n, 256).npu(), 8, bias=torch.randn(256).npu(), score='sigmoid', num_groups=8,"
        " topk_groups=4, renormalize=True)",
    ),
    "moe_expert_map, top 8 of 256": (4096, 96, "ops.moe_expert_map(ids(n), 256)"),
    "moe_permute, top 8, 7168": (4096, 4 * 8 * 7168, "ops.moe_permute(bf16(n, 7168), arange(8 * n), 8)"),
    "topk, 2048 of 32768": (4096, 2 * 32768, "ops.topk(bf16(n, 32768), 2048, return_values=False)"),
    "topk, 8 of 256, sorted": (4096, 2 * 256, "ops.topk(bf16(n, 256), 8, sorted=True)"),
    "moe_unpermute_scaled, e4m3, top 8, 7168": (
        4096,
        10 * 7168,
        "ops.moe_unpermute_scaled(torch.zeros(8 * n, 7168, dtype=torch.float8_e4m3fn).npu(), torch.ones(8 * n).npu(),"
        " arange(8 * n).view(n, 8), torch.rand(n, 8).npu())",
    ),
    "moe_unpermute, top 8, 7168": (
        4096,
        2 * 9 * 7168,
        "ops.moe_unpermute(bf16(8 * n, 7168), arange(8 * n).view(n, 8), torch.rand(n, 8).npu())",
    ),
}

# Rows, columns and depth of products in bfloat16. Their depth is counted in part, the rest follows.
PRODUCTS = [(16, 7168, 2048), (4096, 2048, 7168), (4096, 7168, 2048)]
COUNTED_DEPTH = 256


def _run(call: str, tokens: int, chip: Chip, cores: int = CORES_OF_THE_STANDIN) -> Counter[str]:
    """What the busiest core does in one call, on a chip of so many vector cores."""
    code = (
        "import torch, torch_npu, torch_deepinfer\n"
        "from torch_deepinfer import ops\n"
        f"n = {tokens}\n"
        "bf16 = lambda *size: torch.randn(*size).bfloat16().npu()\n"
        "arange = lambda size: torch.arange(size, dtype=torch.int32).npu()\n"
        "ids = lambda n: torch.rand(n, 256).argsort(-1)[:, :8].npu()\n"
        f"{call}\n"
    )
    environment = {**os.environ, "DEEPINFER_STANDIN_SOC": chip.soc, "DEEPINFER_STANDIN_COUNT": "1"}
    environment["DEEPINFER_STANDIN_CORES"] = str(cores)
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    work: Counter[str] = Counter()
    for line in done.stderr.splitlines():
        if line.startswith("[work]"):
            numbers = line.split()[3:]
            kinds = "vectors", "repeats", "copies", "bytes", "scalars", "products", "fractals", "loads", "loaded"
            for name, number in zip(kinds, numbers, strict=True):
                work[name] += int(number)
    return work


def main() -> None:
    print("| call, 4096 tokens | chip | memory | vector | copies | scalar | bound |")
    print("|---|---|---|---|---|---|---|")
    for name, (tokens, token_bytes, call) in CALLS.items():
        if not name.startswith(tuple(sys.argv[1:] or [""])):
            continue
        for label, chip in CHIPS.items():
            if label == "910B" and ("e4m3" in name or "e2m1" in name):
                continue
            # As many tokens a core as the real chip would have, as far as the model is quick enough.
            here = max(8, tokens * CORES_OF_THE_STANDIN // chip.cores // 8)
            work = _run(call, here, chip)
            scale = tokens * CORES_OF_THE_STANDIN / chip.cores / here / chip.clock / 1e3  # cycles to µs
            times = {
                "memory": tokens * token_bytes / chip.bandwidth / 1e3,
                "vector": (work["repeats"] + VECTOR_START * work["vectors"]) * scale,
                "copies": COPY_ISSUE * work["copies"] * scale,
                "scalar": SCALAR * work["scalars"] * scale,
            }
            bound = max(times, key=lambda kind: times[kind])
            figures = " | ".join(f"{time:.0f} µs" for time in times.values())
            print(f"| `{name}` | {label} | {figures} | {bound} |", flush=True)
    print("\n| `gemm` | chip | memory | L2 to L1 | L1 to L0 | cube | bound |")
    print("|---|---|---|---|---|---|---|")
    for m, n, k in PRODUCTS:
        for label, chip in CHIPS.items():
            call = f"ops.gemm(bf16(n, {COUNTED_DEPTH}), bf16({n}, {COUNTED_DEPTH}).t())"
            work = _run(call, m, chip, chip.cores)
            scale = k / COUNTED_DEPTH / chip.clock / 1e3
            times = {
                "memory": 2 * (m * k + n * k + m * n) / chip.bandwidth / 1e3,
                "L2 to L1": work["bytes"] / FROM_L2 * scale,
                "L1 to L0": work["loaded"] / FROM_L1 * scale,
                "cube": (work["fractals"] + PRODUCT_START * work["products"]) * scale,
            }
            bound = max(times, key=lambda kind: times[kind])
            figures = " | ".join(f"{time:.0f} µs" for time in times.values())
            print(f"| {m} x {k} by {k} x {n} | {label} | {figures} | {bound} |", flush=True)


if __name__ == "__main__":
    main()
