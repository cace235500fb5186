"""Attention as transformers spells it: keys repeated for the heads that share them, and a mask built in the model.

Forms: one new token over a static cache (``decode``), a prompt under the model's own causal mask (``prefill``) or
sliding window (``window``), and both with sinks as GPT-OSS has them. The floor of decode is reading the half of the
cache that the mask shows.
"""

from functools import partial

import torch
import torch.nn.functional as F
from harness import Bench

import torch_deepinfer.inductor  # noqa: F401  (the backend, also where the package is not installed)

# form, sequences, heads, heads of keys, tokens of the prompt or positions of the cache, size of a head, of its values
CASES = {
    "cpu": [
        ("decode", 1, 9, 3, 128, 64),
        ("decode", 8, 9, 3, 128, 64),
        ("decode", 1, 32, 8, 1024, 128),
        ("decode", 8, 32, 8, 512, 128),
        ("decode", 1, 32, 4, 4096, 128),
        ("prefill", 1, 9, 3, 128, 64),
        ("prefill", 1, 9, 3, 512, 64),
        ("prefill", 1, 32, 8, 1024, 128),
        ("decode, sinks", 1, 64, 8, 512, 64),
        ("prefill, sinks", 1, 64, 8, 512, 64),
        ("window, sinks", 1, 64, 8, 512, 64),
    ],
    "cuda": [
        ("decode", 1, 32, 4, 128, 128),
        ("decode", 1, 32, 4, 4096, 128),
        ("decode", 1, 32, 8, 32768, 128),
        ("decode", 8, 9, 3, 512, 64),
        ("decode", 16, 32, 4, 1024, 128),
        ("decode", 64, 32, 8, 2048, 128),
        ("decode", 1, 16, 16, 1024, 192, 128),
        ("decode", 16, 16, 16, 1024, 192, 128),
        ("decode", 64, 16, 16, 1024, 192, 128),
        ("prefill", 1, 32, 8, 16, 128),
        ("prefill", 1, 32, 8, 512, 128),
        ("prefill", 1, 32, 4, 2048, 128),
        ("prefill", 1, 8, 4, 2048, 256),
        ("prefill", 1, 16, 16, 2048, 192, 128),
        ("prefill", 1, 32, 8, 8192, 128),
        ("window", 1, 32, 8, 2048, 128),
        ("window", 1, 32, 8, 8192, 128),
        ("decode, sinks", 1, 64, 8, 1024, 64),
        ("decode, sinks", 64, 64, 8, 1024, 64),
        ("prefill, sinks", 1, 64, 8, 2048, 64),
        ("window, sinks", 1, 64, 8, 2048, 64),
    ],
}
WINDOW = 128


def repeat(x: torch.Tensor, count: int) -> torch.Tensor:
    batch, heads, positions, size = x.shape
    return x[:, :, None].expand(batch, heads, count, positions, size).reshape(batch, heads * count, positions, size)


def own_mask(q: torch.Tensor, window: bool) -> torch.Tensor:
    """[1, 1, tokens, tokens]: what a model makes of positions that it counts itself."""
    at = torch.arange(q.shape[2], device=q.device)
    seen = at <= at[:, None]
    return (seen & (at > at[:, None] - WINDOW) if window else seen)[None, None]


def attention(form: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    """``rest``: the mask of a cache, if the form is ``decode``, and sinks."""
    mask = rest[0] if "decode" in form else own_mask(q, "window" in form)
    count = q.shape[1] // k.shape[1]
    k, v = repeat(k, count), repeat(v, count)
    if "sinks" not in form:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
    scores = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
    scores = scores + torch.where(mask, 0.0, torch.finfo(q.dtype).min).to(q.dtype)
    sinks = rest[-1].reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
    scores = torch.cat([scores, sinks], dim=-1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    weights = torch.softmax(scores, dim=-1, dtype=scores.dtype)[..., :-1]
    return torch.matmul(weights, v).transpose(1, 2).contiguous().flatten(2)


def main() -> None:
    bench = Bench("attention", __doc__)
    device = bench.args.device
    ours = {"backend": "deepinfer", "options": {"deepinfer.patterns": ["attention"]}}
    dtypes = (torch.bfloat16,) if device == "cuda" else (torch.bfloat16, torch.float32)
    for dtype in dtypes:
        for form, batch, heads, shared, length, *sizes in CASES[device]:
            size, of_values = sizes[0], sizes[-1]
            name = f"{batch} x {heads}/{shared} heads of {'/'.join(map(str, sizes))}, {length}"
            case = {"form": form, "shape": name, "dtype": str(dtype).removeprefix("torch.")}
            if not bench.wanted(case):
                continue
            tokens = 1 if "decode" in form else length
            q = torch.randn(batch, tokens, heads, size, device=device).to(dtype).transpose(1, 2)
            k, v = (torch.randn(batch, shared, length, of, device=device).to(dtype) for of in (size, of_values))
            tensors = [q, k, v]
            if "decode" in form:
                tensors.append((torch.arange(length, device=device) < length // 2).expand(batch, 1, 1, -1))
            if "sinks" in form:
                tensors.append(torch.randn(heads, device=device).to(dtype))
            call = partial(torch.compile, attention, dynamic=False)
            columns = {name: partial(f, form, *tensors) for name, f in {"ours": call(**ours), "stock": call()}.items()}
            bench.row(case, columns, (k.nbytes + v.nbytes) // 2 if "decode" in form else None)
    bench.finish()


if __name__ == "__main__":
    main()
