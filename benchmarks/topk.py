"""topk against torch.topk; on a CPU also under stock torch.compile, which on a GPU runs the kernel of torch.topk."""

from functools import partial

import torch
from harness import Bench

from torch_deepinfer import ops

# Rows, row size, k: decoding, prefilling, one long context; the vocabulary of a sampler.
CPU = [(64, 131072, 512), (1, 1048576, 512), (8, 129280, 50), (256, 4096, 512)]
CUDA_ROWS = (6, 256, 512, 768, 4096)
CUDA = [(rows, 2**bits, k) for bits in (8, 10, 12, 14, 16, 17, 18, 19, 20) for rows in CUDA_ROWS for k in (512, 1024)]
VOCABULARY = 129280


def main() -> None:
    bench = Bench("topk", __doc__)
    device = bench.args.device
    on_cpu = device == "cpu"
    if not on_cpu:
        bench.baseline = "eager"
    shapes = CPU if on_cpu else CUDA
    rows_of_vocabulary = (1, 6, 256, 768) if on_cpu else CUDA_ROWS
    cases = [(shape, torch.bfloat16, False) for shape in shapes]
    cases += [((rows, VOCABULARY, 512), torch.float32, True) for rows in rows_of_vocabulary]
    for (rows, size, k), dtype, sort in cases:
        case = {"shape": f"{rows}x{size}", "k": k, "dtype": str(dtype).removeprefix("torch."), "sorted": sort}
        if not bench.wanted(case):
            continue
        x = torch.empty(rows, size, device=device, dtype=dtype).normal_()
        theirs = partial(torch.topk, k=min(k, size), sorted=sort)
        functions = {"ours": partial(ops.topk, x, k, sorted=sort, return_values=sort), "eager": partial(theirs, x)}
        if on_cpu:
            functions["stock"] = partial(torch.compile(theirs, dynamic=False), x)
        read = x.nbytes if sort or k < size else 0  # a whole row is known without a look at it
        bench.row(case, functions, read + rows * k * (8 if sort else 4))
    bench.finish()


if __name__ == "__main__":
    main()
