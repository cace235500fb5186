"""Grouped matrix products of mixture-of-experts layers, one by one and as one op for a whole expert layer."""

import torch

from torch_deepinfer.ops.checks import check, check_float_dtype, name_of, shape_of

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def grouped_mm(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Product of each group of rows with the matrix of its expert.

    The rows ``offsets[e - 1] : offsets[e]`` of ``x`` meet ``weight[e]``, as in ``torch._grouped_mm``.

    Args:
        x: ``[P, K]``, float32, bfloat16 or float16, rows sorted by expert.
        weight: ``[E, K, N]`` of the same dtype. Any strides are right; the transposed view of an ``[E, N, K]`` tensor,
            whose K is dense, is the fast layout.
        offsets: ``[E]`` int32, the end of each expert's rows: ascending, not negative, at most P.
        bias: ``[E, N]`` of the same dtype, added to the product after that is rounded to the dtype, as a separate
            addition would.

    Returns:
        ``[P, N]`` of the dtype of ``x``. Rows past ``offsets[-1]`` are zeros. The weight of an expert without rows is
        never read.

    Sums are float32. The value of a row does not depend on the number of rows or on their order (on one instruction
    set), so a token gets the same answer in any batch.

    Raises:
        ValueError: a wrong shape, dtype or device; on CPU also offsets that descend, are negative or exceed P.
    """
    return torch.ops.deepinfer.grouped_mm(x, weight, offsets, bias)


def fused_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "silu",
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    first_expert: int = 0,
) -> torch.Tensor:
    """The expert layer of a mixture: for each token the weighted sum of its experts' gated feed-forward networks.

    With ``e = topk_ids[t, j] - first_expert``, and every step rounded to the dtype of ``x``::

        hidden = x[t] @ gate_up[e].T + gate_up_bias[e]
        gate, up = halves of hidden, or its even and odd columns if interleaved
        y[t, j] = activation(gate, up) @ down[e].T + down_bias[e]
        out[t] = sum over j of topk_weights[t, j] * y[t, j]        in float32, in this order, rounded once

    Bit for bit the chain of ``moe_expert_map``, ``moe_permute``, ``grouped_mm``, the activation op, ``grouped_mm`` and
    ``moe_unpermute``, without the copies between them.

    Args:
        x: ``[T, H]``, float32, bfloat16 or float16.
        gate_up: ``[E, 2 * I, H]`` of the same dtype, any strides; dense H is the fast layout.
        down: ``[E, H, I]`` of the same dtype, any strides; dense I is the fast layout.
        topk_ids: ``[T, k]`` int32 or int64. -1 stands for no expert; an id outside
            ``[first_expert, first_expert + E)`` belongs to another rank. Neither contributes, and a token left with
            none gives zeros. Ids below -1 are refused on CPU.
        topk_weights: ``[T, k]`` float32, bfloat16 or float16.
        gate_up_bias: ``[E, 2 * I]`` of the dtype of ``x``.
        down_bias: ``[E, H]`` of the dtype of ``x``.
        activation: ``"silu"``: ``gate * sigmoid(alpha * gate) * (up + up_offset)``; ``"gelu"`` and ``"gelu_tanh"``:
            ``gelu(gate) * up``.
        interleaved: whether gate and up columns alternate, as in GPT-OSS.
        limit: bounds ``gate`` from above and ``up`` on both sides; silu only. GPT-OSS has ``limit=7``,
            ``alpha=1.702``, ``up_offset=1``.
        alpha: see activation; silu only.
        up_offset: see activation; silu only.
        first_expert: the id of the first expert that ``gate_up`` and ``down`` hold.

    Returns:
        ``[T, H]`` of the dtype of ``x``, contiguous. Experts without tokens cost nothing: their weights are not read.

    Raises:
        ValueError: a wrong shape, dtype, device or option; on CPU also an id below -1.
    """
    return torch.ops.deepinfer.fused_experts(
        x,
        gate_up,
        down,
        topk_ids,
        topk_weights,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        activation=activation,
        interleaved=interleaved,
        limit=limit,
        alpha=alpha,
        up_offset=up_offset,
        first_expert=first_expert,
    )


def _check_device(op: str, argument: str, tensor: torch.Tensor, x: torch.Tensor) -> None:
    check(tensor.device == x.device, f"{op}: {argument} must be on the same device as the first argument")


def _check_like_x(op: str, argument: str, tensor: torch.Tensor, x: torch.Tensor) -> None:
    check(
        tensor.dtype == x.dtype,
        f"{op}: {argument} must have the dtype of x, {name_of(x.dtype)}, got {name_of(tensor.dtype)}",
    )
    _check_device(op, argument, tensor, x)


def _check_bias(op: str, argument: str, bias: torch.Tensor | None, x: torch.Tensor, shape: list[int]) -> None:
    if bias is not None:
        check(list(bias.shape) == shape, f"{op}: {argument} must have shape {shape}, got {shape_of(bias)}")
        _check_like_x(op, argument, bias, x)


@torch.library.register_fake("deepinfer::grouped_mm")
def _grouped_mm_meta(x, weight, offsets, bias=None):
    op = "grouped_mm"
    check(x.dim() == 2, f"{op}: x must have shape [P, K], got {shape_of(x)}")
    check_float_dtype(op, "x", x.dtype)
    check(
        weight.dim() == 3 and weight.shape[1] == x.shape[1],
        f"{op}: weight must have shape [E, {x.shape[1]}, N], got {shape_of(weight)}",
    )
    _check_like_x(op, "weight", weight, x)
    experts, _, columns = weight.shape
    check(offsets.dtype == torch.int32, f"{op}: offsets must be int32, got {name_of(offsets.dtype)}")
    check(
        offsets.dim() == 1 and offsets.shape[0] == experts,
        f"{op}: offsets must have shape [{experts}], got {shape_of(offsets)}",
    )
    _check_device(op, "offsets", offsets, x)
    _check_bias(op, "bias", bias, x, [experts, columns])
    return x.new_empty((x.shape[0], columns))


@torch.library.register_fake("deepinfer::fused_experts")
def _fused_experts_meta(
    x,
    gate_up,
    down,
    topk_ids,
    topk_weights,
    *,
    gate_up_bias=None,
    down_bias=None,
    activation="silu",
    interleaved=False,
    limit=None,
    alpha=1.0,
    up_offset=0.0,
    first_expert=0,
):
    op = "fused_experts"
    check(x.dim() == 2, f"{op}: x must have shape [T, H], got {shape_of(x)}")
    check_float_dtype(op, "x", x.dtype)
    tokens, hidden = x.shape
    check(
        gate_up.dim() == 3 and gate_up.shape[1] % 2 == 0 and gate_up.shape[2] == hidden,
        f"{op}: gate_up must have shape [E, 2 * I, {hidden}], got {shape_of(gate_up)}",
    )
    _check_like_x(op, "gate_up", gate_up, x)
    experts, intermediate = gate_up.shape[0], gate_up.shape[1] // 2
    expected = [experts, hidden, intermediate]
    check(list(down.shape) == expected, f"{op}: down must have shape {expected}, got {shape_of(down)}")
    _check_like_x(op, "down", down, x)
    check(
        topk_ids.dtype in (torch.int32, torch.int64),
        f"{op}: topk_ids must be int32 or int64, got {name_of(topk_ids.dtype)}",
    )
    check(
        topk_ids.dim() == 2 and topk_ids.shape[0] == tokens,
        f"{op}: topk_ids must have shape [{tokens}, k], got {shape_of(topk_ids)}",
    )
    _check_device(op, "topk_ids", topk_ids, x)
    check(
        topk_weights.shape == topk_ids.shape,
        f"{op}: topk_weights must have the shape of topk_ids, {shape_of(topk_ids)}, got {shape_of(topk_weights)}",
    )
    check_float_dtype(op, "topk_weights", topk_weights.dtype)
    _check_device(op, "topk_weights", topk_weights, x)
    _check_bias(op, "gate_up_bias", gate_up_bias, x, [experts, 2 * intermediate])
    _check_bias(op, "down_bias", down_bias, x, [experts, hidden])
    check(
        activation in ACTIVATIONS,
        f"{op}: activation must be silu, gelu or gelu_tanh, got {activation}",
    )
    check(
        activation == "silu" or (limit is None and alpha == 1 and up_offset == 0),
        f"{op}: limit, alpha and up_offset need activation silu, got {activation}",
    )
    check(limit is None or limit > 0, f"{op}: limit must be positive, got {limit}")
    check(first_expert >= 0, f"{op}: first_expert must not be negative, got {first_expert}")
    return x.new_empty((tokens, hidden))
