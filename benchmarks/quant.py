"""Quantisation and dequantisation against plain torch, as models write it, eager and under stock torch.compile."""

from functools import partial

import torch
from harness import Bench

from torch_deepinfer import ops

E4M3_MAX = 448.0


def token_group(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = x.unflatten(-1, (-1, 128)).float()
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    codes = (groups * (E4M3_MAX / amax)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(-2), (amax / E4M3_MAX).squeeze(-1)


def token_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    row = x.float()
    amax = row.abs().amax(-1, keepdim=True).clamp(min=1e-10)
    return (row * (127 / amax)).round().to(torch.int8), amax / 127


def block(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = x.unflatten(-1, (-1, 128)).unflatten(0, (-1, 128)).float()
    amax = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-4)
    codes = (blocks * (E4M3_MAX / amax)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(2).flatten(0, 1), (amax / E4M3_MAX).squeeze((1, 3))


def back(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    blocks = q.unflatten(-1, (-1, 128)).unflatten(0, (-1, 128)).float()
    return (blocks * scales[:, None, :, None]).bfloat16().flatten(2).flatten(0, 1)


def main() -> None:
    bench = Bench("quant", __doc__)
    int8 = partial(ops.quantize_per_token_group, group_size=-1, dtype=torch.int8)
    for dtype in (torch.bfloat16, torch.float32):
        for tokens, size in [(1, 7168), (16, 7168), (128, 2048), (512, 7168), (4096, 7168)]:
            x = torch.randn(tokens, size, device=bench.args.device).to(dtype)
            quantise = [("e4m3 1x128", ops.quantize_per_token_group, token_group), ("int8 row", int8, token_int8)]
            if tokens % 128 == 0:
                quantise.append(("e4m3 128x128", ops.quantize_per_block, block))
            for name, ours, plain in quantise:
                bench.row(
                    {"op": name, "shape": f"{tokens}x{size} {str(dtype).removeprefix('torch.')}"},
                    {
                        "ours": partial(ours, x),
                        "eager": partial(plain, x),
                        "stock": partial(torch.compile(plain, dynamic=False), x),
                    },
                    x.nbytes + x.numel(),
                )
    for rows, columns in [(128, 2048), (2048, 7168), (7168, 16384)]:
        q, scales = ops.quantize_per_block(torch.randn(rows, columns, device=bench.args.device))
        bench.row(
            {"op": "dequantize 128x128", "shape": f"{rows}x{columns} bfloat16"},
            {
                "ours": partial(ops.dequantize, q, scales, [128, 128]),
                "eager": partial(back, q, scales),
                "stock": partial(torch.compile(back, dynamic=False), q, scales),
            },
            3 * q.numel(),
        )
    bench.finish()


if __name__ == "__main__":
    main()
