"""Mixture of experts: routing, sorting tokens by expert, gathering their rows and summing the results."""

import torch

from torch_deepinfer.ops.checks import check, check_float_dtype, shape_of
from torch_deepinfer.ops.quant import check_scale_format, new_scales

SCORES = ("softmax", "sigmoid", "sqrt_softplus")
GROUP_SCORES = ("top2_sum", "max")
MAX_EXPERTS = 16384
MAX_ROWS = 2**31 - 1


def moe_router(
    logits: torch.Tensor,
    topk: int,
    *,
    bias: torch.Tensor | None = None,
    score: str = "softmax",
    score_after_topk: bool = False,
    num_groups: int = 1,
    topk_groups: int = 1,
    group_score: str = "top2_sum",
    renormalize: bool = False,
    renorm_eps: float = 0.0,
    renorm_min: float = 0.0,
    scale: float = 1.0,
    weights_dtype: torch.dtype | None = None,
    ids_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses ``topk`` experts for each token and weighs them.

    All arithmetic is float32::

        scores  = score(logits)                      # over the experts
        keys    = scores + bias                      # the bias selects, it does not weigh
        keys    = keys of the topk_groups best of num_groups equal, consecutive groups
        ids     = the topk greatest keys, descending
        weights = scores[ids]
        weights = weights / max(sum(weights) + renorm_eps, renorm_min)   # if renormalize
        weights = (weights * scale).to(weights_dtype)                    # renormalised or not

    Args:
        logits: ``[tokens, experts]``, float32, bfloat16 or float16, any strides, 1 to 16384 experts.
        topk: at most the number of experts in ``topk_groups`` groups.
        bias: ``[experts]`` of any of these dtypes.
        score: ``"softmax"`` (Mixtral, Qwen, DeepSeek-V2), ``"sigmoid"`` (DeepSeek-V3, GLM-4.5, MiniMax-M2) or
            ``"sqrt_softplus"`` (DeepSeek-V4; softplus is the identity above 20).
        score_after_topk: keys are ``logits + bias`` and the score is taken over the ``topk`` chosen logits alone
            (GPT-OSS and Granite with softmax, Llama 4 with sigmoid).
        num_groups: divides the experts; DeepSeek's group limit is on if ``topk_groups`` is smaller.
        topk_groups: how many groups stay.
        group_score: a group's rank is the sum of its two greatest keys, ``"top2_sum"`` (DeepSeek-V3; groups of at
            least two experts), or its greatest key, ``"max"`` (DeepSeek-V2).
        renormalize: divides by the sum of the chosen weights.
        renorm_eps: added to that sum, not negative; with 0, a row whose chosen scores are all 0 gives NaN.
        renorm_min: the least that weights are divided by (Ernie 4.5), not negative.
        scale: the routed scaling factor.
        weights_dtype: float32 (default), bfloat16 or float16.
        ids_dtype: int64 (default) or int32.

    Returns:
        ``(topk_weights, topk_ids)``, both ``[tokens, topk]``, ordered by descending key.

    The lower index wins a tie, among experts as among groups. NaN is greater than any number. The ids of a row are
    always distinct and in range, and from kept groups, also if the row holds NaN or nothing but -inf; the weights
    carry the NaN that the formula gives.

    Raises:
        ValueError: a wrong shape, dtype, device or option, or a ``topk`` that cannot be selected.
    """
    return torch.ops.deepinfer.moe_router(
        logits,
        topk,
        bias=bias,
        score=score,
        score_after_topk=score_after_topk,
        num_groups=num_groups,
        topk_groups=topk_groups,
        group_score=group_score,
        renormalize=renormalize,
        renorm_eps=renorm_eps,
        renorm_min=renorm_min,
        scale=scale,
        weights_dtype=weights_dtype,
        ids_dtype=ids_dtype,
    )


def moe_expert_map(
    topk_ids: torch.Tensor,
    num_experts: int,
    *,
    alignment: int = 1,
    first_expert: int = 0,
    num_local_experts: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sorts the choices of all tokens by expert, for grouped matrix products and the way back.

    A *slot* is one choice of one token: ``token * topk + choice``. A *row* is its place in the sorted order. The slots
    of an expert stay in ascending order; each expert starts at a multiple of ``alignment``.

    Args:
        topk_ids: ``[tokens, topk]`` int64 or int32 in ``[-1, num_experts)``; -1 is no expert. Any strides.
        num_experts: of the whole layer.
        alignment: every expert's rows are padded to a multiple of it.
        first_expert, num_local_experts: only these experts get rows (expert parallelism); all from ``first_expert`` on
            by default. Slots of the others are dropped.

    Returns:
        ``(rows_to_slots, slots_to_rows, expert_offsets, expert_counts)``, all int32:

        - ``rows_to_slots`` ``[rows]``, -1 for padding. The number of rows depends on shapes alone:
          ``tokens * topk`` without alignment, else the most that any ids can need,
          ``(tokens * topk + num_local_experts * (alignment - 1)) // alignment * alignment``
        - ``slots_to_rows`` ``[tokens, topk]``, -1 for a dropped slot
        - ``expert_offsets`` ``[num_local_experts + 1]``: the first row of each expert; the last entry is the end of the
          rows in use, and the rows from there on are padding
        - ``expert_counts`` ``[num_local_experts]``, without padding

    Raises:
        ValueError: a wrong shape, dtype or option; more than 2^31 - 1 rows; on CPU also an id out of range.
    """
    return torch.ops.deepinfer.moe_expert_map(
        topk_ids,
        num_experts,
        alignment=alignment,
        first_expert=first_expert,
        num_local_experts=num_local_experts,
    )


