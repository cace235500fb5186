"""Reference of the norm family."""

import torch

from torch_deepinfer.reference.quant import quantize_per_token_group


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, weight_form: str = "cast_mul") -> torch.Tensor:
    """See :func:`torch_deepinfer.ops.rms_norm`."""
    hidden = x.float()
    normed = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)
    if weight_form == "none":
        return normed.to(x.dtype)
    assert weight is not None
    if weight_form == "cast_mul":
        return weight * normed.to(x.dtype)
    factor = weight.float() if weight_form == "mul_cast" else 1.0 + weight.float()
    return (normed * factor).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_form: str = "cast_mul",
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`torch_deepinfer.ops.add_rms_norm`."""
    total = x + residual
    return rms_norm(total, weight, eps, weight_form), total


def rms_norm_quant(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_form: str = "cast_mul",
    *,
    group_size: int = 128,
    dtype: torch.dtype | None = None,
    round_scale: bool = False,
    scale_dtype: torch.dtype | None = None,
    scale_layout: str = "row",
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`torch_deepinfer.ops.rms_norm_quant`."""
    return quantize_per_token_group(
        rms_norm(x, weight, eps, weight_form),
        group_size,
        dtype=dtype,
        round_scale=round_scale,
        scale_dtype=scale_dtype,
        scale_layout=scale_layout,
    )


def add_rms_norm_quant(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_form: str = "cast_mul",
    *,
    group_size: int = 128,
    dtype: torch.dtype | None = None,
    round_scale: bool = False,
    scale_dtype: torch.dtype | None = None,
    scale_layout: str = "row",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See :func:`torch_deepinfer.ops.add_rms_norm_quant`."""
    total = x + residual
    codes, scales = rms_norm_quant(
        total,
        weight,
        eps,
        weight_form,
        group_size=group_size,
        dtype=dtype,
        round_scale=round_scale,
        scale_dtype=scale_dtype,
        scale_layout=scale_layout,
    )
    return codes, scales, total
