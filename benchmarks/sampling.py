"""sample against the usual code of samplers, eager and under stock torch.compile."""

from collections.abc import Callable
from functools import partial

import torch
from harness import Bench

from torch_deepinfer import ops

VOCABULARY = 129280


def drawn(probs: torch.Tensor) -> torch.Tensor:
    """An element of each row, without the synchronisation of torch.multinomial."""
    return (probs / torch.empty_like(probs).exponential_(1)).argmax(-1)


def plain(logits: torch.Tensor) -> torch.Tensor:
    return drawn(logits.softmax(-1))


def top_k_top_p(logits: torch.Tensor, top_k: int = 50, top_p: float = 0.9) -> torch.Tensor:
    logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -torch.inf)
    ordered, order = logits.sort(descending=True)
    probs = ordered.softmax(-1)
    late = probs.cumsum(-1) - probs >= top_p
    removed = torch.empty_like(late).scatter(-1, order, late)
    return drawn(logits.masked_fill(removed, -torch.inf).softmax(-1))


def main() -> None:
    bench = Bench("sampling", __doc__)
    device = bench.args.device
    for rows in (1, 8, 64) if device == "cpu" else (1, 64, 256):
        logits = 3 * torch.randn(rows, VOCABULARY, device=device)
        seeds = torch.arange(rows, device=device)
        top_k = torch.full((rows,), 50, dtype=torch.int32, device=device)
        top_p = torch.full((rows,), 0.9, device=device)
        kinds: dict[str, tuple[dict[str, torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
            "plain": ({}, plain),
            "top_k 50, top_p 0.9": ({"top_k": top_k, "top_p": top_p}, top_k_top_p),
        }
        for kind, (filters, theirs) in kinds.items():
            bench.row(
                {"rows": rows, "filters": kind},
                {
                    "ours": partial(ops.sample, logits, seeds, **filters),
                    "eager": partial(theirs, logits),
                    "stock": partial(torch.compile(theirs, dynamic=False), logits),
                },
                logits.nbytes,
            )
    bench.finish()


if __name__ == "__main__":
    main()
