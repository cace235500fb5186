"""Matrix products of float8_e4m3fn operands with scales: dense and grouped by expert."""

import torch

from torch_deepinfer.ops.activation import silu_and_mul_quant
from torch_deepinfer.ops.checks import check, check_float_dtype, check_written, name_of, shape_of
from torch_deepinfer.ops.moe import moe_expert_map, moe_permute_scaled, moe_unpermute
from torch_deepinfer.ops.quant import quantize_per_token_group

BLOCK = 128  # of k, and of columns of a weight, that a scale is for
MOST_EXPERTS = 2**31 - 1  # of all ranks: those of other ranks are not counted here


def fp8_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The product of two dequantised matrices: the sum over k of ``a * a_scale * b * b_scale``.

    On a Hopper GPU the products of 128 of k are summed by the matrix unit, then scaled and added up in float32.

    Args:
        a: ``[M, K]`` float8_e4m3fn.
        b: ``[K, N]`` float8_e4m3fn, any strides. The fast layout of both is a dense K whose rows start at multiples of
            16 bytes, as the transposed view of an ``[N, K]`` weight has; others are copied first on a GPU.
        a_scale: float32 or float8_e8m0fnu, ``[M, K / 128]`` (rounded up) as :func:`quantize_per_token_group` gives
            them; ``[M, 1]`` for whole rows, ``[1, 1]`` for the tensor. On a GPU the fast layout is dense along M with a
            second stride that is a multiple of 4.
        b_scale: float32 or float8_e8m0fnu, ``[K / 128, N / 128]``, the transpose of what :func:`quantize_per_block`
            gives for the weight, or ``[K / 128, N]``; either dimension may be 1.
        out_dtype: bfloat16 (default), float16 or float32.

    Returns:
        ``[M, N]`` of ``out_dtype``, contiguous.

    Raises:
        ValueError: a wrong shape, dtype or device.
    """
    return torch.ops.deepinfer.fp8_gemm(a, b, a_scale, b_scale, out_dtype=out_dtype)


def fp8_grouped_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """:func:`grouped_mm` of float8 operands: the rows ``offsets[e - 1] : offsets[e]`` of ``x`` meet ``weight[e]``.

    Groups may end anywhere.

    Args:
        x: ``[P, K]`` float8_e4m3fn, rows sorted by expert.
        weight: ``[E, K, N]`` float8_e4m3fn; see :func:`fp8_gemm` for the fast layouts.
        offsets: ``[E]`` int32, the end of each expert's rows: ascending, not negative, at most P.
        x_scale: ``[P, K / 128]`` (rounded up), float32 or float8_e8m0fnu.
        weight_scale: ``[E, K / 128, N / 128]`` or ``[E, K / 128, N]``, float32 or float8_e8m0fnu; any of them may be 1.
        out_dtype: bfloat16 (default), float16 or float32.

    Returns:
        ``[P, N]`` of ``out_dtype``. Rows past ``offsets[-1]`` are zeros.

    Raises:
        ValueError: a wrong shape, dtype or device; on CPU also offsets that descend, are negative or exceed P.
    """
    return torch.ops.deepinfer.fp8_grouped_mm(x, weight, offsets, x_scale, weight_scale, out_dtype=out_dtype)


def fp8_masked_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    counts: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """:func:`masked_mm` of float8 operands: the rows ``x[e, : counts[e]]`` meet ``weight[e]``.

    Args:
        x: ``[E, M, K]`` float8_e4m3fn.
        weight: ``[E, K, N]`` float8_e4m3fn; see :func:`fp8_gemm` for the fast layouts.
        counts: ``[E]`` int32, each in [0, M].
        x_scale: ``[E, M, K / 128]`` (rounded up), float32 or float8_e8m0fnu.
        weight_scale: as for :func:`fp8_grouped_mm`.
        out_dtype: bfloat16 (default), float16 or float32.

    Returns:
        ``[E, M, N]`` of ``out_dtype``. Rows from ``counts[e]`` on are zeros.

    Raises:
        ValueError: a wrong shape, dtype or device; on CPU also a count outside its range.
    """
    return torch.ops.deepinfer.fp8_masked_mm(x, weight, counts, x_scale, weight_scale, out_dtype=out_dtype)


def fp8_masked_mm_(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    counts: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
) -> None:
    """:func:`fp8_masked_mm` into ``out`` ``[E, M, N]``; rows from ``counts[e]`` on are left alone.

    Raises:
        ValueError: as :func:`fp8_masked_mm`, with nothing written; also if ``out`` is expanded, has elements that share
            memory or shares memory with another argument.
        RuntimeError: ``out`` requires a gradient.
    """
    if torch.is_grad_enabled() and out.requires_grad:
        raise RuntimeError("fp8_masked_mm_: out is written without a gradient and must not require one")
    torch.ops.deepinfer.fp8_masked_mm_.default(out, x, weight, counts, x_scale, weight_scale)


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
    """:func:`fused_experts` with float8 weights: tokens and activations are quantised in groups of 128 on the way.

    Made of the ops :func:`quantize_per_token_group`, :func:`moe_expert_map`, :func:`moe_permute_scaled`,
    :func:`fp8_grouped_mm`, :func:`silu_and_mul_quant` and :func:`moe_unpermute`, without a wait for the device.

    Args:
        x: ``[T, H]`` float32, bfloat16 or float16; intermediate results have its dtype.
        gate_up: ``[E, 2 * I, H]`` float8_e4m3fn, the gate's rows first.
        down: ``[E, H, I]`` float8_e4m3fn.
        gate_up_scale, down_scale: of blocks of 128 x 128, ``[E, 2 * I / 128, H / 128]`` and ``[E, H / 128, I / 128]``
            (rounded up), as :func:`quantize_per_block` gives them; float32 or float8_e8m0fnu.
        topk_ids, topk_weights, first_expert: as in :func:`fused_experts`.
        limit, alpha, up_offset: as in :func:`silu_and_mul`.
        round_scale: the scales of tokens and activations are powers of two.

    Returns:
        ``[T, H]``, the dtype of ``x``.

    Raises:
        ValueError: as the ops that it is made of.
    """
    op, experts, topk = "fp8_fused_experts", gate_up.shape[0], topk_ids.shape[-1]
    # Not by check(): tracing would have to format its message.
    if x.dim() != 2:
        raise ValueError(f"{op}: x must have shape [T, H], got {shape_of(x)}")
    if gate_up.dim() != 3 or gate_up.shape[1] % 2 != 0 or gate_up.shape[2] != x.shape[1]:
        raise ValueError(f"{op}: gate_up must have shape [E, 2 * I, {x.shape[1]}], got {shape_of(gate_up)}")
    if down.shape != (experts, x.shape[1], gate_up.shape[1] // 2):
        expected = [experts, x.shape[1], gate_up.shape[1] // 2]
        raise ValueError(f"{op}: down must have shape {expected}, got {shape_of(down)}")
    rows_to_slots, slots_to_rows, offsets, _ = moe_expert_map(
        topk_ids, MOST_EXPERTS, first_expert=first_expert, num_local_experts=experts
    )
    ends = offsets[1:]
    tokens = quantize_per_token_group(x, BLOCK, round_scale=round_scale)
    rows, scales = moe_permute_scaled(*tokens, rows_to_slots, topk, slots_to_rows, scale_layout="column")
    hidden = fp8_grouped_mm(
        rows, gate_up.transpose(1, 2), ends, scales, gate_up_scale.transpose(1, 2), out_dtype=x.dtype
    )
    activated, scales = silu_and_mul_quant(
        hidden,
        limit=limit,
        alpha=alpha,
        up_offset=up_offset,
        rows_to_slots=rows_to_slots,
        group_size=BLOCK,
        round_scale=round_scale,
        scale_layout="column",
    )
    y = fp8_grouped_mm(activated, down.transpose(1, 2), ends, scales, down_scale.transpose(1, 2), out_dtype=x.dtype)
    return moe_unpermute(y, slots_to_rows, topk_weights)


def _check_e4m3(op: str, argument: str, tensor: torch.Tensor) -> None:
    check(tensor.dtype == torch.float8_e4m3fn, f"{op}: {argument} must be float8_e4m3fn, got {name_of(tensor.dtype)}")


def _check_device(op: str, argument: str, tensor: torch.Tensor, x: torch.Tensor) -> None:
    check(tensor.device == x.device, f"{op}: {argument} must be on the same device as the first argument")


def _check_scale(op: str, argument: str, scale: torch.Tensor, x: torch.Tensor) -> None:
    check(
        scale.dtype in (torch.float32, torch.float8_e8m0fnu),
        f"{op}: {argument} must be float32 or float8_e8m0fnu, got {name_of(scale.dtype)}",
    )
    _check_device(op, argument, scale, x)


def _result_type(op: str, out_dtype: torch.dtype | None) -> torch.dtype:
    result = torch.bfloat16 if out_dtype is None else out_dtype
    check_float_dtype(op, "out_dtype", result)
    return result


def _blocks_in(size: int) -> int:
    return (size + BLOCK - 1) // BLOCK


def _has_shape(scale: torch.Tensor, sizes: list[tuple[int, ...]]) -> bool:
    return scale.dim() == len(sizes) and all(n in (1, *allowed) for n, allowed in zip(scale.shape, sizes, strict=True))


@torch.library.register_fake("deepinfer::fp8_gemm")
def _fp8_gemm_meta(a, b, a_scale, b_scale, *, out_dtype=None):
    op = "fp8_gemm"
    check(a.dim() == 2, f"{op}: a must have shape [M, K], got {shape_of(a)}")
    _check_e4m3(op, "a", a)
    (m, k), columns = a.shape, _blocks_in(a.shape[1])
    check(b.dim() == 2 and b.shape[0] == k, f"{op}: b must have shape [{k}, N], got {shape_of(b)}")
    _check_e4m3(op, "b", b)
    _check_device(op, "b", b, a)
    n = b.shape[1]
    check(
        _has_shape(a_scale, [(m,), (columns,)]),
        f"{op}: a_scale must have shape [{m} or 1, {columns} or 1], got {shape_of(a_scale)}",
    )
    check(
        _has_shape(b_scale, [(columns,), (n, _blocks_in(n))]),
        f"{op}: b_scale must have shape [{columns} or 1, {n} or {_blocks_in(n)} or 1], got {shape_of(b_scale)}",
    )
    _check_scale(op, "a_scale", a_scale, a)
    _check_scale(op, "b_scale", b_scale, a)
    return a.new_empty((m, n), dtype=_result_type(op, out_dtype))


def _check_grouped(op, x, weight, groups_name, groups, x_scale, weight_scale, out_dtype) -> torch.Tensor:
    _check_e4m3(op, "x", x)
    k, blocks = x.shape[-1], _blocks_in(x.shape[-1])
    check(
        weight.dim() == 3 and weight.shape[1] == k,
        f"{op}: weight must have shape [E, {k}, N], got {shape_of(weight)}",
    )
    _check_e4m3(op, "weight", weight)
    _check_device(op, "weight", weight, x)
    experts, _, n = weight.shape
    check(groups.dtype == torch.int32, f"{op}: {groups_name} must be int32, got {name_of(groups.dtype)}")
    check(list(groups.shape) == [experts], f"{op}: {groups_name} must have shape [{experts}], got {shape_of(groups)}")
    _check_device(op, groups_name, groups, x)
    check(
        list(x_scale.shape) == [*x.shape[:-1], blocks],
        f"{op}: x_scale must have the leading shape of x and {blocks} columns, got {shape_of(x_scale)}",
    )
    check(
        _has_shape(weight_scale, [(experts,), (blocks,), (n, _blocks_in(n))]),
        f"{op}: weight_scale must have shape [{experts} or 1, {blocks} or 1, {n} or {_blocks_in(n)} or 1], "
        f"got {shape_of(weight_scale)}",
    )
    _check_scale(op, "x_scale", x_scale, x)
    _check_scale(op, "weight_scale", weight_scale, x)
    return x.new_empty((*x.shape[:-1], n), dtype=_result_type(op, out_dtype))


@torch.library.register_fake("deepinfer::fp8_grouped_mm")
def _fp8_grouped_mm_meta(x, weight, offsets, x_scale, weight_scale, *, out_dtype=None):
    op = "fp8_grouped_mm"
    check(x.dim() == 2, f"{op}: x must have shape [P, K], got {shape_of(x)}")
    return _check_grouped(op, x, weight, "offsets", offsets, x_scale, weight_scale, out_dtype)


def _check_masked(op, x, weight, counts, x_scale, weight_scale, out_dtype) -> torch.Tensor:
    check(
        x.dim() == 3 and x.shape[0] == weight.shape[0],
        f"{op}: x must have shape [E, M, K] with the E of weight, got {shape_of(x)}",
    )
    return _check_grouped(op, x, weight, "counts", counts, x_scale, weight_scale, out_dtype)


@torch.library.register_fake("deepinfer::fp8_masked_mm")
def _fp8_masked_mm_meta(x, weight, counts, x_scale, weight_scale, *, out_dtype=None):
    return _check_masked("fp8_masked_mm", x, weight, counts, x_scale, weight_scale, out_dtype)


@torch.library.register_fake("deepinfer::fp8_masked_mm_")
def _fp8_masked_mm_inplace_meta(out, x, weight, counts, x_scale, weight_scale):
    op = "fp8_masked_mm_"
    expected = _check_masked(op, x, weight, counts, x_scale, weight_scale, out.dtype)
    check_written(op, "out", out, expected.shape)
    _check_device(op, "out", out, x)
