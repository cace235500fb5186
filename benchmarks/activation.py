"""Gated activations, and SwiGLU with quantisation, against the same in plain torch under stock torch.compile."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from harness import Bench
from quant import token_group

from torch_deepinfer import ops
from torch_deepinfer.reference import activation as reference

GPT_OSS = {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0}


def interleaved(gate_up: torch.Tensor, act: Callable) -> torch.Tensor:
    return act(gate_up[..., ::2], gate_up[..., 1::2], **GPT_OSS)


def swiglu_quant(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return token_group(reference.silu_and_mul(gate_up))


SILU = ("silu halves", ops.silu_and_mul, reference.silu_and_mul)
QUANT = ("silu halves, e4m3 1x128", ops.silu_and_mul_quant, swiglu_quant)
OTHERS = [
    ("gpt-oss interleaved", *(partial(interleaved, act=f.silu_and_mul) for f in (ops, reference))),
    ("gelu halves", ops.gelu_and_mul, reference.gelu_and_mul),
    ("gelu tanh halves", *(partial(f.gelu_and_mul, approximate="tanh") for f in (ops, reference))),
]


def cases(device: str) -> Iterator[tuple[str, Callable, Callable, int, int, torch.dtype]]:
    """Name, ours, plain torch, rows, columns of the result, dtype."""
    if device == "cuda":
        shapes = [(1, 7168), (64, 7168), (4096, 7168), (8001, 7168), (32768, 2048), (65536, 2048)]
        for shape in shapes:
            for kind in (SILU, QUANT):
                yield *kind, *shape, torch.bfloat16
        for kind in OTHERS:
            yield *kind, 8192, 2880, torch.bfloat16
        return
    for shape in [(1, 14336), (8, 14336), (64, 768), (512, 1536), (512, 8192), (4096, 8192)]:
        for kind in (SILU, QUANT, *OTHERS):
            yield *kind, *shape, torch.bfloat16
    yield *SILU, 512, 8192, torch.float32


def main() -> None:
    bench = Bench("activation", __doc__)
    for name, ours, plain, rows, columns, dtype in cases(bench.args.device):
        case = {"op": name, "shape": f"{rows}x{columns} {str(dtype).removeprefix('torch.')}"}
        if not bench.wanted(case):
            continue
        gate_up = torch.randn(rows, 2 * columns, device=bench.args.device).to(dtype)
        written = rows * columns * (1 if "e4m3" in name else gate_up.element_size())
        stock = torch.compile(plain, dynamic=False)
        bench.row(case, {"ours": partial(ours, gate_up), "stock": partial(stock, gate_up)}, gate_up.nbytes + written)
    bench.finish()


if __name__ == "__main__":
    main()
