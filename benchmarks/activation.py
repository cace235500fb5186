"""silu_and_mul and gelu_and_mul against eager torch and stock torch.compile."""

from functools import partial

import torch
from harness import Bench

from torch_deepinfer import ops
from torch_deepinfer.reference import activation as reference

GPT_OSS = {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0}
SHAPES = [(1, 1536), (1, 14336), (8, 14336), (64, 768), (512, 1536), (512, 8192), (4096, 8192)]


def interleaved(gate_up: torch.Tensor, act) -> torch.Tensor:
    return act(gate_up[..., ::2], gate_up[..., 1::2], **GPT_OSS)


def main() -> None:
    bench = Bench("activation", __doc__)
    for dtype in (torch.bfloat16, torch.float32):
        for tokens, size in SHAPES:
            gate_up = torch.randn(tokens, 2 * size, device=bench.args.device).to(dtype)
            for name, ours, eager in [
                ("silu halves", ops.silu_and_mul, reference.silu_and_mul),
                (
                    "gpt-oss interleaved",
                    partial(interleaved, act=ops.silu_and_mul),
                    partial(interleaved, act=reference.silu_and_mul),
                ),
                ("gelu halves", ops.gelu_and_mul, reference.gelu_and_mul),
                (
                    "gelu tanh halves",
                    partial(ops.gelu_and_mul, approximate="tanh"),
                    partial(reference.gelu_and_mul, approximate="tanh"),
                ),
            ]:
                bench.row(
                    {"op": name, "shape": f"{tokens}x{size} {str(dtype).removeprefix('torch.')}"},
                    {
                        "ours": partial(ours, gate_up),
                        "eager": partial(eager, gate_up),
                        "stock": partial(torch.compile(eager, dynamic=False), gate_up),
                    },
                    gate_up.nbytes * 3 // 2,
                )
    bench.finish()


if __name__ == "__main__":
    main()
