"""Dynamic quantisation with one scale per token group, token, block or channel, its inverse, and its two halves.

The formats are those of DeepSeek-V3 (2024, arXiv 2412.19437, section 3.3): 1x128 groups of activations, 128x128 blocks
of weights; and, for scales that are powers of two and for float4_e2m1fn_x2, of the OCP Microscaling Formats
specification (version 1.0, 2023).
"""

import torch

from torch_deepinfer.ops.checks import check, check_float_dtype, name_of

CODE_DTYPES = (torch.float8_e4m3fn, torch.int8, torch.float4_e2m1fn_x2)
SCALE_DTYPES = (torch.float32, torch.float8_e8m0fnu, torch.int32)
SCALE_LAYOUTS = ("row", "column")


def quantize_per_token_group(
    x: torch.Tensor,
    group_size: int = 128,
    *,
    dtype: torch.dtype | None = None,
    round_scale: bool = False,
    scale_dtype: torch.dtype | None = None,
    scale_layout: str = "row",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises groups of ``group_size`` neighbours of the last dimension, each with its own scale.

    Args:
        x: ``[..., H]``, float32, bfloat16 or float16, any strides.
        group_size: elements of a group; the last group of a row may be shorter. -1 is the whole row.
        dtype: of the codes: float8_e4m3fn (the default, largest value 448), int8 (127) or float4_e2m1fn_x2 (6), which
            holds two elements a byte, the first in the low four bits.
        round_scale: rounds the scales up to powers of two.
        scale_dtype: float32 (the default), float8_e8m0fnu, or int32 for the float8_e8m0fnu bytes of four neighbouring
            scales in one word, the first in the lowest byte. The latter two imply ``round_scale``.
        scale_layout: ``"row"`` for contiguous scales. ``"column"`` for scales of the same shape whose next-to-last
            dimension is dense and whose columns start at multiples of 16 bytes, as copy engines want it; what lies
            between two columns is undefined.

    Returns:
        ``(codes, scales)``: codes contiguous, of the shape of ``x`` (``[..., H / 2]`` for float4_e2m1fn_x2); scales
        ``[..., ceil(H / group_size)]``, a quarter of that rounded up for int32, whose bytes that are left over are 0.
        ``codes * scales`` approximates ``x``.

    With ``amax`` the largest magnitude of a group, at least 1e-4 (float8), 1e-10 (int8) or 6 * 2**-126 (float4), and
    ``max`` the largest code: the scale is ``amax / max`` and the codes are ``x * (max / amax)``, rounded to nearest
    even; all in float32. A rounded scale is the least power of two that is not below ``amax / max``, and the codes are
    ``x / scale``. A group with a NaN or an infinity has a NaN scale and NaN codes (int8 and float4: codes 0).

    Raises:
        ValueError: a wrong dtype or layout, a group size that is neither positive nor -1; for float4_e2m1fn_x2 an odd
            last dimension or group size.
    """
    return torch.ops.deepinfer.quantize_per_token_group.default(
        x, group_size, dtype=dtype, round_scale=round_scale, scale_dtype=scale_dtype, scale_layout=scale_layout
    )


def quantize_per_token(
    x: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    round_scale: bool = False,
    scale_dtype: torch.dtype | None = None,
    scale_layout: str = "row",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises whole rows, each with its own scale.

    Args:
        x: ``[..., H]``, float32, bfloat16 or float16, any strides.
        dtype, round_scale, scale_dtype, scale_layout: as in :func:`quantize_per_token_group`, whose arithmetic this
            shares.

    Returns:
        ``(codes, scales)``: codes as there, scales ``[..., 1]``.

    Raises:
        ValueError: as :func:`quantize_per_token_group`; also an empty last dimension.
    """
    return torch.ops.deepinfer.quantize_per_token.default(
        x, dtype=dtype, round_scale=round_scale, scale_dtype=scale_dtype, scale_layout=scale_layout
    )


def quantize_per_block(
    x: torch.Tensor,
    block_size: list[int] | tuple[int, int] = (128, 128),
    *,
    dtype: torch.dtype | None = None,
    round_scale: bool = False,
    scale_dtype: torch.dtype | None = None,
    scale_layout: str = "row",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises rectangular blocks of the last two dimensions, each with its own scale.

    Args:
        x: ``[..., N, K]``, float32, bfloat16 or float16, any strides.
        block_size: rows and columns of a block; blocks at the edges may be smaller. -1 is the whole dimension.
        dtype, round_scale, scale_dtype, scale_layout: as in :func:`quantize_per_token_group`, whose arithmetic this
            shares.

    Returns:
        ``(codes, scales)``: codes as there, scales ``[..., ceil(N / block_size[0]), ceil(K / block_size[1])]``, the
        last dimension a quarter of that rounded up for int32.

    Raises:
        ValueError: a wrong dtype or layout, fewer than two dimensions, a block size that is not two numbers, each
            positive or -1; for float4_e2m1fn_x2 an odd last dimension, or blocks of an odd number of columns above 1.
    """
    return torch.ops.deepinfer.quantize_per_block.default(
        x, block_size, dtype=dtype, round_scale=round_scale, scale_dtype=scale_dtype, scale_layout=scale_layout
    )


def quantize_per_channel(
    x: torch.Tensor,
    block_rows: int = 128,
    *,
    dtype: torch.dtype | None = None,
    round_scale: bool = False,
    scale_dtype: torch.dtype | None = None,
    scale_layout: str = "row",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises runs of ``block_rows`` elements of each column, each with its own scale.

    Args:
        x: ``[..., N, K]``, float32, bfloat16 or float16, any strides.
        block_rows: rows of a run; the last one may be shorter. -1 is the whole column.
        dtype, round_scale, scale_dtype, scale_layout: as in :func:`quantize_per_token_group`, whose arithmetic this
            shares.

    Returns:
        ``(codes, scales)``: those of :func:`quantize_per_block` with blocks of ``[block_rows, 1]``.

    Raises:
        ValueError: a wrong dtype or layout, fewer than two dimensions, ``block_rows`` neither positive nor -1; for
            float4_e2m1fn_x2 an odd last dimension.
    """
    return torch.ops.deepinfer.quantize_per_channel.default(
        x, block_rows, dtype=dtype, round_scale=round_scale, scale_dtype=scale_dtype, scale_layout=scale_layout
    )


def quantization_scales(
    x: torch.Tensor,
    block_size: list[int] | tuple[int, int],
    *,
    dtype: torch.dtype | None = None,
    round_scale: bool = False,
    scale_dtype: torch.dtype | None = None,
    scale_layout: str = "row",
) -> torch.Tensor:
    """The scales alone that quantisation in these blocks gives.

    Args:
        x: ``[..., N, K]``, float32, bfloat16 or float16, any strides. ``[K]`` counts as one row.
        block_size: as in :func:`quantize_per_block`; ``[1, n]`` for token groups.
        dtype: of the codes that the scales are meant for.
        round_scale, scale_dtype, scale_layout: as in :func:`quantize_per_token_group`.

    Returns:
        The scales of :func:`quantize_per_block`, bit for bit.

    Raises:
        ValueError: as :func:`quantize_per_block`.
    """
    return torch.ops.deepinfer.quantization_scales.default(
        x, block_size, dtype=dtype, round_scale=round_scale, scale_dtype=scale_dtype, scale_layout=scale_layout
    )


def quantize_with_scales(
    x: torch.Tensor,
    scales: torch.Tensor,
    block_size: list[int] | tuple[int, int],
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Codes by scales that are there: ``x * (1 / scale)`` in float32, rounded to nearest even.

    Args:
        x: ``[..., N, K]``, float32, bfloat16 or float16, any strides. ``[K]`` counts as one row.
        scales: one a block, as :func:`quantize_per_block` returns them in any of its dtypes and layouts; any strides.
        block_size: rows and columns of a block; -1 is the whole dimension.
        dtype: of the codes, as in :func:`quantize_per_token_group`.

    Returns:
        Codes, contiguous, of the shape of ``x`` (``[..., K / 2]`` for float4_e2m1fn_x2).

    Values beyond the largest code saturate, infinities too. NaN in ``x`` or in a scale gives NaN (int8 and float4: 0).
    With scales that are powers of two the codes are those of :func:`quantize_per_block`; other scales may differ from
    it in the last place, where the factor there is no reciprocal of the stored scale.

    Raises:
        ValueError: a wrong dtype, device or block size, or scales of another shape.
    """
    return torch.ops.deepinfer.quantize_with_scales.default(x, scales, block_size, dtype=dtype)


def dequantize(
    q: torch.Tensor,
    scales: torch.Tensor,
    block_size: list[int] | tuple[int, int],
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``q * scales`` in float32, rounded to ``dtype``, with one scale per block.

    Args:
        q: ``[..., N, K]`` codes, float8_e4m3fn or int8, any strides, or ``[..., N, K / 2]`` pairs of float4_e2m1fn_x2.
            ``[K]`` counts as one row.
        scales: ``[..., ceil(N / block_size[0]), ceil(K / block_size[1])]`` (``[ceil(K / block_size[1])]``), float32 or
            float8_e8m0fnu, or int32 with a quarter of the columns; any strides.
        block_size: rows and columns of a block of elements; -1 is the whole dimension. ``[1, 128]`` for groups of 128
            and ``[1, -1]`` for whole rows of :func:`quantize_per_token_group`.
        dtype: of the result: bfloat16 (the default), float16 or float32.

    Returns:
        Contiguous, ``[..., N, K]``.

    Raises:
        ValueError: a wrong dtype, device or block size, or scales of another shape.
    """
    return torch.ops.deepinfer.dequantize.default(q, scales, block_size, dtype)


# ---- meta kernels: also those of other ops that quantise their result ------------------------------------------------


def _check_code_dtype(op: str, argument: str, dtype: torch.dtype) -> None:
    check(
        dtype in CODE_DTYPES,
        f"{op}: {argument} must be float8_e4m3fn, int8 or float4_e2m1fn_x2, got {name_of(dtype)}",
    )


def _check_scale_dtype(op: str, argument: str, dtype: torch.dtype) -> None:
    check(dtype in SCALE_DTYPES, f"{op}: {argument} must be float32, float8_e8m0fnu or int32, got {name_of(dtype)}")


def check_scale_format(op: str, scale_dtype: torch.dtype, scale_layout: str) -> None:
    """Raises ValueError unless scales can have this dtype and layout."""
    _check_scale_dtype(op, "scale_dtype", scale_dtype)
    check(scale_layout in SCALE_LAYOUTS, f"{op}: scale_layout must be row or column, got {scale_layout}")


def _check_block_size(op: str, block_size: list[int]) -> None:
    check(
        len(block_size) == 2 and all(n > 0 or n == -1 for n in block_size),
        f"{op}: block_size must be two numbers, positive or -1 for the whole dimension, got {list(block_size)}",
    )


def _check_group_size(op: str, group_size: int) -> None:
    check(
        group_size > 0 or group_size == -1,
        f"{op}: group_size must be positive, or -1 for the whole row, got {group_size}",
    )


def _check_pairs(op: str, dtype: torch.dtype, block: str, block_columns: int, columns: int) -> None:
    if dtype != torch.float4_e2m1fn_x2:
        return
    check(columns % 2 == 0, f"{op}: the last dimension of x must be even with float4_e2m1fn_x2, got {columns}")
    or_one = block != "group_size"
    check(
        (or_one and block_columns == 1) or block_columns % 2 == 0 or block_columns < 0 or block_columns >= columns,
        f"{op}: {block} must be even{' or 1' if or_one else ''} with float4_e2m1fn_x2, got {block_columns}",
    )


def _scale_shape(shape: list[int], block_size: list[int], dtype: torch.dtype) -> list[int]:
    shape = list(shape)
    for d in range(-min(2, len(shape)), 0):
        # A whole dimension is one block, or none if it is empty.
        shape[d] = (shape[d] + block_size[d] - 1) // block_size[d] if block_size[d] > 0 else min(shape[d], 1)
    if dtype == torch.int32:
        shape[-1] = (shape[-1] + 3) // 4
    return shape


def new_scales(x: torch.Tensor, shape: list[int], dtype: torch.dtype, layout: str) -> torch.Tensor:
    """Scales of this shape on the device of ``x``, in the strides of the layout."""
    if layout == "row":
        return x.new_empty(shape, dtype=dtype)
    unit = 16 // dtype.itemsize
    rows = shape[-2] if len(shape) > 1 else 1
    pitch = (torch.sym_max(rows, 1) + unit - 1) // unit * unit
    strides, stride = [1, pitch][-len(shape) :], torch.sym_max(shape[-1], 1) * pitch
    for size in reversed(shape[:-2]):
        strides.insert(0, stride)
        stride = stride * torch.sym_max(size, 1)
    return x.new_empty_strided(shape, strides, dtype=dtype)


def _new_codes(x: torch.Tensor, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.float4_e2m1fn_x2:
        shape = [*shape[:-1], shape[-1] // 2]
    return x.new_empty(shape, dtype=dtype)


def quantized(
    op: str,
    x: torch.Tensor,
    shape: list[int],
    block_size: list[int],
    dtype: torch.dtype | None,
    scale_dtype: torch.dtype | None,
    scale_layout: str,
    block_name: str = "group_size",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes and scales of elements of ``shape`` on the device of ``x``, after the checks of their format."""
    dtype, scale_dtype = dtype or torch.float8_e4m3fn, scale_dtype or torch.float32
    _check_code_dtype(op, "dtype", dtype)
    check_scale_format(op, scale_dtype, scale_layout)
    _check_pairs(op, dtype, block_name, block_size[1], shape[-1])
    scales = new_scales(x, _scale_shape(shape, block_size, scale_dtype), scale_dtype, scale_layout)
    return _new_codes(x, shape, dtype), scales


def quantized_rows(
    op: str,
    x: torch.Tensor,
    shape: list[int],
    group_size: int,
    dtype: torch.dtype | None,
    scale_dtype: torch.dtype | None,
    scale_layout: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for token groups, the result of an op that quantises its rows."""
    _check_group_size(op, group_size)
    return quantized(op, x, shape, [1, group_size], dtype, scale_dtype, scale_layout)


@torch.library.register_fake("deepinfer::quantize_per_token_group")
def _quantize_per_token_group_meta(
    x, group_size=128, *, dtype=None, round_scale=False, scale_dtype=None, scale_layout="row"
):
    op = "quantize_per_token_group"
    check(x.dim() >= 1, f"{op}: x must have at least one dimension")
    _check_group_size(op, group_size)
    check_float_dtype(op, "x", x.dtype)
    return quantized_rows(op, x, x.shape, group_size, dtype, scale_dtype, scale_layout)


@torch.library.register_fake("deepinfer::quantize_per_token")
def _quantize_per_token_meta(x, *, dtype=None, round_scale=False, scale_dtype=None, scale_layout="row"):
    op = "quantize_per_token"
    check(x.dim() >= 1, f"{op}: x must have at least one dimension")
    check(x.shape[-1] > 0, f"{op}: the last dimension of x must not be empty")
    check_float_dtype(op, "x", x.dtype)
    return quantized_rows(op, x, x.shape, -1, dtype, scale_dtype, scale_layout)


@torch.library.register_fake("deepinfer::quantize_per_block")
def _quantize_per_block_meta(
    x, block_size=(128, 128), *, dtype=None, round_scale=False, scale_dtype=None, scale_layout="row"
):
    op = "quantize_per_block"
    check(x.dim() >= 2, f"{op}: x must have at least two dimensions")
    _check_block_size(op, block_size)
    check_float_dtype(op, "x", x.dtype)
    return quantized(op, x, x.shape, block_size, dtype, scale_dtype, scale_layout, "block_size[1]")


@torch.library.register_fake("deepinfer::quantize_per_channel")
def _quantize_per_channel_meta(
    x, block_rows=128, *, dtype=None, round_scale=False, scale_dtype=None, scale_layout="row"
):
    op = "quantize_per_channel"
    check(x.dim() >= 2, f"{op}: x must have at least two dimensions")
    check(
        block_rows > 0 or block_rows == -1,
        f"{op}: block_rows must be positive, or -1 for all rows, got {block_rows}",
    )
    check_float_dtype(op, "x", x.dtype)
    return quantized(op, x, x.shape, [block_rows, 1], dtype, scale_dtype, scale_layout, "block_rows")


@torch.library.register_fake("deepinfer::quantization_scales")
def _quantization_scales_meta(x, block_size, *, dtype=None, round_scale=False, scale_dtype=None, scale_layout="row"):
    op = "quantization_scales"
    check(x.dim() >= 1, f"{op}: x must have at least one dimension")
    _check_block_size(op, block_size)
    check_float_dtype(op, "x", x.dtype)
    return quantized(op, x, x.shape, block_size, dtype, scale_dtype, scale_layout, "block_size[1]")[1]


def _check_scales(op: str, scales: torch.Tensor, x: torch.Tensor, shape: list[int], block_size: list[int]) -> None:
    _check_scale_dtype(op, "scales", scales.dtype)
    check(scales.device == x.device, f"{op}: scales must be on the same device as the first argument")
    expected = _scale_shape(shape, block_size, scales.dtype)
    check(list(scales.shape) == expected, f"{op}: scales must have shape {expected}, got {list(scales.shape)}")


@torch.library.register_fake("deepinfer::quantize_with_scales")
def _quantize_with_scales_meta(x, scales, block_size, *, dtype=None):
    op = "quantize_with_scales"
    check(x.dim() >= 1, f"{op}: x must have at least one dimension")
    check_float_dtype(op, "x", x.dtype)
    dtype = dtype or torch.float8_e4m3fn
    _check_code_dtype(op, "dtype", dtype)
    _check_block_size(op, block_size)
    _check_pairs(op, dtype, "block_size[1]", block_size[1], x.shape[-1])
    _check_scales(op, scales, x, x.shape, block_size)
    return _new_codes(x, x.shape, dtype)


@torch.library.register_fake("deepinfer::dequantize")
def _dequantize_meta(q, scales, block_size, dtype=None):
    op = "dequantize"
    check(q.dim() >= 1, f"{op}: q must have at least one dimension")
    _check_code_dtype(op, "q", q.dtype)
    _check_scale_dtype(op, "scales", scales.dtype)
    _check_block_size(op, block_size)
    shape = [*q.shape[:-1], q.shape[-1] * 2] if q.dtype == torch.float4_e2m1fn_x2 else q.shape
    _check_pairs(op, q.dtype, "block_size[1]", block_size[1], shape[-1])
    _check_scales(op, scales, q, shape, block_size)
    dtype = dtype or torch.bfloat16
    check_float_dtype(op, "dtype", dtype)
    return q.new_empty(shape, dtype=dtype)
