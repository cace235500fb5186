"""Gated activations, act(gate) * up: SwiGLU and GEGLU (Shazeer, 2020, arXiv 2002.05202)."""

import math

import torch

from torch_deepinfer.ops.checks import check, check_float_dtype, name_of, shape_of
from torch_deepinfer.ops.quant import quantized_rows


def silu_and_mul(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    row_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """``gate * sigmoid(alpha * gate) * (up + up_offset)``, after an optional clamp.

    Args:
        gate: ``[..., I]``, float32, bfloat16 or float16, any strides; or ``[..., 2I]``, gate and up in halves, if
            ``up`` is None. ``x[..., ::2]`` and ``x[..., 1::2]`` of one tensor are read in place, as the halves are.
        up: the shape and dtype of ``gate``, or None.
        limit: clamps ``gate`` from above and ``up`` to ``[-limit, limit]`` before anything else.
        alpha, up_offset: 1.702 and 1.0 with ``limit=7.0`` for GPT-OSS.
        row_weights: one factor a row, of the leading shape of ``gate`` or flat; float32, bfloat16 or float16.

    Returns:
        Contiguous ``[..., I]`` of the dtype of ``gate``.

    The arithmetic is float32 and is rounded to the dtype of ``gate`` where the unfused code rounds: with ``alpha=1``
    and ``up_offset=0`` after ``silu(gate)`` and after the product; otherwise after each of ``alpha * gate``, the
    sigmoid, ``gate * sigmoid``, ``up + up_offset`` and the product. Row weights multiply the rounded product in
    float32.

    NaN is kept, also by the clamp, and ``gate=-inf`` gives NaN with ``alpha=1``, as the formula does.

    Raises:
        ValueError: a wrong shape, dtype or device, an odd last dimension without ``up``, a negative limit.
    """
    return torch.ops.deepinfer.silu_and_mul.default(
        gate, up, limit=limit, alpha=alpha, up_offset=up_offset, row_weights=row_weights
    )


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
    """:func:`silu_and_mul`, quantised in token groups: bit for bit what the two ops give one after the other.

    Args:
        gate, up, limit, alpha, up_offset: as in :func:`silu_and_mul`.
        row_weights: as there; with ``rows_to_slots`` one factor a slot instead, ``[tokens, topk]`` or flat.
        rows_to_slots: ``[P]`` int32 for ``P`` rows of ``gate``, as :func:`moe_expert_map` returns it. The weight of a
            row is that of its slot. A row of -1 counts as zeros, and nothing of it is read.
        group_size, dtype, round_scale, scale_dtype, scale_layout: as in :func:`quantize_per_token_group`.

    Returns:
        ``(codes, scales)`` of a ``[..., I]`` product, as :func:`quantize_per_token_group` returns them.

    Raises:
        ValueError: as the two ops; also a map of another shape, dtype or device, on CPU an entry out of range too.
    """
    return torch.ops.deepinfer.silu_and_mul_quant.default(
        gate,
        up,
        limit=limit,
        alpha=alpha,
        up_offset=up_offset,
        row_weights=row_weights,
        rows_to_slots=rows_to_slots,
        group_size=group_size,
        dtype=dtype,
        round_scale=round_scale,
        scale_dtype=scale_dtype,
        scale_layout=scale_layout,
    )


def gelu_and_mul(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    approximate: str = "none",
    row_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """``gelu(gate) * up`` (Hendrycks and Gimpel, 2016, arXiv 1606.08415).

    Args:
        gate, up, row_weights: as in :func:`silu_and_mul`.
        approximate: ``"none"`` for ``gate * Phi(gate)``, ``"tanh"`` for the approximation with tanh.

    Returns:
        Contiguous ``[..., I]`` of the dtype of ``gate``.

    The gelu and the product are each rounded to the dtype of ``gate``. The gelu keeps its relative accuracy for large
    negative inputs, where code that computes ``1 + erf(x)`` or ``1 + tanh(u)`` cancels.

    Raises:
        ValueError: as :func:`silu_and_mul`; also another ``approximate``.
    """
    return torch.ops.deepinfer.gelu_and_mul.default(gate, up, approximate=approximate, row_weights=row_weights)


def _shape(op: str, gate: torch.Tensor, up: torch.Tensor | None) -> list[int]:
    """Of the result."""
    check(gate.dim() >= 1, f"{op}: gate must have at least one dimension")
    check_float_dtype(op, "gate", gate.dtype)
    columns = gate.shape[-1]
    if up is not None:
        check(gate.shape == up.shape, f"{op}: up must have the shape of gate, {shape_of(gate)}, got {shape_of(up)}")
        check(
            up.dtype == gate.dtype,
            f"{op}: up must have the dtype of gate, {name_of(gate.dtype)}, got {name_of(up.dtype)}",
        )
        check(up.device == gate.device, f"{op}: up must be on the same device as the first argument")
    else:
        check(columns % 2 == 0, f"{op}: the last dimension of gate must be even without up, got {columns}")
        columns = columns // 2
    return [*gate.shape[:-1], columns]


def _check_floats(op: str, row_weights: torch.Tensor, gate: torch.Tensor) -> None:
    check(row_weights.device == gate.device, f"{op}: row_weights must be on the same device as the first argument")
    check_float_dtype(op, "row_weights", row_weights.dtype)


def _check_row_weights(op: str, row_weights: torch.Tensor | None, gate: torch.Tensor) -> None:
    if row_weights is None:
        return
    rows = math.prod(gate.shape[:-1])
    check(
        row_weights.shape in (gate.shape[:-1], (rows,)),
        f"{op}: row_weights must have the leading shape of gate or shape [{rows}], got {shape_of(row_weights)}",
    )
    _check_floats(op, row_weights, gate)


def _output(op: str, gate: torch.Tensor, up: torch.Tensor | None, row_weights: torch.Tensor | None) -> torch.Tensor:
    shape = _shape(op, gate, up)
    _check_row_weights(op, row_weights, gate)
    return gate.new_empty(shape)


def _check_limit(op: str, limit: float | None) -> None:
    if limit is not None and not limit >= 0:
        raise ValueError(f"{op}: limit must not be negative, got {limit:g}")


@torch.library.register_fake("deepinfer::silu_and_mul")
def _silu_and_mul_meta(gate, up=None, *, limit=None, alpha=1.0, up_offset=0.0, row_weights=None):
    op = "silu_and_mul"
    _check_limit(op, limit)
    return _output(op, gate, up, row_weights)


@torch.library.register_fake("deepinfer::silu_and_mul_quant")
def _silu_and_mul_quant_meta(
    gate,
    up=None,
    *,
    limit=None,
    alpha=1.0,
    up_offset=0.0,
    row_weights=None,
    rows_to_slots=None,
    group_size=128,
    dtype=None,
    round_scale=False,
    scale_dtype=None,
    scale_layout="row",
):
    op = "silu_and_mul_quant"
    _check_limit(op, limit)
    shape = _shape(op, gate, up)
    if rows_to_slots is None:
        _check_row_weights(op, row_weights, gate)
    else:
        if row_weights is not None:
            _check_floats(op, row_weights, gate)
        rows = math.prod(shape[:-1])
        check(
            rows_to_slots.dtype == torch.int32, f"{op}: rows_to_slots must be int32, got {name_of(rows_to_slots.dtype)}"
        )
        check(
            rows_to_slots.dim() == 1 and rows_to_slots.shape[0] == rows,
            f"{op}: rows_to_slots must have shape [{rows}], got {shape_of(rows_to_slots)}",
        )
        check(
            rows_to_slots.device == gate.device, f"{op}: rows_to_slots must be on the same device as the first argument"
        )
    return quantized_rows(op, gate, shape, group_size, dtype, scale_dtype, scale_layout)


@torch.library.register_fake("deepinfer::gelu_and_mul")
def _gelu_and_mul_meta(gate, up=None, *, approximate="none", row_weights=None):
    op = "gelu_and_mul"
    check(approximate in ("none", "tanh"), f"{op}: approximate must be none or tanh, got {approximate}")
    return _output(op, gate, up, row_weights)