def moe_permute(
    x: torch.Tensor, rows_to_slots: torch.Tensor, topk: int, slots_to_rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Gathers the rows of tokens into expert order: ``out[row] = x[rows_to_slots[row] // topk]``.

    Args:
        x: ``[tokens, hidden_size]`` of any dtype, any strides.
        rows_to_slots: ``[rows]`` int32 in ``[-1, tokens * topk)``, as :func:`moe_expert_map` returns it.
        topk: the choices of a token.
        slots_to_rows: the inverse, ``[tokens, topk]`` int32. Changes nothing but the speed: with it a GPU reads each
            token once instead of ``topk`` times.

    Returns:
        ``[rows, hidden_size]``, contiguous, the dtype of ``x``; zeros where the map is -1.

    Differentiable in ``x``; gradients are summed in at least float32.

    Raises:
        ValueError: a wrong shape, dtype or device; on CPU also a map entry out of range.
    """
    return torch.ops.deepinfer.moe_permute(x, rows_to_slots, topk, slots_to_rows)


def moe_unpermute(
    y: torch.Tensor, slots_to_rows: torch.Tensor, topk_weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Sums the rows of each token: ``out[t] = sum over j of topk_weights[t, j] * y[slots_to_rows[t, j]]``.

    The sum is float32, in the order of ``j``, without fused multiply-add, and is rounded once.

    Args:
        y: ``[rows, hidden_size]``, float32, bfloat16 or float16, any strides.
        slots_to_rows: ``[tokens, topk]`` int32 in ``[-1, rows)``, as :func:`moe_expert_map` returns it; -1 adds
            nothing.
        topk_weights: ``[tokens, topk]`` of any of these dtypes; None weighs every row with 1.

    Returns:
        ``[tokens, hidden_size]``, contiguous, the dtype of ``y``.

    Differentiable in ``y`` and ``topk_weights``.

    Raises:
        ValueError: a wrong shape, dtype or device; on CPU also a map entry out of range.
    """
    return torch.ops.deepinfer.moe_unpermute(y, slots_to_rows, topk_weights)


def moe_permute_scaled(
    x: torch.Tensor,
    scales: torch.Tensor,
    rows_to_slots: torch.Tensor,
    topk: int,
    slots_to_rows: torch.Tensor | None = None,
    *,
    scale_layout: str = "row",
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`moe_permute` of quantised tokens: their scales go where they go.

    Args:
        x, rows_to_slots, topk, slots_to_rows: as in :func:`moe_permute`.
        scales: ``[tokens, groups]``, float32, float8_e8m0fnu or int32, any strides.
        scale_layout: of the resulting scales, ``"row"`` or ``"column"`` as in :func:`quantize_per_token_group`.

    Returns:
        ``(rows, scales)``: ``[rows, hidden_size]`` and ``[rows, groups]``. Both are zeros for -1.

    Raises:
        ValueError: as :func:`moe_permute`; also scales of another number of rows, dtype or device, another layout.
    """
    return torch.ops.deepinfer.moe_permute_scaled(
        x, scales, rows_to_slots, topk, slots_to_rows, scale_layout=scale_layout
    )


def moe_unpermute_scaled(
    y: torch.Tensor,
    row_scales: torch.Tensor,
    slots_to_rows: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """:func:`moe_unpermute` of rows in float8: each is multiplied by ``topk_weights * row_scales``, a float32 product.

    Args:
        y: ``[rows, hidden_size]`` float8_e4m3fn, any strides.
        row_scales: ``[rows]`` or ``[rows, 1]`` float32, as :func:`quantize_per_token` returns them.
        slots_to_rows, topk_weights: as in :func:`moe_unpermute`.
        dtype: of the result: bfloat16 (the default), float16 or float32.

    Returns:
        ``[tokens, hidden_size]``, contiguous.

    Raises:
        ValueError: a wrong shape, dtype or device; on CPU also a map entry out of range.
    """
    return torch.ops.deepinfer.moe_unpermute_scaled(y, row_scales, slots_to_rows, topk_weights, dtype=dtype)


# ---- meta kernels ----------------------------------------------------------------------------------------------------


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.library.register_fake("deepinfer::moe_router")
def _moe_router_meta(
    logits,
    topk,
    *,
    bias=None,
    score="softmax",
    score_after_topk=False,
    num_groups=1,
    topk_groups=1,
    group_score="top2_sum",
    renormalize=False,
    renorm_eps=0.0,
    renorm_min=0.0,
    scale=1.0,
    weights_dtype=None,
    ids_dtype=None,
):
    op = "moe_router"
    check(logits.dim() == 2, f"{op}: logits must be 2-D, [tokens, experts], got shape {shape_of(logits)}")
    check_float_dtype(op, "logits", logits.dtype)
    check(score in SCORES, f"{op}: score must be softmax, sigmoid or sqrt_softplus, got {score}")
    check(group_score in GROUP_SCORES, f"{op}: group_score must be top2_sum or max, got {group_score}")
    tokens, experts = logits.shape
    check(1 <= experts <= MAX_EXPERTS, f"{op}: logits must have 1 to {MAX_EXPERTS} experts, got {experts}")
    check(
        num_groups >= 1 and experts % num_groups == 0,
        f"{op}: num_groups must divide the {experts} experts, got {num_groups}",
    )
    check(
        1 <= topk_groups <= num_groups,
        f"{op}: topk_groups must lie in [1, {num_groups}], got {topk_groups}",
    )
    group_size = experts // num_groups
    check(
        num_groups == 1 or group_score != "top2_sum" or group_size >= 2,
        f"{op}: group_score top2_sum needs groups of at least 2 experts",
    )
    selectable = topk_groups * group_size
    check(
        1 <= topk <= selectable,
        f"{op}: topk must lie in [1, {selectable}], the experts that can be selected, got {topk}",
    )
    if bias is not None:
        check(
            bias.dim() == 1 and bias.shape[0] == experts,
            f"{op}: bias must have shape [{experts}], got {shape_of(bias)}",
        )
        check(bias.device == logits.device, f"{op}: bias must be on the same device as the first argument")
        check_float_dtype(op, "bias", bias.dtype)
    check(renorm_eps >= 0, f"{op}: renorm_eps must not be negative, got {renorm_eps}")
    check(renorm_min >= 0, f"{op}: renorm_min must not be negative, got {renorm_min}")
    weights_dtype = weights_dtype or torch.float32
    check_float_dtype(op, "weights_dtype", weights_dtype)
    ids_dtype = ids_dtype or torch.int64
    check(
        ids_dtype in (torch.int64, torch.int32),
        f"{op}: ids_dtype must be int64 or int32, got {_name(ids_dtype)}",
    )
    return logits.new_empty(tokens, topk, dtype=weights_dtype), logits.new_empty(tokens, topk, dtype=ids_dtype)


@torch.library.register_fake("deepinfer::moe_expert_map")
def _moe_expert_map_meta(topk_ids, num_experts, *, alignment=1, first_expert=0, num_local_experts=None):
    op = "moe_expert_map"
    check(topk_ids.dim() == 2, f"{op}: topk_ids must be 2-D, [tokens, topk], got shape {shape_of(topk_ids)}")
    check(
        topk_ids.dtype in (torch.int64, torch.int32),
        f"{op}: topk_ids must be int64 or int32, got {_name(topk_ids.dtype)}",
    )
    check(1 <= num_experts <= MAX_ROWS, f"{op}: num_experts must lie in [1, {MAX_ROWS}], got {num_experts}")
    check(1 <= alignment <= MAX_ROWS, f"{op}: alignment must lie in [1, {MAX_ROWS}], got {alignment}")
    check(
        0 <= first_expert < num_experts,
        f"{op}: first_expert must lie in [0, {num_experts}), got {first_expert}",
    )
    rest = num_experts - first_expert
    local = rest if num_local_experts is None else num_local_experts
    check(1 <= local <= rest, f"{op}: num_local_experts must lie in [1, {rest}], got {local}")
    slots = topk_ids.shape[0] * topk_ids.shape[1]
    if isinstance(slots, int):  # not a guard on a dynamic number of tokens
        check(
            slots <= MAX_ROWS - local * (alignment - 1),
            f"{op}: {slots} slots with alignment {alignment} exceed the {MAX_ROWS} rows of an int32 map",
        )
    rows = (slots + local * (alignment - 1)) // alignment * alignment
    new = topk_ids.new_empty
    return (
        new(rows, dtype=torch.int32),
        new(topk_ids.shape, dtype=torch.int32),
        new(local + 1, dtype=torch.int32),
        new(local, dtype=torch.int32),
    )


def _check_map(op: str, argument: str, index_map: torch.Tensor, x: torch.Tensor) -> None:
    check(index_map.dtype == torch.int32, f"{op}: {argument} must be int32, got {_name(index_map.dtype)}")
    check(index_map.device == x.device, f"{op}: {argument} must be on the same device as the first argument")


def _check_permute(op, x, rows_to_slots, topk, slots_to_rows):
    check(x.dim() == 2, f"{op}: x must be 2-D, [tokens, hidden_size], got shape {shape_of(x)}")
    check(rows_to_slots.dim() == 1, f"{op}: rows_to_slots must be 1-D, got shape {shape_of(rows_to_slots)}")
    _check_map(op, "rows_to_slots", rows_to_slots, x)
    check(1 <= topk <= MAX_ROWS, f"{op}: topk must lie in [1, {MAX_ROWS}], got {topk}")
    if slots_to_rows is not None:
        check(
            slots_to_rows.dim() == 2 and slots_to_rows.shape[0] == x.shape[0] and slots_to_rows.shape[1] == topk,
            f"{op}: slots_to_rows must have shape [{x.shape[0]}, {topk}], got {shape_of(slots_to_rows)}",
        )
        _check_map(op, "slots_to_rows", slots_to_rows, x)


@torch.library.register_fake("deepinfer::moe_permute")
def _moe_permute_meta(x, rows_to_slots, topk, slots_to_rows=None):
    _check_permute("moe_permute", x, rows_to_slots, topk, slots_to_rows)
    return x.new_empty(rows_to_slots.shape[0], x.shape[1])


@torch.library.register_fake("deepinfer::moe_permute_scaled")
def _moe_permute_scaled_meta(x, scales, rows_to_slots, topk, slots_to_rows=None, *, scale_layout="row"):
    op = "moe_permute_scaled"
    check_scale_format(op, scales.dtype, scale_layout)
    check(x.dim() == 2, f"{op}: x must be 2-D, [tokens, hidden_size], got shape {shape_of(x)}")
    check(scales.dim() == 2, f"{op}: scales must be 2-D, [tokens, groups], got shape {shape_of(scales)}")
    check(
        scales.shape[0] == x.shape[0],
        f"{op}: scales must have {x.shape[0]} rows, those of x, got {scales.shape[0]}",
    )
    check(scales.device == x.device, f"{op}: scales must be on the same device as the first argument")
    _check_permute(op, x, rows_to_slots, topk, slots_to_rows)
    rows = rows_to_slots.shape[0]
    return x.new_empty(rows, x.shape[1]), new_scales(x, [rows, scales.shape[1]], scales.dtype, scale_layout)


def _check_unpermute(op, y, slots_to_rows):
    check(
        slots_to_rows.dim() == 2,
        f"{op}: slots_to_rows must be 2-D, [tokens, topk], got shape {shape_of(slots_to_rows)}",
    )
    _check_map(op, "slots_to_rows", slots_to_rows, y)


def _check_weights(op, topk_weights, slots_to_rows, y):
    if topk_weights is None:
        return
    check(
        topk_weights.shape == slots_to_rows.shape,
        f"{op}: topk_weights must have the shape of slots_to_rows, {shape_of(slots_to_rows)}, "
        f"got {shape_of(topk_weights)}",
    )
    check(topk_weights.device == y.device, f"{op}: topk_weights must be on the same device as the first argument")
    check_float_dtype(op, "topk_weights", topk_weights.dtype)


@torch.library.register_fake("deepinfer::moe_unpermute")
def _moe_unpermute_meta(y, slots_to_rows, topk_weights=None):
    op = "moe_unpermute"
    check(y.dim() == 2, f"{op}: y must be 2-D, [rows, hidden_size], got shape {shape_of(y)}")
    check_float_dtype(op, "y", y.dtype)
    _check_unpermute(op, y, slots_to_rows)
    _check_weights(op, topk_weights, slots_to_rows, y)
    return y.new_empty(slots_to_rows.shape[0], y.shape[1])


@torch.library.register_fake("deepinfer::moe_unpermute_scaled")
def _moe_unpermute_scaled_meta(y, row_scales, slots_to_rows, topk_weights=None, *, dtype=None):
    op = "moe_unpermute_scaled"
    check(y.dim() == 2, f"{op}: y must be 2-D, [rows, hidden_size], got shape {shape_of(y)}")
    check(y.dtype == torch.float8_e4m3fn, f"{op}: y must be float8_e4m3fn, got {_name(y.dtype)}")
    rows = y.shape[0]
    check(
        (row_scales.dim() == 1 or (row_scales.dim() == 2 and row_scales.shape[1] == 1)) and row_scales.shape[0] == rows,
        f"{op}: row_scales must have shape [{rows}] or [{rows}, 1], got {shape_of(row_scales)}",
    )
    check(row_scales.dtype == torch.float32, f"{op}: row_scales must be float32, got {_name(row_scales.dtype)}")
    check(row_scales.device == y.device, f"{op}: row_scales must be on the same device as the first argument")
    _check_unpermute(op, y, slots_to_rows)
    _check_weights(op, topk_weights, slots_to_rows, y)
    dtype = dtype or torch.bfloat16
    check_float_dtype(op, "dtype", dtype)
    return y.new_empty(slots_to_rows.shape[0], y.shape[1], dtype=dtype)


# ---- gradients -------------------------------------------------------------------------------------------------------
#
# An entry of -1 stands for one more row at the end that is zero going in and dropped coming out.


def _or_last(index: torch.Tensor, last: int) -> torch.Tensor:
    return torch.where(index < 0, last, index).long()


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _moe_permute_setup(ctx, inputs, output):
    x, rows_to_slots, topk, _ = inputs
    ctx.save_for_backward(rows_to_slots)
    ctx.tokens, ctx.topk = x.shape[0], topk


def _moe_permute_backward(ctx, grad):
    (rows_to_slots,) = ctx.saved_tensors
    tokens = _or_last(torch.where(rows_to_slots < 0, -1, rows_to_slots // ctx.topk), ctx.tokens)
    total = grad.new_zeros(ctx.tokens + 1, grad.shape[1], dtype=_sum_dtype(grad.dtype))
    total = total.index_add(0, tokens, grad.to(total.dtype))
    return total[:-1].to(grad.dtype), None, None, None


def _moe_unpermute_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _moe_unpermute_backward(ctx, grad):
    y, slots_to_rows, topk_weights = ctx.saved_tensors
    rows = _or_last(slots_to_rows, y.shape[0])
    grad = grad.float()
    grad_y = grad_weights = None
    if ctx.needs_input_grad[0]:
        weighted = grad[:, None, :].expand(-1, rows.shape[1], -1)
        if topk_weights is not None:
            weighted = weighted * topk_weights.float()[:, :, None]
        total = grad.new_zeros(y.shape[0] + 1, y.shape[1])
        grad_y = total.index_add(0, rows.flatten(), weighted.flatten(0, 1))[:-1].to(y.dtype)
    if topk_weights is not None and ctx.needs_input_grad[2]:
        padded = torch.nn.functional.pad(y, (0, 0, 0, 1))
        products = (padded[rows].float() * grad[:, None, :]).sum(-1)
        grad_weights = torch.where(slots_to_rows < 0, 0.0, products).to(topk_weights.dtype)
    return grad_y, None, grad_weights


torch.library.register_autograd("deepinfer::moe_permute", _moe_permute_backward, setup_context=_moe_permute_setup)
torch.library.register_autograd("deepinfer::moe_unpermute", _moe_unpermute_backward, setup_context=_moe_unpermute_setup)
