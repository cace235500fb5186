"""Reference of the quant family."""

import torch
import torch.nn.functional as F

MAX = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
AMAX_FLOOR = {torch.float8_e4m3fn: 1e-4, torch.int8: 1e-10}


def quantize_per_token_group(
    x: torch.Tensor,
    group_size: int = 128,
    *,
    dtype: torch.dtype | None = None,
    round_scale: bool = False,
    scale_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`torch_deepinfer.ops.quantize_per_token_group`."""
    codes, scales = quantize_per_block(
        x.unsqueeze(-2), (1, group_size), dtype=dtype, round_scale=round_scale, scale_dtype=scale_dtype
    )
    return codes.squeeze(-2), scales.squeeze(-2)


def quantize_per_block(
    x: torch.Tensor,
    block_size: list[int] | tuple[int, int] = (128, 128),
    *,
    dtype: torch.dtype | None = None,
    round_scale: bool = False,
    scale_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`torch_deepinfer.ops.quantize_per_block`."""
    dtype, scale_dtype = dtype or torch.float8_e4m3fn, scale_dtype or torch.float32
    blocks = _blocks(x.float(), block_size)
    # NaN passes through amax; infinity is treated alike.
    amax = blocks.abs().amax((-3, -1), keepdim=True).clamp_min(AMAX_FLOOR[dtype])
    amax = torch.where(amax.isinf(), torch.nan, amax)
    # A number as divisor or dividend would be inverted and multiplied by on some devices: two roundings.
    largest = torch.full_like(amax, MAX[dtype])
    scales, factors = amax / largest, largest / amax
    if round_scale or scale_dtype == torch.float8_e8m0fnu:
        mantissa, exponent = torch.frexp(scales)  # scale = mantissa * 2^exponent, mantissa in [0.5, 1)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        scales = torch.where(scales.isnan(), scales, torch.ldexp(torch.ones_like(scales), exponent))
        factors = torch.ones_like(scales) / scales
    values = blocks * factors
    codes = values.round().nan_to_num(0.0) if dtype == torch.int8 else values.clamp(-MAX[dtype], MAX[dtype])
    return _matrix(codes.to(dtype), x.shape), scales.squeeze((-3, -1)).to(scale_dtype)


def dequantize(
    q: torch.Tensor,
    scales: torch.Tensor,
    block_size: list[int] | tuple[int, int],
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See :func:`torch_deepinfer.ops.dequantize`."""
    if q.dim() == 1:
        return dequantize(q[None], scales[None], block_size, dtype)[0]
    values = _blocks(q.float(), block_size) * scales.float()[..., :, None, :, None]
    return _matrix(values, q.shape).to(dtype or torch.bfloat16)


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
