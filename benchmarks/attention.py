"""Attention of one new token over a static cache whose keys several heads share, as transformers writes it."""

from functools import partial

import torch
import torch.nn.functional as F
from harness import Bench

import torch_deepinfer.inductor  # noqa: F401  (the backend, also where the package is not installed)

# sequences, heads, heads of keys, positions of the cache, size of a head
SHAPES = {
    "cpu": [(1, 9, 3, 128, 64), (8, 9, 3, 128, 64), (1, 32, 8, 1024, 128), (8, 32, 8, 512, 128), (1, 32, 4, 4096, 128)],
    "cuda": [
        (1, 32, 4, 128, 128),
        (1, 32, 4, 4096, 128),
        (8, 9, 3, 512, 64),
        (16, 32, 4, 1024, 128),
        (64, 32, 8, 2048, 128),
    ],
}


def repeat(x: torch.Tensor, count: int) -> torch.Tensor:
    batch, heads, positions, size = x.shape
    return x[:, :, None].expand(batch, heads, count, positions, size).reshape(batch, heads * count, positions, size)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    count = q.shape[1] // k.shape[1]
    out = F.scaled_dot_product_attention(q, repeat(k, count), repeat(v, count), attn_mask=mask)
    return out.transpose(1, 2).flatten(2)


def main() -> None:
    bench = Bench("attention", __doc__)
    device = bench.args.device
    ours = {"backend": "deepinfer", "options": {"deepinfer.patterns": ["packed_attention"]}}
    for dtype in (torch.bfloat16, torch.float32):
        for batch, heads, shared, positions, size in SHAPES[device]:
            name = f"{batch} x {heads}/{shared} heads of {size}, cache {positions}"
            case = {"shape": name, "dtype": str(dtype).removeprefix("torch.")}
            if not bench.wanted(case):
                continue
            q = torch.randn(batch, heads, 1, size, device=device).to(dtype)
            k, v = (torch.randn(batch, shared, positions, size, device=device).to(dtype) for _ in range(2))
            mask = (torch.arange(positions, device=device) < positions // 2).expand(batch, 1, 1, -1)
            columns = {"ours": torch.compile(attention, dynamic=False, **ours)}
            columns["stock"] = torch.compile(attention, dynamic=False)
            bench.row(case, {n: partial(f, q, k, v, mask) for n, f in columns.items()}, k.nbytes + v.nbytes)
    bench.finish()


if __name__ == "__main__":
    main()
