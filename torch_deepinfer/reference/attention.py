"""Reference of attention."""

import torch


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
) -> torch.Tensor:
    """See :func:`torch_deepinfer.ops.attention`."""
    if query_rope is not None and key_rope is not None:
        query = torch.cat([query, query_rope], -1)
        key = torch.cat([key, key_rope.expand(-1, key.shape[1], -1, -1)], -1)
    group = query.shape[1] // key.shape[1]
    keys, values = (shared.float().repeat_interleave(group, dim=1) for shared in (key, value))
    scores = query.float() @ keys.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        hidden = ~mask if mask.dtype == torch.bool else mask == -torch.inf
        added = torch.zeros((), device=query.device) if mask.dtype == torch.bool else mask.float()
        scores = torch.where(hidden, -torch.inf, scores + added)
    seen = scores != -torch.inf
    weights = torch.where(seen, scores.softmax(-1), 0.0)
    values = torch.where(seen.any(dim=-2)[..., None], values, 0.0)
    return (weights @ values).to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2)
