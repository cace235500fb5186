"""Gated activations, act(gate) * up: SwiGLU and GEGLU (Shazeer, 2020, arXiv 2002.05202)."""

import math

import torch

from torch_deepinfer.ops.checks import check, check_float_dtype, name_of, shape_of


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


def _output(op: str, gate: torch.Tensor, up: torch.Tensor | None, row_weights: torch.Tensor | None) -> torch.Tensor:
    check(gate.dim() >= 1, f"{op}: gate must have at least one dimension")
    check_float_dtype(op, "gate", gate.dtype)
    leading, columns = gate.shape[:-1], gate.shape[-1]
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
    if row_weights is not None:
        rows = math.prod(leading)
        check(
            row_weights.shape in (leading, (rows,)),
            f"{op}: row_weights must have the leading shape of gate or shape [{rows}], got {shape_of(row_weights)}",
        )
        check(row_weights.device == gate.device, f"{op}: row_weights must be on the same device as the first argument")
        check_float_dtype(op, "row_weights", row_weights.dtype)
    return gate.new_empty((*leading, columns))


@torch.library.register_fake("deepinfer::silu_and_mul")
def _silu_and_mul_meta(gate, up=None, *, limit=None, alpha=1.0, up_offset=0.0, row_weights=None):
    op = "silu_and_mul"
    check(limit is None or limit >= 0, f"{op}: limit must not be negative, got {limit}")
    return _output(op, gate, up, row_weights)


@torch.library.register_fake("deepinfer::gelu_and_mul")
def _gelu_and_mul_meta(gate, up=None, *, approximate="none", row_weights=None):
    op = "gelu_and_mul"
    check(approximate in ("none", "tanh"), f"{op}: approximate must be none or tanh, got {approximate}")
    return _output(op, gate, up, row_weights)
