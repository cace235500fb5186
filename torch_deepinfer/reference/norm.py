"""Reference of the norm family."""

import torch


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
