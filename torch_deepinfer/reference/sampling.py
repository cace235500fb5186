"""Reference of the sampling family, a row at a time.

The weights come from a float64 exponential. They agree with those of the ops up to the rounding of a float32 one, and
so does what is drawn, but for one draw in a million or so.
"""

import math

import torch

from torch_deepinfer.reference.topk import topk

ONE = 2**40


def philox(seed: int, offset: int, stream: int) -> tuple[int, int]:
    """Two random numbers of 64 bits: Philox4x32-10 of the key ``seed`` and the counter (``offset``, ``stream``)."""
    word = 2**32 - 1
    low, high = seed & word, seed >> 32 & word
    x = [offset & word, offset >> 32 & word, stream, 0]
    for _ in range(10):
        a, b = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [b >> 32 ^ x[1] ^ low, b & word, a >> 32 ^ x[3] ^ high, a & word]
        low, high = low + 0x9E3779B9 & word, high + 0xBB67AE85 & word
    return x[1] << 32 | x[0], x[3] << 32 | x[2]


def weights(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, keep_ties: bool = False
) -> torch.Tensor:
    """The integer weights ``[V]`` of what may be drawn; a single 1 where there is no choice."""
    x = logits.double()
    order = topk(logits, len(x), sorted=True, index_dtype=torch.int64)[1]
    greatest = x[order[0]]
    result = torch.zeros(len(x), dtype=torch.int64)
    if not temperature >= 1e-5 or not greatest.isfinite():
        result[order[0]] = 1
        return result
    weight = torch.where(x > -torch.inf, ((x - greatest) / temperature).exp() * ONE, 0).long()[order]
    if 0 < top_k < len(x):
        weight[int((x >= x[order[top_k - 1]]).sum()) if keep_ties else top_k :] = 0
    if top_p < 1:
        mass = max(1, math.ceil(top_p * int(weight.sum())))
        weight[weight.cumsum(0) - weight >= mass] = 0
    weight[weight < math.ceil(min(min_p, 1.0) * ONE)] = 0
    result[order] = weight
    return result


def pick(weight: torch.Tensor, random: int) -> int:
    """The first element up to which the weights sum to more than ``random / 2^64`` of their total."""
    target = random * int(weight.sum()) >> 64
    return int((weight.cumsum(0) > target).int().argmax())


def _parameters(shape, temperature, top_k, top_p, min_p):
    given = zip((temperature, top_k, top_p, min_p), (1.0, 0, 1.0, 0.0), strict=True)
    return [torch.full(shape, default) if t is None else t for t, default in given]


def sample(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    offsets: torch.Tensor | None = None,
    *,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    keep_ties: bool = False,
    return_log_probs: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`torch_deepinfer.ops.sample`."""
    shape = logits.shape[:-1]
    filters = _parameters(shape, temperature, top_k, top_p, min_p)
    offsets = torch.zeros_like(seeds) if offsets is None else offsets
    ids, log_probs = torch.empty(seeds.numel(), dtype=torch.int64), torch.empty(seeds.numel())
    rows = zip(logits.reshape(-1, logits.shape[-1]), seeds.flatten(), offsets.flatten(), strict=True)
    for i, (row, seed, offset) in enumerate(rows):
        temperature_, top_k_, top_p_, min_p_ = (f.flatten()[i].item() for f in filters)
        weight = weights(row, temperature_, top_k_, top_p_, min_p_, keep_ties)
        ids[i] = pick(weight, philox(int(seed), int(offset), 0)[0])
        probability = weight[ids[i]].double() / weight.sum()
        log_probs[i] = torch.nan if row[ids[i]].isnan() else probability.log()
    return ids.view(shape), log_probs.view(shape) if return_log_probs else torch.empty(0)


def draw(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    keepdim: bool = False,
) -> torch.Tensor:
    """See :func:`torch_deepinfer.ops.draw`."""
    shape = logits.shape[:-1]
    seeds = torch.randint(2**63 - 1, shape)
    t, k, p = (torch.full(shape, given) for given in (temperature, top_k, top_p))
    ids = sample(logits, seeds, temperature=t, top_k=k, top_p=p, keep_ties=True)[0]
    return ids.unsqueeze(-1) if keepdim else ids


def spec_verify(
    target_logits: torch.Tensor,
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    seeds: torch.Tensor,
    offsets: torch.Tensor | None = None,
    *,
    num_drafted: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`torch_deepinfer.ops.spec_verify`."""
    batch, positions, size = target_logits.shape
    filters = _parameters((batch, positions), temperature, top_k, top_p, min_p)
    ids = torch.full((batch, positions), -1)
    accepted = torch.zeros(batch, dtype=torch.int32)
    for row in range(batch):
        count = positions - 1 if num_drafted is None else min(max(int(num_drafted[row]), 0), positions - 1)
        for position in range(count + 1):
            weight = weights(target_logits[row, position], *(f[row, position].item() for f in filters))
            total = int(weight.sum())
            offset = 0 if offsets is None else int(offsets[row])
            choice, acceptance = philox(int(seeds[row]), offset, 1 + position)
            accepted[row] = position
            if position == count:
                ids[row, position] = pick(weight, choice)
                break
            draft = int(draft_ids[row, position])
            if draft_probs is None:
                probs = torch.zeros(size, dtype=torch.float64)
                probs[draft : draft + 1] = 1
            else:
                probs = draft_probs[row, position].double()
            given = (probs.nan_to_num(0).clamp(0, 1) * total).long()
            only = total == 1
            ids[row, position] = draft
            if 0 <= draft < size and not probs[draft].isnan():
                if only and weight[draft] == 1:
                    continue
                if not only and acceptance * int(given[draft]) >> 64 < weight[draft]:
                    continue
            residual = (weight - given).clamp(min=0)
            enough = int(residual.sum()) > 1e-8 * total and not only
            ids[row, position] = pick(residual if enough else weight, choice)
            break
    return ids, accepted
