"""Rotary embedding of q and k, in place, after a norm and in latent attention, against eager torch and stock
torch.compile."""

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from harness import Bench

import torch_deepinfer.inductor  # noqa: F401  (the backend, also where the package is not installed)
from torch_deepinfer import ops
from torch_deepinfer.reference import rope as reference

# batch, tokens, q heads, k heads, head size: the layout that attention hands over
ATTENTION = {
    "cpu": [
        (1, 1, 9, 3, 64),
        (1, 1, 32, 8, 128),
        (8, 1, 32, 8, 128),
        (1, 512, 9, 3, 64),
        (1, 512, 32, 8, 128),
        (1, 2048, 32, 8, 128),
    ],
    "cuda": [(1, tokens, 32, 8, 128) for tokens in (1, 64, 4096, 16384, 65536)],
}
STYLES = {"cpu": ("half", "interleaved", "interleaved_to_half", "complex"), "cuda": ("half", "interleaved_to_half")}
DTYPES = {"cpu": (torch.bfloat16, torch.float32), "cuda": (torch.bfloat16,)}
# tokens, q heads: 64 of the 192 elements of a head, and one key head inside rows of 576
LATENT = {
    "cpu": [(1, 16), (512, 16)],
    "cuda": [(tokens, heads) for tokens in (1, 64, 8192) for heads in (1, 32, 64, 128)] + [(65536, 32)],
}


