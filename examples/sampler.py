"""Sampling inside transformers' own ``generate``: a logits processor that draws, and leaves the drawn token alone.

    model.generate(**inputs, do_sample=False, logits_processor=[Sampler(temperature=0.7, top_p=0.9, seed=1)])

Each row of the batch has a seed of its own, so what it draws does not depend on the rows beside it.
"""

import torch
from transformers import LogitsProcessor

from torch_deepinfer import ops


class Sampler(LogitsProcessor):
    """The arguments are those of ``ops.sample``, one value for all rows; row i has the seed ``seed + i``."""

    def __init__(
        self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 0
    ) -> None:
        self.floats = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
        self.top_k = top_k
        self.seed = seed

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """0 for the token that is drawn, -inf for all others."""
        rows, device = scores.shape[0], scores.device
        ids, _ = ops.sample(
            scores,
            self.seed + torch.arange(rows, device=device),
            torch.full((rows,), input_ids.shape[1], device=device),
            top_k=torch.full((rows,), self.top_k, dtype=torch.int32, device=device),
            **{name: torch.full((rows,), given, device=device) for name, given in self.floats.items()},
        )
        return torch.full_like(scores, -torch.inf).scatter(1, ids[:, None], 0.0)
