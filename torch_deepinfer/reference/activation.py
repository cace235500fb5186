"""Reference of the activation family."""

import torch
import torch.nn.functional as F

from torch_deepinfer.reference.quant import quantize_per_token_group


def silu_and_mul(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    row_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """See :func:`torch_deepinfer.ops.silu_and_mul`."""
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if alpha == 1 and up_offset == 0:
        return _weighted(F.silu(gate) * up, row_weights)
    dtype = gate.dtype
    gating = torch.sigmoid((alpha * gate.float()).to(dtype))
    return _weighted((up.float() + up_offset).to(dtype) * (gate * gating), row_weights)


def silu_and_mul_quant(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    row_weights: torch.Tensor | None = None,
    rows_to_slots: torch.Tensor | None = None,
    group_size: int = 128,
    dtype: torch.dtype | None = None,
    round_scale: bool = False,
    scale_dtype: torch.dtype | None = None,
    scale_layout: str = "row",
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`torch_deepinfer.ops.silu_and_mul_quant`."""
    if rows_to_slots is not None and row_weights is not None:
        row_weights = F.pad(row_weights.flatten(), (0, 1))[rows_to_slots.long()]  # -1: the padding
    product = silu_and_mul(gate, up, limit=limit, alpha=alpha, up_offset=up_offset, row_weights=row_weights)
    if rows_to_slots is not None:
        product = torch.where((rows_to_slots < 0).view(product.shape[:-1]).unsqueeze(-1), 0, product)
    return quantize_per_token_group(
        product, group_size, dtype=dtype, round_scale=round_scale, scale_dtype=scale_dtype, scale_layout=scale_layout
    )


def gelu_and_mul(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    approximate: str = "none",
    row_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """See :func:`torch_deepinfer.ops.gelu_and_mul`."""
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return _weighted(F.gelu(gate, approximate=approximate) * up, row_weights)


def _weighted(product: torch.Tensor, row_weights: torch.Tensor | None) -> torch.Tensor:
    if row_weights is None:
        return product
    weights = row_weights.reshape(product.shape[:-1]).unsqueeze(-1).float()
    return (product.float() * weights).to(product.dtype)
