"""Dynamic quantisation to float8_e4m3fn and int8 with one scale per token group or per block, and its inverse.

The formats are those of DeepSeek-V3 (2024, arXiv 2412.19437, section 3.3): 1x128 groups of activations, 128x128 blocks
of weights.
"""

import torch

from torch_deepinfer.ops.checks import check, check_float_dtype, name_of


def quantize_per_token_group(
    x: torch.Tensor,
    group_size: int = 128,
    *,
    dtype: torch.dtype | None = None,
    round_scale: bool = False,
    scale_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises groups of ``group_size`` neighbours of the last dimension, each with its own scale.

    Args:
        x: ``[..., H]``, float32, bfloat16 or float16, any strides.
        group_size: elements of a group; the last group of a row may be shorter. -1 is the whole row.
        dtype: of the codes, float8_e4m3fn (the default, largest value 448) or int8 (127).
        round_scale: rounds the scales up to powers of two.
        scale_dtype: float32 (the default) or float8_e8m0fnu, which implies ``round_scale``.

    Returns:
        ``(codes, scales)``, contiguous: codes of the shape of ``x``, scales ``[..., ceil(H / group_size)]``.
        ``codes * scales`` approximates ``x``.

    With ``amax`` the largest magnitude of a group, at least 1e-4 (float8) or 1e-10 (int8), and ``max`` the largest
    code: the scale is ``amax / max`` and the codes are ``x * (max / amax)`` rounded to nearest even; all in float32. A
    rounded scale is the least power of two that is not below ``amax / max``, and the codes are ``x / scale``. A group
    with a NaN or an infinity has a NaN scale and NaN codes (int8: codes 0).

    Raises:
        ValueError: a wrong dtype, or a group size that is neither positive nor -1.
    """
    return torch.ops.deepinfer.quantize_per_token_group.default(
        x, group_size, dtype=dtype, round_scale=round_scale, scale_dtype=scale_dtype
    )


def quantize_per_block(
    x: torch.Tensor,
    block_size: list[int] | tuple[int, int] = (128, 128),
    *,
    dtype: torch.dtype | None = None,
    round_scale: bool = False,
    scale_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises rectangular blocks of the last two dimensions, each with its own scale.

    Args:
        x: ``[..., N, K]``, float32, bfloat16 or float16, any strides.
        block_size: rows and columns of a block; blocks at the edges may be smaller. -1 is the whole dimension.
        dtype, round_scale, scale_dtype: as in :func:`quantize_per_token_group`, whose arithmetic this shares.

    Returns:
        ``(codes, scales)``, contiguous: codes of the shape of ``x``, scales
        ``[..., ceil(N / block_size[0]), ceil(K / block_size[1])]``.

    Raises:
        ValueError: a wrong dtype, fewer than two dimensions, or a block size that is not two numbers, each positive
            or -1.
    """
    return torch.ops.deepinfer.quantize_per_block.default(
        x, block_size, dtype=dtype, round_scale=round_scale, scale_dtype=scale_dtype
    )


def dequantize(
    q: torch.Tensor,
    scales: torch.Tensor,
    block_size: list[int] | tuple[int, int],
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``q * scales`` in float32, rounded to ``dtype``, with one scale per block.

    Args:
        q: ``[..., N, K]`` codes, float8_e4m3fn or int8, any strides. ``[K]`` counts as one row.
        scales: ``[..., ceil(N / block_size[0]), ceil(K / block_size[1])]`` (``[ceil(K / block_size[1])]``), float32 or
            float8_e8m0fnu.
        block_size: rows and columns of a block; -1 is the whole dimension. ``[1, 128]`` for groups of 128 and
            ``[1, -1]`` for whole rows of :func:`quantize_per_token_group`.
        dtype: of the result: bfloat16 (the default), float16 or float32.

    Returns:
        Contiguous, the shape of ``q``.

    Raises:
        ValueError: a wrong dtype, device or block size, or scales of another shape.
    """
    return torch.ops.deepinfer.dequantize.default(q, scales, block_size, dtype)


def _check_dtype(op: str, argument: str, dtype: torch.dtype, allowed: tuple[torch.dtype, torch.dtype]) -> None:
    names = " or ".join(name_of(d) for d in allowed)
    check(dtype in allowed, f"{op}: {argument} must be {names}, got {name_of(dtype)}")


def _check_code_dtype(op: str, argument: str, dtype: torch.dtype) -> None:
    _check_dtype(op, argument, dtype, (torch.float8_e4m3fn, torch.int8))


def _check_scale_dtype(op: str, argument: str, dtype: torch.dtype) -> None:
    _check_dtype(op, argument, dtype, (torch.float32, torch.float8_e8m0fnu))


def _check_block_size(op: str, block_size: list[int]) -> None:
    check(
        len(block_size) == 2 and all(n > 0 or n == -1 for n in block_size),
        f"{op}: block_size must be two numbers, positive or -1 for the whole dimension, got {list(block_size)}",
    )


def _scale_shape(x: torch.Tensor, block_size: list[int]) -> list[int]:
    shape = list(x.shape)
    for d in range(-min(2, x.dim()), 0):
        # A whole dimension is one block, or none if it is empty.
        shape[d] = (shape[d] + block_size[d] - 1) // block_size[d] if block_size[d] > 0 else min(shape[d], 1)
    return shape


def _quantized(op, x, block_size, dtype, scale_dtype):
    check_float_dtype(op, "x", x.dtype)
    dtype, scale_dtype = dtype or torch.float8_e4m3fn, scale_dtype or torch.float32
    _check_code_dtype(op, "dtype", dtype)
    _check_scale_dtype(op, "scale_dtype", scale_dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(_scale_shape(x, block_size), dtype=scale_dtype)


@torch.library.register_fake("deepinfer::quantize_per_token_group")
def _quantize_per_token_group_meta(x, group_size=128, *, dtype=None, round_scale=False, scale_dtype=None):
    op = "quantize_per_token_group"
    check(x.dim() >= 1, f"{op}: x must have at least one dimension")
    check(
        group_size > 0 or group_size == -1,
        f"{op}: group_size must be positive, or -1 for the whole row, got {group_size}",
    )
    return _quantized(op, x, [1, group_size], dtype, scale_dtype)


@torch.library.register_fake("deepinfer::quantize_per_block")
def _quantize_per_block_meta(x, block_size=(128, 128), *, dtype=None, round_scale=False, scale_dtype=None):
    op = "quantize_per_block"
    check(x.dim() >= 2, f"{op}: x must have at least two dimensions")
    _check_block_size(op, block_size)
    return _quantized(op, x, block_size, dtype, scale_dtype)


@torch.library.register_fake("deepinfer::dequantize")
def _dequantize_meta(q, scales, block_size, dtype=None):
    op = "dequantize"
    check(q.dim() >= 1, f"{op}: q must have at least one dimension")
    _check_code_dtype(op, "q", q.dtype)
    _check_scale_dtype(op, "scales", scales.dtype)
    _check_block_size(op, block_size)
    check(scales.device == q.device, f"{op}: scales must be on the same device as the first argument")
    expected = _scale_shape(q, block_size)
    check(list(scales.shape) == expected, f"{op}: scales must have shape {expected}, got {list(scales.shape)}")
    dtype = dtype or torch.bfloat16
    check_float_dtype(op, "dtype", dtype)
    return q.new_empty(q.shape, dtype=dtype)
