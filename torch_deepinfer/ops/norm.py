"""RMSNorm: y = x / sqrt(mean(x^2) + eps), scaled by a weight (Zhang and Sennrich, 2019, arXiv 1910.07467)."""

import torch

from torch_deepinfer.ops.checks import check, check_float_dtype, shape_of

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


def _output(op: str, x: torch.Tensor, weight: torch.Tensor | None, eps: float, weight_form: str) -> torch.Tensor:
    check(x.dim() >= 1, f"{op}: x must have at least one dimension")
    check_float_dtype(op, "x", x.dtype)
    check(
        weight_form in WEIGHT_FORMS,
        f"{op}: weight_form must be cast_mul, mul_cast, one_plus or none, got {weight_form}",
    )
    hidden_size = x.shape[-1]
    check(hidden_size > 0, f"{op}: the last dimension of x must not be empty")
    check(eps >= 0, f"{op}: eps must not be negative, got {eps}")
    dtype = x.dtype
    if weight_form == "none":
        check(weight is None, f"{op}: weight must be None with weight_form none")
    else:
        if weight is None:
            raise ValueError(f"{op}: weight is required with weight_form {weight_form}")
        check(
            weight.dim() == 1 and weight.shape[0] == hidden_size,
            f"{op}: weight must have shape [{hidden_size}], got {shape_of(weight)}",
        )
        check(weight.device == x.device, f"{op}: weight must be on the same device as the first argument")
        check_float_dtype(op, "weight", weight.dtype)
        if weight_form == "cast_mul":
            dtype = torch.promote_types(x.dtype, weight.dtype)
    return x.new_empty(x.shape, dtype=dtype)


@torch.library.register_fake("deepinfer::rms_norm")
def _rms_norm_meta(x, weight, eps, weight_form="cast_mul"):
    return _output("rms_norm", x, weight, eps, weight_form)


@torch.library.register_fake("deepinfer::add_rms_norm")
def _add_rms_norm_meta(x, residual, weight, eps, weight_form="cast_mul"):
    op = "add_rms_norm"
    check(
        x.shape == residual.shape,
        f"{op}: residual must have the shape of x, {shape_of(x)}, got {shape_of(residual)}",
    )
    check(residual.dtype == x.dtype, f"{op}: residual must have the dtype of x, {x.dtype}, got {residual.dtype}")
    check(residual.device == x.device, f"{op}: residual must be on the same device as the first argument")
    return _output(op, x, weight, eps, weight_form), x.new_empty(x.shape)