def complex_rotary(q: torch.Tensor, k: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The product of complex numbers, as in DeepSeek-V2 and Llama 4."""

    def rotate(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * angles).flatten(-2).to(x.dtype)

    return rotate(q), rotate(k)


def heads_of(bench: Bench, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    batch, tokens, q_heads, k_heads, size = shape
    q, k = (
        torch.randn(batch, tokens, heads, size, device=bench.args.device).to(dtype).transpose(1, 2)
        for heads in (q_heads, k_heads)
    )
    return q, k


def name_of(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    batch, tokens, q_heads, k_heads, size = shape
    return f"{batch}x{tokens} heads {q_heads}/{k_heads}x{size} {str(dtype).removeprefix('torch.')}"


def columns(bench: Bench, ours: Callable[..., Any], eager: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    functions = {"ours": partial(ours, *arguments), "stock": partial(torch.compile(eager, dynamic=False), *arguments)}
    return functions if bench.args.device == "cuda" else {**functions, "eager": partial(eager, *arguments)}


def rotations(bench: Bench, shape: tuple[int, ...], style: str, dtype: torch.dtype) -> None:
    case = {"op": f"rotary_embedding {style}", "shape": name_of(shape, dtype)}
    if not bench.wanted(case):
        return
    q, k = heads_of(bench, shape, dtype)
    batch, tokens, _, _, size = shape
    theta = torch.rand(batch, 1, tokens, size // 2, device=q.device)
    if style == "complex":
        angles = torch.polar(torch.ones_like(theta), theta)
        functions = columns(
            bench,
            lambda q, k, angles: ops.rotary_embedding(q, k, angles.real, angles.imag, None, "interleaved"),
            complex_rotary,
            q,
            k,
            angles,
        )
    else:
        table = torch.cat([theta, theta], -1)
        functions = columns(
            bench,
            ops.rotary_embedding,
            reference.rotary_embedding,
            *(q, k, table.cos().to(dtype), table.sin().to(dtype), None, style),
        )
    bench.row(case, functions, 2 * (q.nbytes + k.nbytes))


def normed(bench: Bench, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    case = {"op": "qk_norm_rope", "shape": name_of(shape, dtype)}
    if not bench.wanted(case):
        return
    q, k = heads_of(bench, shape, dtype)
    batch, tokens, _, _, size = shape
    weights = torch.randn(2, size, device=q.device).to(dtype)
    theta = torch.rand(batch, 1, tokens, size // 2, device=q.device)
    table = torch.cat([theta, theta], -1)
    arguments = (q, k, *weights, table.cos().to(dtype), table.sin().to(dtype), 1e-6)
    bench.row(case, columns(bench, ops.qk_norm_rope, reference.qk_norm_rope, *arguments), 2 * (q.nbytes + k.nbytes))


def in_place(bench: Bench, tokens: int, heads: int) -> None:
    case = {"op": "rotary_embedding_ half", "shape": f"{tokens} heads {heads}/1x64 of 192 and 576 bfloat16"}
    if not bench.wanted(case):
        return
    device = bench.args.device
    q, k = (torch.randn(tokens, n, size, device=device).bfloat16() for n, size in ((heads, 192), (1, 576)))
    q, k = q[..., 128:], k[..., 512:]
    theta = torch.rand(tokens, 32, device=device)
    cos, sin = theta.cos().bfloat16(), theta.sin().bfloat16()
    positions = torch.arange(tokens, device=device)[:, None]
    moved = 2 * (q.numel() + k.numel()) * 2 + 2 * cos.nbytes + positions.nbytes
    arguments = (q, k, cos, sin, positions)
    bench.row(case, columns(bench, ops.rotary_embedding_, reference.rotary_embedding_, *arguments), moved)


def pairs_to_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """interleaved_to_half as transformers spells it, which the backend finds."""
    a, b = x[..., ::2], x[..., 1::2]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def latent_heads(
    q: torch.Tensor, kv: torch.Tensor, kv_a: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cached: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """As DeepSeek-V3 does, with 128 + 64 columns of q and k; a cache takes the rotated key before keys are made."""
    q_nope, q_rope = q.transpose(1, 2).split([128, 64], -1)
    k_nope, _ = kv.transpose(1, 2).split([128, 128], -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q_rope, k_rope = pairs_to_halves(q_rope, cos, sin), pairs_to_halves(kv_a[..., 512:].unsqueeze(1), cos, sin)
    query = torch.cat([q_nope, q_rope], -1)
    if cached:
        return query, k_rope
    keys = torch.empty_like(query)
    keys[..., :128].copy_(k_nope)
    keys[..., 128:].copy_(k_rope.expand(-1, k_nope.shape[1], -1, -1))
    return query, keys


def latent(bench: Bench, tokens: int, heads: int, cached: bool) -> None:
    """Ours is what the backend makes of it, so that both columns enter a compiled function, each its own: of one
    function, Dynamo tries all versions in turn."""
    case = {"op": "mla_qk_rope" + (", cached" if cached else ""), "shape": f"{tokens} heads {heads}x(128+64) bfloat16"}
    if not bench.wanted(case):
        return
    sizes = ((heads, 192), (heads, 256), (576,))
    q, kv, kv_a = (torch.randn(1, tokens, *size, device=bench.args.device).bfloat16() for size in sizes)
    theta = torch.rand(1, tokens, 32, device=q.device)
    pattern = "mla_q_rope" if cached else "mla_qk_rope"
    arguments = (q, kv, kv_a, theta.cos().bfloat16(), theta.sin().bfloat16(), cached)
    options = {"deepinfer.patterns": ["mla_qk_rope", "mla_q_rope"], "deepinfer.expect": {pattern: 1}}
    torch.compiler.reset()
    twin = FunctionType(latent_heads.__code__.replace(), globals())
    ours = torch.compile(twin, backend="deepinfer", dynamic=False, options=options)
    moved = 2 * q.nbytes if cached else 3 * q.nbytes + kv.nbytes // 2
    bench.row(case, columns(bench, ours, latent_heads, *arguments), moved)


def main() -> None:
    bench = Bench("rope", __doc__)
    device = bench.args.device
    for dtype in DTYPES[device]:
        for style in STYLES[device]:
            for shape in ATTENTION[device]:
                rotations(bench, shape, style, dtype)
        for shape in ATTENTION[device]:
            normed(bench, shape, dtype)
    for tokens, heads in LATENT[device]:
        in_place(bench, tokens, heads)
    for tokens in (1, 16, 2048):
        for heads in (16, 128):
            for cached in (False, True):
                latent(bench, tokens, heads, cached)
    bench.finish()


if __name__ == "__main__":
    main()
