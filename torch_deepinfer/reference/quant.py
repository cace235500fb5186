"""Reference of the quant family."""

import torch
import torch.nn.functional as F

MAX = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0, torch.float4_e2m1fn_x2: 6.0}
AMAX_FLOOR = {torch.float8_e4m3fn: 1e-4, torch.int8: 1e-10, torch.float4_e2m1fn_x2: 6 * 2.0**-126}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def quantize_per_token_group(
    x: torch.Tensor,
    group_size: int = 128,
    *,
    dtype: torch.dtype | None = None,
    round_scale: bool = False,
    scale_dtype: torch.dtype | None = None,
    scale_layout: str = "row",
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`torch_deepinfer.ops.quantize_per_token_group`."""
    return _quantize(x, (1, group_size), dtype, round_scale, scale_dtype, scale_layout)


def quantize_per_token(
    x: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    round_scale: bool = False,
    scale_dtype: torch.dtype | None = None,
    scale_layout: str = "row",
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`torch_deepinfer.ops.quantize_per_token`."""
    return _quantize(x, (1, -1), dtype, round_scale, scale_dtype, scale_layout)


def quantize_per_block(
    x: torch.Tensor,
    block_size: list[int] | tuple[int, int] = (128, 128),
    *,
    dtype: torch.dtype | None = None,
    round_scale: bool = False,
    scale_dtype: torch.dtype | None = None,
    scale_layout: str = "row",
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`torch_deepinfer.ops.quantize_per_block`."""
    return _quantize(x, block_size, dtype, round_scale, scale_dtype, scale_layout)


def quantize_per_channel(
    x: torch.Tensor,
    block_rows: int = 128,
    *,
    dtype: torch.dtype | None = None,
    round_scale: bool = False,
    scale_dtype: torch.dtype | None = None,
    scale_layout: str = "row",
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`torch_deepinfer.ops.quantize_per_channel`."""
    return _quantize(x, (block_rows, 1), dtype, round_scale, scale_dtype, scale_layout)


def quantization_scales(
    x: torch.Tensor,
    block_size: list[int] | tuple[int, int],
    *,
    dtype: torch.dtype | None = None,
    round_scale: bool = False,
    scale_dtype: torch.dtype | None = None,
    scale_layout: str = "row",
) -> torch.Tensor:
    """See :func:`torch_deepinfer.ops.quantization_scales`."""
    return _quantize(x, block_size, dtype, round_scale, scale_dtype, scale_layout)[1]


def quantize_with_scales(
    x: torch.Tensor,
    scales: torch.Tensor,
    block_size: list[int] | tuple[int, int],
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See :func:`torch_deepinfer.ops.quantize_with_scales`."""
    if x.dim() == 1:
        return quantize_with_scales(x[None], scales[None], block_size, dtype=dtype)[0]
    blocks = _blocks(x.float(), block_size)
    factors = _float_scales(scales, blocks.shape[-2]).reciprocal()
    return _codes(_matrix(blocks * factors[..., :, None, :, None], x.shape), dtype or torch.float8_e4m3fn)


def dequantize(
    q: torch.Tensor,
    scales: torch.Tensor,
    block_size: list[int] | tuple[int, int],
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See :func:`torch_deepinfer.ops.dequantize`."""
    if q.dim() == 1:
        return dequantize(q[None], scales[None], block_size, dtype)[0]
    values = _values(q)
    blocks = _blocks(values, block_size)
    blocks = blocks * _float_scales(scales, blocks.shape[-2])[..., :, None, :, None]
    return _matrix(blocks, values.shape).to(dtype or torch.bfloat16)


def _quantize(x, block_size, dtype, round_scale, scale_dtype, scale_layout):
    if x.dim() == 1:
        codes, scales = _quantize(x[None], block_size, dtype, round_scale, scale_dtype, scale_layout)
        return codes[0], scales[0]
    dtype, scale_dtype = dtype or torch.float8_e4m3fn, scale_dtype or torch.float32
    blocks = _blocks(x.float(), block_size)
    # NaN passes through amax; infinity is treated alike.
    amax = blocks.abs().amax((-3, -1), keepdim=True).clamp_min(AMAX_FLOOR[dtype])
    amax = torch.where(amax.isinf(), torch.nan, amax)
    # A number as divisor or dividend would be inverted and multiplied by on some devices: two roundings.
    largest = torch.full_like(amax, MAX[dtype])
    scales, factors = amax / largest, largest / amax
    if round_scale or scale_dtype != torch.float32:
        mantissa, exponent = torch.frexp(scales)  # scale = mantissa * 2^exponent, mantissa in [0.5, 1)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        scales = torch.where(scales.isnan(), scales, torch.ldexp(torch.ones_like(scales), exponent))
        factors = torch.ones_like(scales) / scales
    codes = _codes(_matrix(blocks * factors, x.shape), dtype)
    return codes, laid_out(_stored(scales.squeeze((-3, -1)), scale_dtype), scale_layout)


def _codes(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To nearest even, saturating; NaN is 0 where there is no code for it."""
    values = values.clamp(-MAX[dtype], MAX[dtype])
    if dtype == torch.float8_e4m3fn:
        return values.to(dtype)
    values = values.nan_to_num(0.0)
    if dtype == torch.int8:
        return values.round().to(dtype)
    table = torch.tensor(E2M1, device=values.device)
    middle = (table[1:] + table[:-1]) / 2
    above = torch.searchsorted(middle, values.abs(), right=True)
    below = torch.searchsorted(middle, values.abs())  # differs on a tie, of which the even code is taken
    codes = torch.where(above % 2 == 0, above, below) | (values.signbit().long() << 3)
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8).view(dtype)


def _values(codes: torch.Tensor) -> torch.Tensor:
    if codes.dtype != torch.float4_e2m1fn_x2:
        return codes.float()
    pairs = codes.view(torch.uint8).long()
    table = torch.tensor([*E2M1, *(-v for v in E2M1)], device=codes.device)
    return table[torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)]


def _stored(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype != torch.int32:
        return scales.to(dtype)
    exponents = scales.to(torch.float8_e8m0fnu).view(torch.uint8).int()
    exponents = F.pad(exponents, (0, -exponents.shape[-1] % 4))
    return sum((exponents[..., i::4] << 8 * i for i in range(1, 4)), exponents[..., ::4])


def _float_scales(scales: torch.Tensor, across: int) -> torch.Tensor:
    """As float32 ``[..., down, across]``."""
    if scales.dtype == torch.int32:
        exponents = torch.stack([scales >> 8 * i & 0xFF for i in range(4)], -1).flatten(-2)[..., :across]
        scales = exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
    return scales.float()


def laid_out(scales: torch.Tensor, layout: str) -> torch.Tensor:
    """The same scales in the strides of the layout."""
    if layout == "row":
        return scales
    words = scales.view(torch.uint8 if scales.itemsize == 1 else torch.int32)  # a dtype that can be padded
    rows = scales.shape[-2]
    padding = -max(rows, 1) % (16 // scales.itemsize) + (rows == 0)
    return F.pad(words.mT, (0, padding)).contiguous().mT[..., :rows, :].view(scales.dtype)


def _blocks(x: torch.Tensor, block_size: list[int] | tuple[int, int]) -> torch.Tensor:
    """``[..., blocks down, block rows, blocks across, block columns]``, filled up with zeros."""
    *leading, n, k = x.shape
    rows, columns = (size if given < 0 else given for given, size in zip(block_size, (n, k), strict=True))
    rows, columns = max(rows, 1), max(columns, 1)
    padded = F.pad(x, (0, -k % columns, 0, -n % rows))
    return padded.reshape(*leading, -(-n // rows), rows, -(-k // columns), columns)


def _matrix(blocks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The inverse of :func:`_blocks`."""
    down, rows, across, columns = blocks.shape[-4:]
    matrix = blocks.reshape(*shape[:-2], down * rows, across * columns)
    return matrix[..., : shape[-2], : shape[-1]].contiguous()
