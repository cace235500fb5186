"""RMSNorm: y = x / sqrt(mean(x^2) + eps), scaled by a weight (Zhang and Sennrich, 2019, arXiv 1910.07467)."""

import torch

from torch_deepinfer.ops.checks import check, check_float_dtype, name_of, shape_of
from torch_deepinfer.ops.quant import quantized_rows

WEIGHT_FORMS = ("cast_mul", "mul_cast", "one_plus", "none")


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, weight_form: str = "cast_mul") -> torch.Tensor:
    """RMS norm over the last dimension.

    Args:
        x: ``[..., hidden_size]``, float32, bfloat16 or float16, any strides.
        weight: ``[hidden_size]`` of any of these dtypes; None for ``weight_form="none"``.
        eps: added to the mean of squares, not negative.
        weight_form: how the source model applies the weight. The statistics are float32 in all of them.

            - ``"cast_mul"``: ``weight * xhat.to(x.dtype)`` (Llama, Qwen, DeepSeek); the result has the promoted dtype
            - ``"mul_cast"``: ``(weight * xhat).to(x.dtype)`` (GPT-OSS, OLMo 2)
            - ``"one_plus"``: ``(xhat * (1 + weight)).to(x.dtype)`` (Gemma)
            - ``"none"``: ``xhat.to(x.dtype)``

    Returns:
        Contiguous, the shape of ``x``.

    A row whose squares overflow float32 gives zeros, and a zero row with ``eps=0`` gives NaN, as the formula does.

    Raises:
        ValueError: a wrong shape, dtype, device, eps or weight form.
    """
    return torch.ops.deepinfer.rms_norm.default(x, weight, eps, weight_form)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_form: str = "cast_mul",
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of ``x + residual``, and the sum itself as the next residual.

    The sum is rounded to the dtype of ``x`` before the norm reads it, as the unfused code does. ``residual`` has the
    shape and dtype of ``x``; the other arguments are those of :func:`rms_norm`.

    Returns:
        ``(normed, x + residual)``, both contiguous.

    Raises:
        ValueError: as :func:`rms_norm`; also a residual of another shape (no broadcasting), dtype or device.
    """
    return torch.ops.deepinfer.add_rms_norm.default(x, residual, weight, eps, weight_form)


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
    """:func:`rms_norm`, quantised with one scale for each group of ``group_size`` neighbours.

    Args:
        x, weight, eps, weight_form: as in :func:`rms_norm`.
        group_size, dtype, round_scale, scale_dtype, scale_layout: as in :func:`quantize_per_token_group`.

    Returns:
        ``(codes, scales)``, bit for bit those of :func:`quantize_per_token_group` of the norm.

    Raises:
        ValueError: as these two.
    """
    return torch.ops.deepinfer.rms_norm_quant.default(
        x,
        weight,
        eps,
        weight_form,
        group_size=group_size,
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
    """:func:`add_rms_norm` with its norm quantised as in :func:`rms_norm_quant`.

    Returns:
        ``(codes, scales, x + residual)``; the sum is contiguous and rounded to the dtype of ``x``.

    Raises:
        ValueError: as :func:`add_rms_norm` and :func:`quantize_per_token_group`.
    """
    return torch.ops.deepinfer.add_rms_norm_quant.default(
        x,
        residual,
        weight,
        eps,
        weight_form,
        group_size=group_size,
        dtype=dtype,
        round_scale=round_scale,
        scale_dtype=scale_dtype,
        scale_layout=scale_layout,
    )


def check_weight_form(op: str, weight_form: str) -> None:
    """Raises ValueError unless ``weight_form`` is one of those of :func:`rms_norm`."""
    check(
        weight_form in WEIGHT_FORMS,
        f"{op}: weight_form must be cast_mul, mul_cast, one_plus or none, got {weight_form}",
    )


def check_norm(
    op: str, x: torch.Tensor, name: str, weight: torch.Tensor | None, eps: float, weight_form: str
) -> torch.dtype:
    """Raises ValueError unless the weight and eps fit the rows of ``x``. Returns the dtype of the norm."""
    check(eps >= 0, f"{op}: eps must not be negative, got {eps}")
    if weight_form == "none":
        check(weight is None, f"{op}: {name} must be None with weight_form none")
        return x.dtype
    if weight is None:
        raise ValueError(f"{op}: {name} is required with weight_form {weight_form}")
    check(
        weight.dim() == 1 and weight.shape[0] == x.shape[-1],
        f"{op}: {name} must have shape [{x.shape[-1]}], got {shape_of(weight)}",
    )
    check(weight.device == x.device, f"{op}: {name} must be on the same device as the first argument")
    check_float_dtype(op, name, weight.dtype)
    return torch.promote_types(x.dtype, weight.dtype) if weight_form == "cast_mul" else x.dtype


def _check(op: str, x: torch.Tensor, weight: torch.Tensor | None, eps: float, weight_form: str) -> torch.dtype:
    check(x.dim() >= 1, f"{op}: x must have at least one dimension")
    check_float_dtype(op, "x", x.dtype)
    check_weight_form(op, weight_form)
    check(x.shape[-1] > 0, f"{op}: the last dimension of x must not be empty")
    return check_norm(op, x, "weight", weight, eps, weight_form)


def _check_residual(op: str, x: torch.Tensor, residual: torch.Tensor) -> None:
    check(
        x.shape == residual.shape,
        f"{op}: residual must have the shape of x, {shape_of(x)}, got {shape_of(residual)}",
    )
    check(
        residual.dtype == x.dtype,
        f"{op}: residual must have the dtype of x, {name_of(x.dtype)}, got {name_of(residual.dtype)}",
    )
    check(residual.device == x.device, f"{op}: residual must be on the same device as the first argument")


@torch.library.register_fake("deepinfer::rms_norm")
def _rms_norm_meta(x, weight, eps, weight_form="cast_mul"):
    return x.new_empty(x.shape, dtype=_check("rms_norm", x, weight, eps, weight_form))


@torch.library.register_fake("deepinfer::add_rms_norm")
def _add_rms_norm_meta(x, residual, weight, eps, weight_form="cast_mul"):
    op = "add_rms_norm"
    _check_residual(op, x, residual)
    return x.new_empty(x.shape, dtype=_check(op, x, weight, eps, weight_form)), x.new_empty(x.shape)


@torch.library.register_fake("deepinfer::rms_norm_quant")
def _rms_norm_quant_meta(
    x,
    weight,
    eps,
    weight_form="cast_mul",
    *,
    group_size=128,
    dtype=None,
    round_scale=False,
    scale_dtype=None,
    scale_layout="row",
):
    op = "rms_norm_quant"
    _check(op, x, weight, eps, weight_form)
    return quantized_rows(op, x, x.shape, group_size, dtype, scale_dtype, scale_layout)


@torch.library.register_fake("deepinfer::add_rms_norm_quant")
def _add_rms_norm_quant_meta(
    x,
    residual,
    weight,
    eps,
    weight_form="cast_mul",
    *,
    group_size=128,
    dtype=None,
    round_scale=False,
    scale_dtype=None,
    scale_layout="row",
):
    op = "add_rms_norm_quant"
    _check_residual(op, x, residual)
    _check(op, x, weight, eps, weight_form)
    return *quantized_rows(op, x, x.shape, group_size, dtype, scale_dtype, scale_layout), x.new_empty(x.shape)
