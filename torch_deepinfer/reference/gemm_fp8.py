"""Reference of the matrix products of float8 operands."""

import torch

from torch_deepinfer.reference.activation import silu_and_mul
from torch_deepinfer.reference.quant import quantize_per_token_group


def _dequantized(codes: torch.Tensor, row_scale: torch.Tensor, rows: int) -> torch.Tensor:
    """``[R, K]`` codes with ``[R, R / rows or 1, K / 128 or 1]`` scales, in float32."""
    scale = row_scale.float()
    if scale.shape[0] > 1:
        scale = scale.repeat_interleave(rows, 0)[: codes.shape[0]]
    if scale.shape[1] > 1:
        scale = scale.repeat_interleave(128, 1)[:, : codes.shape[1]]
    return codes.float() * scale


def _rows_of_scale(scale: torch.Tensor, columns: int) -> int:
    return 1 if scale.shape[0] == columns else 128


def fp8_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See :func:`torch_deepinfer.ops.fp8_gemm`."""
    scale = b_scale.t()
    weight = _dequantized(b.t(), scale, _rows_of_scale(scale, b.shape[1]))
    return (_dequantized(a, a_scale, 1) @ weight.t()).to(out_dtype or torch.bfloat16)


def fp8_grouped_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See :func:`torch_deepinfer.ops.fp8_grouped_mm`."""
    out = x.new_zeros(x.shape[0], weight.shape[2], dtype=out_dtype or torch.bfloat16)
    begin = 0
    for expert, end in enumerate(offsets.tolist()):
        scale = weight_scale[expert if weight_scale.shape[0] > 1 else 0]
        out[begin:end] = fp8_gemm(x[begin:end], weight[expert], x_scale[begin:end], scale, out_dtype=out.dtype)
        begin = end
    return out


def fp8_masked_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    counts: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See :func:`torch_deepinfer.ops.fp8_masked_mm`."""
    out = x.new_zeros(*x.shape[:2], weight.shape[2], dtype=out_dtype or torch.bfloat16)
    for expert, count in enumerate(counts.tolist()):
        scale = weight_scale[expert if weight_scale.shape[0] > 1 else 0]
        out[expert, :count] = fp8_gemm(
            x[expert, :count], weight[expert], x_scale[expert, :count], scale, out_dtype=out.dtype
        )
    return out


def fp8_masked_mm_(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    counts: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
) -> None:
    """See :func:`torch_deepinfer.ops.fp8_masked_mm_`."""
    result = fp8_masked_mm(x, weight, counts, x_scale, weight_scale, out_dtype=out.dtype)
    for expert, count in enumerate(counts.tolist()):
        out[expert, :count] = result[expert, :count]


def fp8_fused_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down_scale: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    round_scale: bool = False,
    first_expert: int = 0,
) -> torch.Tensor:
    """See :func:`torch_deepinfer.ops.fp8_fused_experts`."""

    def product(rows: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
        codes, scale = quantize_per_token_group(rows, 128, round_scale=round_scale)
        return fp8_gemm(codes, weight.t(), scale, weight_scale.t(), out_dtype=x.dtype)

    total = x.new_zeros(x.shape, dtype=torch.float32)
    for j in range(topk_ids.shape[1]):
        for expert in range(gate_up.shape[0]):
            tokens = (topk_ids[:, j] == first_expert + expert).nonzero()[:, 0]
            hidden = product(x[tokens], gate_up[expert], gate_up_scale[expert])
            activated = silu_and_mul(hidden, limit=limit, alpha=alpha, up_offset=up_offset)
            y = product(activated, down[expert], down_scale[expert])
            total[tokens] += topk_weights[tokens, j, None].float() * y.float()
    return total.to(x.dtype)
