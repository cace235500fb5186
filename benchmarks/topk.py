"""topk against torch.topk and stock torch.compile."""

from functools import partial

import torch
from harness import Bench

from torch_deepinfer import ops

# Rows, row size, k: decoding, prefilling, one long context; the vocabulary of a sampler.
CPU = [(64, 131072, 512), (1, 1048576, 512), (8, 129280, 50), (256, 4096, 512)]
CUDA = [(rows, size, 512) for rows in (6, 256, 4096) for size in (1024, 4096, 16384, 65536, 131072)]
CUDA += [(6, 1048576, 512), (6, 1048576, 1024), (256, 1048576, 512)]
VOCABULARY = [(rows, 129280, 512) for rows in (1, 6, 256, 768)]


def main() -> None:
    bench = Bench("topk", __doc__)
    device = bench.args.device
    shapes = CPU if device == "cpu" else CUDA
    cases = [(shape, torch.bfloat16, False) for shape in shapes] + [
        (shape, torch.float32, True) for shape in VOCABULARY
    ]
    for (rows, size, k), dtype, sort in cases:
        x = torch.randn(rows, size, device=device).to(dtype)
        theirs = partial(torch.topk, k=k, sorted=sort)
        bench.row(
            {"shape": f"{rows}x{size}", "k": k, "dtype": str(dtype).removeprefix("torch."), "sorted": sort},
            {
                "ours": partial(ops.topk, x, k, sorted=sort, return_values=sort),
                "eager": partial(theirs, x),
                "stock": partial(torch.compile(theirs, dynamic=False), x),
            },
            x.nbytes + rows * k * (8 if sort else 4),
        )
    bench.finish()


if __name__ == "__main__":
    main()
