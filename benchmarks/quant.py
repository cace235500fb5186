"""Quantisation and dequantisation against plain torch, as models write it, under stock torch.compile."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from harness import Bench

from torch_deepinfer import ops

E4M3, E8M0, E2M1 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2
E4M3_MAX = 448.0


def token_group(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = x.unflatten(-1, (-1, 128)).float()
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    codes = (groups * (E4M3_MAX / amax)).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return codes.flatten(-2), (amax / E4M3_MAX).squeeze(-1)


def packed_columns(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = x.unflatten(-1, (-1, 128)).float()
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4) / E4M3_MAX
    exponents = (scales.view(torch.int32) + 0x7FFFFF) >> 23
    codes = (groups * ((254 - exponents) << 23).view(torch.float32)).to(E4M3)
    bytes_ = exponents.squeeze(-1).unflatten(-1, (-1, 4))
    words = bytes_[..., 0] | bytes_[..., 1] << 8 | bytes_[..., 2] << 16 | bytes_[..., 3] << 24
    return codes.flatten(-2), words.mT.contiguous().mT


def four_bits(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = x.unflatten(-1, (-1, 32)).float()
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126) / 6
    exponents = (scales.view(torch.int32) + 0x7FFFFF) >> 23
    values = groups * ((254 - exponents) << 23).view(torch.float32)
    size = values.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    codes = (size / step).round() + torch.where(size < 2, 0.0, torch.where(size < 4, 2.0, 4.0))
    codes = codes.to(torch.uint8) | (values < 0).to(torch.uint8) << 3
    pairs = codes.flatten(-2)
    return pairs[..., ::2] | pairs[..., 1::2] << 4, exponents.squeeze(-1).to(torch.uint8)


def token_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    row = x.float()
    amax = row.abs().amax(-1, keepdim=True).clamp(min=1e-10)
    return (row * (127 / amax)).round().to(torch.int8), amax / 127


def block(x: torch.Tensor, columns: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = x.unflatten(-1, (-1, columns)).unflatten(0, (-1, 128)).float()
    amax = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-4)
    codes = (blocks * (E4M3_MAX / amax)).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return codes.flatten(2).flatten(0, 1), (amax / E4M3_MAX).squeeze((1, 3))


def back(q: torch.Tensor, scales: torch.Tensor, rows: int) -> torch.Tensor:
    blocks = q.unflatten(-1, (-1, 128)).unflatten(0, (-1, rows)).float()
    return (blocks * scales[:, None, :, None]).bfloat16().flatten(2).flatten(0, 1)


Case = tuple[str, int, int, Callable, Callable, float]


def cases(device: str) -> Iterator[Case]:
    """Name, rows, columns, ours, plain torch, and bytes of an element's code."""
    group = ("e4m3 1x128", ops.quantize_per_token_group, token_group, 1)
    row = ("int8 row", partial(ops.quantize_per_token, dtype=torch.int8), token_int8, 1)
    square = ("e4m3 128x128", ops.quantize_per_block, block, 1)
    packed = partial(ops.quantize_per_token_group, scale_dtype=torch.int32, scale_layout="column")
    pairs = partial(ops.quantize_per_token_group, group_size=32, dtype=E2M1, scale_dtype=E8M0)
    other = [
        ("e4m3 1x128, packed scales", packed, packed_columns, 1),
        ("e2m1 1x32", pairs, four_bits, 0.5),
        ("e4m3 128x1", ops.quantize_per_channel, partial(block, columns=1), 1),
    ]

    def of(rows: int, columns: int, *kinds: tuple) -> Iterator[Case]:
        for name, ours, plain, size in kinds:
            yield name, rows, columns, ours, plain, size

    if device == "cpu":
        for tokens, columns in [(1, 7168), (16, 7168), (128, 2048), (512, 7168), (4096, 7168)]:
            yield from of(tokens, columns, group, row)
        yield from of(512, 7168, square, *other)
        yield from of(4096, 7168, square)
        return
    for tokens in (1, 64, 1024, 8001, 65536):
        yield from of(tokens, 7168, group)
    yield from of(32768, 4096, group, row, square)
    yield from of(64, 7168, row)
    yield from of(8064, 7168, row, square, *other)


def main() -> None:
    bench = Bench("quant", __doc__)
    device = bench.args.device
    for name, rows, columns, ours, plain, size in cases(device):
        case = {"op": name, "shape": f"{rows}x{columns} bfloat16"}
        if not bench.wanted(case):
            continue
        x = torch.randn(rows, columns, device=device).bfloat16()
        stock = torch.compile(plain, dynamic=False)
        bench.row(case, {"ours": partial(ours, x), "stock": partial(stock, x)}, int(x.numel() * (2 + size)))
    shapes = [(8064, 7168), (32768, 4096)] if device == "cuda" else [(2048, 7168), (7168, 16384)]
    for rows, columns in shapes:
        for height in (1, 128):
            case = {"op": f"dequantize {height}x128", "shape": f"{rows}x{columns} bfloat16"}
            if not bench.wanted(case):
                continue
            q, scales = ops.quantize_per_block(torch.randn(rows, columns, device=device), [height, 128])
            stock = torch.compile(partial(back, rows=height), dynamic=False)
            columns_ = {"ours": partial(ops.dequantize, q, scales, [height, 128]), "stock": partial(stock, q, scales)}
            bench.row(case, columns_, 3 * q.numel())
    bench.finish()


if __name__ == "__main__":
    main()
