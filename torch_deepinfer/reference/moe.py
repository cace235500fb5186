"""Reference of the moe family."""

import torch
import torch.nn.functional as F

from torch_deepinfer.reference.quant import laid_out


def _score(name: str, logits: torch.Tensor) -> torch.Tensor:
    if name == "softmax":
        return logits.softmax(-1)
    if name == "sigmoid":
        return logits.sigmoid()
    return F.softplus(logits).sqrt()


def _top(keys: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k greatest: NaN first, the lower index first among equals."""
    return keys.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def moe_router(
    logits: torch.Tensor,
    topk: int,
    *,
    bias: torch.Tensor | None = None,
    score: str = "softmax",
    score_after_topk: bool = False,
    num_groups: int = 1,
    topk_groups: int = 1,
    group_score: str = "top2_sum",
    renormalize: bool = False,
    renorm_eps: float = 0.0,
    renorm_min: float = 0.0,
    scale: float = 1.0,
    weights_dtype: torch.dtype | None = None,
    ids_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`torch_deepinfer.ops.moe_router`."""
    logits = logits.float()
    scores = logits if score_after_topk else _score(score, logits)
    keys = scores if bias is None else scores + bias.float()
    if topk_groups < num_groups:
        groups = keys.unflatten(-1, (num_groups, -1))
        best = groups.gather(-1, _top(groups, 1 if group_score == "max" else 2)).sum(-1)
        kept = _top(best, topk_groups).sort().values
        size = groups.shape[-1]
        experts = (kept[..., None] * size + torch.arange(size, device=keys.device)).flatten(1)
        ids = experts.gather(-1, _top(keys.gather(-1, experts), topk))
    else:
        ids = _top(keys, topk)
    weights = scores.gather(-1, ids)
    if score_after_topk:
        weights = _score(score, weights)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + renorm_eps).clamp(min=renorm_min)
    return (weights * scale).to(weights_dtype or torch.float32), ids.to(ids_dtype or torch.int64)


def moe_expert_map(
    topk_ids: torch.Tensor,
    num_experts: int,
    *,
    alignment: int = 1,
    first_expert: int = 0,
    num_local_experts: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See :func:`torch_deepinfer.ops.moe_expert_map`."""
    if ((topk_ids < -1) | (topk_ids >= num_experts)).any():
        raise ValueError(f"moe_expert_map: topk_ids must lie in [-1, {num_experts})")
    experts = num_experts - first_expert if num_local_experts is None else num_local_experts
    slots = topk_ids.numel()
    local = topk_ids.flatten().long() - first_expert
    local = torch.where((local >= 0) & (local < experts), local, experts)  # dropped slots sort last
    order = local.sort(stable=True).indices
    counts = torch.bincount(local, minlength=experts + 1)
    aligned = -(-counts[:experts] // alignment) * alignment
    offsets = F.pad(aligned.cumsum(0), (1, 0))
    first_of_expert = counts.cumsum(0) - counts
    used = slots - int(counts[experts])
    sorted_experts = local[order[:used]]
    rank = torch.arange(used, device=local.device) - first_of_expert[sorted_experts]
    rows = offsets[sorted_experts] + rank
    most_rows = (slots + experts * (alignment - 1)) // alignment * alignment
    rows_to_slots = local.new_full((most_rows,), -1)
    rows_to_slots[rows] = order[:used]
    slots_to_rows = local.new_full((slots,), -1)
    slots_to_rows[order[:used]] = rows
    return (
        rows_to_slots.int(),
        slots_to_rows.view(topk_ids.shape).int(),
        offsets.int(),
        counts[:experts].int(),
    )


def moe_permute(
    x: torch.Tensor, rows_to_slots: torch.Tensor, topk: int, slots_to_rows: torch.Tensor | None = None
) -> torch.Tensor:
    """See :func:`torch_deepinfer.ops.moe_permute`."""
    padded = torch.cat([x, x.new_zeros(1, x.shape[1])])
    return padded[torch.where(rows_to_slots < 0, x.shape[0], rows_to_slots // topk)]


def moe_unpermute(
    y: torch.Tensor, slots_to_rows: torch.Tensor, topk_weights: torch.Tensor | None = None
) -> torch.Tensor:
    """See :func:`torch_deepinfer.ops.moe_unpermute`."""
    total = y.new_zeros(slots_to_rows.shape[0], y.shape[1], dtype=torch.promote_types(y.dtype, torch.float32))
    for j in range(slots_to_rows.shape[1]):
        rows = slots_to_rows[:, j]
        term = y[rows.clamp(min=0)].to(total.dtype) if y.shape[0] else torch.zeros_like(total)
        if topk_weights is not None:
            term = topk_weights[:, j, None].to(total.dtype) * term
        total = torch.where(rows[:, None] < 0, total, total + term)
    return total.to(y.dtype)


def moe_permute_scaled(
    x: torch.Tensor,
    scales: torch.Tensor,
    rows_to_slots: torch.Tensor,
    topk: int,
    slots_to_rows: torch.Tensor | None = None,
    *,
    scale_layout: str = "row",
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`torch_deepinfer.ops.moe_permute_scaled`."""
    words = scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales
    words = moe_permute(words, rows_to_slots, topk).view(scales.dtype)
    codes = moe_permute(x.view(torch.uint8) if x.itemsize == 1 else x, rows_to_slots, topk)
    return codes.view(x.dtype), laid_out(words, scale_layout)


def moe_unpermute_scaled(
    y: torch.Tensor,
    row_scales: torch.Tensor,
    slots_to_rows: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See :func:`torch_deepinfer.ops.moe_unpermute_scaled`."""
    scales = F.pad(row_scales.flatten(), (0, 1))[slots_to_rows.long()]  # -1: the padding
    factors = scales if topk_weights is None else topk_weights.float() * scales
    return moe_unpermute(y.float(), slots_to_rows, factors).to(dtype or torch.bfloat16)
