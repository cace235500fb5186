"""The norm ops, plain and quantised, against eager torch and stock torch.compile."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness import Bench

from torch_deepinfer import ops
from torch_deepinfer.reference import norm as reference

# tokens, hidden size
SHAPES = {
    "cpu": [(1, 576), (1, 4096), (8, 4096), (64, 2048), (512, 576), (512, 4096), (4096, 7168)],
    "cuda": [(tokens, size) for size in (2048, 7168) for tokens in (1, 64, 4096, 16384, 65536)]
    + [(8001, size) for size in (576, 2560, 3072, 4096, 5120, 6144, 7168)],
}
DTYPES = {"cpu": (torch.bfloat16, torch.float32), "cuda": (torch.bfloat16,)}
E4M3_MAX = 448.0


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups of 128, as models write it."""
    groups = x.unflatten(-1, (-1, 128)).float()
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    codes = (groups * (E4M3_MAX / amax)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(-2), (amax / E4M3_MAX).squeeze(-1)


def rms_norm_quant(*arguments: Any) -> tuple[torch.Tensor, ...]:
    return quantized(reference.rms_norm(*arguments))


def add_rms_norm_quant(*arguments: Any) -> tuple[torch.Tensor, ...]:
    normed, total = reference.add_rms_norm(*arguments)
    return *quantized(normed), total


EAGER: dict[str, Callable[..., Any]] = {
    "rms_norm": reference.rms_norm,
    "add_rms_norm": reference.add_rms_norm,
    "rms_norm_quant": rms_norm_quant,
    "add_rms_norm_quant": add_rms_norm_quant,
}


def main() -> None:
    bench = Bench("norm", __doc__)
    device = bench.args.device
    for dtype in DTYPES[device]:
        for tokens, size in SHAPES[device]:
            for name, eager in EAGER.items():
                case = {"op": name, "shape": f"{tokens}x{size} {str(dtype).removeprefix('torch.')}"}
                if not bench.wanted(case) or ("quant" in name and size % 128):
                    continue
                x, residual = (torch.randn(tokens, size, device=device).to(dtype) for _ in range(2))
                weight = torch.randn(size, device=device).to(dtype)
                has_sum = "add" in name
                arguments = (x, *[residual] * has_sum, weight, 1e-6)
                written = x.numel() + x.numel() // 128 * 4 if "quant" in name else x.nbytes
                functions = {
                    "ours": partial(getattr(ops, name), *arguments),
                    "stock": partial(torch.compile(eager, dynamic=False), *arguments),
                }
                if device == "cpu":
                    functions["eager"] = partial(eager, *arguments)
                bench.row(case, functions, x.nbytes * (3 if has_sum else 1) + written)
    bench.finish()


if __name__ == "__main__":
    main()
