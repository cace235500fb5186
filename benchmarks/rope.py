"""rotary_embedding of q and k against eager torch and stock torch.compile, in the layout that attention hands over."""

from functools import partial

import torch
from harness import Bench

from torch_deepinfer import ops
from torch_deepinfer.reference import rope as reference


def complex_rotary(q: torch.Tensor, k: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The product of complex numbers, as in DeepSeek-V2 and Llama 4."""

    def rotate(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * angles).flatten(-2).to(x.dtype)

    return rotate(q), rotate(k)


def main() -> None:
    bench = Bench("rope", __doc__)
    device = bench.args.device
    shapes = [  # batch, tokens, q heads, k heads, head size
        (1, 1, 9, 3, 64),
        (1, 1, 32, 8, 128),
        (8, 1, 32, 8, 128),
        (1, 512, 9, 3, 64),
        (1, 512, 32, 8, 128),
        (1, 2048, 32, 8, 128),
    ]
    for dtype in (torch.bfloat16, torch.float32):
        for style in ("half", "interleaved", "interleaved_to_half", "complex"):
            for batch, tokens, q_heads, k_heads, head_size in shapes:
                q, k = (
                    torch.randn(batch, tokens, heads, head_size, device=device).to(dtype).transpose(1, 2)
                    for heads in (q_heads, k_heads)
                )
                theta = torch.rand(batch, 1, tokens, head_size // 2, device=device)
                if style == "complex":
                    angles = torch.polar(torch.ones_like(theta), theta)
                    ours = partial(ops.rotary_embedding, q, k, angles.real, angles.imag, None, "interleaved")
                    eager, arguments = complex_rotary, (q, k, angles)
                else:
                    table = torch.cat([theta, theta], -1)
                    arguments = (q, k, table.cos().to(dtype), table.sin().to(dtype), None, style)
                    ours, eager = partial(ops.rotary_embedding, *arguments), reference.rotary_embedding
                name = f"{batch}x{tokens} heads {q_heads}/{k_heads}x{head_size}"
                bench.row(
                    {"style": style, "shape": f"{name} {str(dtype).removeprefix('torch.')}"},
                    {
                        "ours": ours,
                        "eager": partial(eager, *arguments),
                        "stock": partial(torch.compile(eager, dynamic=False), *arguments),
                    },
                    2 * (q.nbytes + k.nbytes),
                )
    bench.finish()


if __name__ == "__main__":
    main()
