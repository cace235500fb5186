"""Matrix products: dense, grouped by expert, and the whole expert layer of a mixture as one op."""

import torch

from torch_deepinfer.ops.checks import check, check_float_dtype, check_written, name_of, shape_of

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``scale * (a @ b) + bias + c``, summed in float32 and rounded once.

    Args:
        a: ``[M, K]``, float32, bfloat16 or float16.
        b: ``[K, N]`` of the same dtype. Any strides are right for both: a dense K is the fast layout, a dense M or N
            nearly as fast. On a GPU, 16-bit operands whose rows do not start at multiples of 16 bytes are copied first.
        bias: ``[N]`` of the dtype of the result.
        c: ``[M, N]`` of the dtype of the result.
        scale: multiplies the sum, in float32.
        out_dtype: the dtype of the result: float32, or that of ``a`` (default).

    Returns:
        ``[M, N]``, contiguous. On one device and for one shape always the same bits.

    Raises:
        ValueError: a wrong shape, dtype or device.
    """
    return torch.ops.deepinfer.gemm(a, b, bias=bias, c=c, scale=scale, out_dtype=out_dtype)


def gemm_(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    accumulate: bool = False,
) -> None:
    """:func:`gemm` into ``out`` ``[M, N]``, float32 or of the dtype of ``a``, any strides.

    With ``accumulate`` the product is added to what ``out`` holds, in float32 and rounded once, as ``c=out`` would.

    Raises:
        ValueError: as :func:`gemm`, with nothing written; also if ``out`` is expanded, has elements that share memory
            or shares memory with another argument.
        RuntimeError: ``out`` requires a gradient.
    """
    if torch.is_grad_enabled() and out.requires_grad:
        raise RuntimeError("gemm_: out is written without a gradient and must not require one")
    torch.ops.deepinfer.gemm_.default(out, a, b, bias=bias, scale=scale, accumulate=accumulate)


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


def masked_mm(
    x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Product of the first rows of each expert's block with its matrix: :func:`grouped_mm` for blocks of fixed size.

    The rows ``x[e, : counts[e]]`` meet ``weight[e]``, as decoding with expert parallelism lays them out.

    Args:
        x: ``[E, M, K]``, float32, bfloat16 or float16. Rows from ``counts[e]`` on may hold anything.
        weight: ``[E, K, N]`` of the same dtype, any strides; a dense K is the fast layout.
        counts: ``[E]`` int32, each in [0, M].
        bias: ``[E, N]`` of the same dtype, added to the rounded product.

    Returns:
        ``[E, M, N]`` of the dtype of ``x``. Rows from ``counts[e]`` on are zeros.

    Raises:
        ValueError: a wrong shape, dtype or device; on CPU also a count outside its range.
    """
    return torch.ops.deepinfer.masked_mm(x, weight, counts, bias)


def masked_mm_(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    counts: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> None:
    """:func:`masked_mm` into ``out`` ``[E, M, N]`` of the dtype of ``x``; rows from ``counts[e]`` on are left alone.

    Raises:
        ValueError: as :func:`masked_mm`, with nothing written; also if ``out`` is expanded, has elements that share
            memory or shares memory with another argument.
        RuntimeError: ``out`` requires a gradient.
    """
    if torch.is_grad_enabled() and out.requires_grad:
        raise RuntimeError("masked_mm_: out is written without a gradient and must not require one")
    torch.ops.deepinfer.masked_mm_.default(out, x, weight, counts, bias)


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
    shared_gate: torch.Tensor | None = None,
    shared_up: torch.Tensor | None = None,
    shared_down: torch.Tensor | None = None,
) -> torch.Tensor:
    """The expert layer of a mixture: for each token the weighted sum of its experts' gated feed-forward networks.

    With ``e = topk_ids[t, j] - first_expert``, and every step rounded to the dtype of ``x``::

        hidden = x[t] @ gate_up[e].T + gate_up_bias[e]
        gate, up = halves of hidden, or its even and odd columns if interleaved
        y[t, j] = activation(gate, up) @ down[e].T + down_bias[e]
        out[t] = sum over j of topk_weights[t, j] * y[t, j]        in float32, in this order, rounded once

    A shared expert, which sees every token, is added to that::

        out[t] += activation(x[t] @ shared_gate.T, x[t] @ shared_up.T) @ shared_down.T

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
        shared_gate: ``[S, H]`` of the dtype of ``x``. On Hopper S = I makes the shared expert one of the others, at
            next to no cost where reading weights is the bound.
        shared_up: ``[S, H]``.
        shared_down: ``[H, S]``.

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
        shared_gate=shared_gate,
        shared_up=shared_up,
        shared_down=shared_down,
    )


def bmm(
    a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype | None = None, rows_first: bool = False
) -> torch.Tensor:
    """``a[i] @ b[i]`` for each i, summed in float32 and rounded once.

    With ``rows_first`` it is what absorbed MLA needs between tokens and heads: ``bmm(x.transpose(0, 1),
    weight.transpose(1, 2), rows_first=True)`` is ``bhr,hdr->bhd``, and without the second transpose ``bhd,hdr->bhr``.

    Args:
        a: ``[B, M, K]``, float32, bfloat16 or float16. On a GPU the heads of tokens are read where they lie.
        b: ``[B, K, N]`` of the same dtype. Any strides are right for both, see :func:`gemm`.
        out_dtype: the dtype of the result: float32, or that of ``a`` (default).
        rows_first: the result is ``[M, B, N]``.

    Returns:
        ``[B, M, N]`` or ``[M, B, N]``, contiguous.

    Raises:
        ValueError: a wrong shape, dtype or device.
    """
    return torch.ops.deepinfer.bmm(a, b, out_dtype=out_dtype, rows_first=rows_first)


def bmm_(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """:func:`bmm` into ``out`` ``[B, M, N]``, float32 or of the dtype of ``a``, any strides.

    Raises:
        ValueError: as :func:`bmm`, with nothing written; also if ``out`` is expanded, has elements that share memory
            or shares memory with another argument.
        RuntimeError: ``out`` requires a gradient.
    """
    if torch.is_grad_enabled() and out.requires_grad:
        raise RuntimeError("bmm_: out is written without a gradient and must not require one")
    torch.ops.deepinfer.bmm_.default(out, a, b)


def grouped_outer(
    x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``out[e] = x[rows].T @ y[rows]`` over the rows ``offsets[e - 1] : offsets[e]``: the weight gradients of experts.

    Summed in float32 and rounded once. Groups may end anywhere; an empty one gives zeros.

    Args:
        x: ``[P, M]``, float32, bfloat16 or float16, rows sorted by expert.
        y: ``[P, N]`` of the same dtype.
        offsets: ``[E]`` int32, the end of each expert's rows: ascending, not negative, at most P.
        out_dtype: the dtype of the result: float32, or that of ``x`` (default).

    Returns:
        ``[E, M, N]``, contiguous.

    Raises:
        ValueError: a wrong shape, dtype or device; on CPU also offsets that descend, are negative or exceed P.
    """
    return torch.ops.deepinfer.grouped_outer(x, y, offsets, out_dtype=out_dtype)


def grouped_outer_(
    out: torch.Tensor, x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor, *, accumulate: bool = False
) -> None:
    """:func:`grouped_outer` into ``out`` ``[E, M, N]``, float32 or of the dtype of ``x``, any strides.

    With ``accumulate`` the products are added to what ``out`` holds, in float32 and rounded once.

    Raises:
        ValueError: as :func:`grouped_outer`, with nothing written; also if ``out`` is expanded, has elements that share
            memory or shares memory with another argument.
        RuntimeError: ``out`` requires a gradient.
    """
    if torch.is_grad_enabled() and out.requires_grad:
        raise RuntimeError("grouped_outer_: out is written without a gradient and must not require one")
    torch.ops.deepinfer.grouped_outer_.default(out, x, y, offsets, accumulate=accumulate)


def _check_device(op: str, argument: str, tensor: torch.Tensor, x: torch.Tensor) -> None:
    check(tensor.device == x.device, f"{op}: {argument} must be on the same device as the first argument")


def _check_like_x(op: str, argument: str, tensor: torch.Tensor, x: torch.Tensor, x_name: str = "x") -> None:
    check(
        tensor.dtype == x.dtype,
        f"{op}: {argument} must have the dtype of {x_name}, {name_of(x.dtype)}, got {name_of(tensor.dtype)}",
    )
    _check_device(op, argument, tensor, x)


def _check_bias(op: str, argument: str, bias: torch.Tensor | None, x: torch.Tensor, shape: list[int]) -> None:
    if bias is not None:
        check(list(bias.shape) == shape, f"{op}: {argument} must have shape {shape}, got {shape_of(bias)}")
        _check_like_x(op, argument, bias, x)


def _check_gemm(op, a, b, bias, result: torch.dtype) -> tuple[int, int]:
    check(
        result in (a.dtype, torch.float32),
        f"{op}: the dtype of the result must be float32 or that of a, {name_of(a.dtype)}, got {name_of(result)}",
    )
    check(a.dim() == 2, f"{op}: a must have shape [M, K], got {shape_of(a)}")
    check_float_dtype(op, "a", a.dtype)
    check(
        b.dim() == 2 and b.shape[0] == a.shape[1],
        f"{op}: b must have shape [{a.shape[1]}, N], got {shape_of(b)}",
    )
    _check_like_x(op, "b", b, a, "a")
    if bias is not None:
        check(list(bias.shape) == [b.shape[1]], f"{op}: bias must have shape [{b.shape[1]}], got {shape_of(bias)}")
        _check_result(op, "bias", bias, a, result)
    return a.shape[0], b.shape[1]


def _check_result(op: str, argument: str, tensor: torch.Tensor, a: torch.Tensor, result: torch.dtype) -> None:
    check(
        tensor.dtype == result,
        f"{op}: {argument} must have the dtype of the result, {name_of(result)}, got {name_of(tensor.dtype)}",
    )
    _check_device(op, argument, tensor, a)


@torch.library.register_fake("deepinfer::gemm")
def _gemm_meta(a, b, *, bias=None, c=None, scale=1.0, out_dtype=None):
    result = out_dtype or a.dtype
    rows, columns = _check_gemm("gemm", a, b, bias, result)
    if c is not None:
        check(list(c.shape) == [rows, columns], f"gemm: c must have shape [{rows}, {columns}], got {shape_of(c)}")
        _check_result("gemm", "c", c, a, result)
    return a.new_empty((rows, columns), dtype=result)


@torch.library.register_fake("deepinfer::gemm_")
def _gemm_inplace_meta(out, a, b, *, bias=None, scale=1.0, accumulate=False):
    rows, columns = _check_gemm("gemm_", a, b, bias, out.dtype)
    check_written("gemm_", "out", out, (rows, columns))
    _check_device("gemm_", "out", out, a)


def _check_bmm(op: str, a: torch.Tensor, b: torch.Tensor, result: torch.dtype) -> tuple[int, int, int]:
    check(
        result in (a.dtype, torch.float32),
        f"{op}: the dtype of the result must be float32 or that of a, {name_of(a.dtype)}, got {name_of(result)}",
    )
    check(a.dim() == 3, f"{op}: a must have shape [B, M, K], got {shape_of(a)}")
    check_float_dtype(op, "a", a.dtype)
    batch, rows, depth = a.shape
    check(
        b.dim() == 3 and b.shape[0] == batch and b.shape[1] == depth,
        f"{op}: b must have shape [{batch}, {depth}, N], got {shape_of(b)}",
    )
    _check_like_x(op, "b", b, a, "a")
    return batch, rows, b.shape[2]


@torch.library.register_fake("deepinfer::bmm")
def _bmm_meta(a, b, *, out_dtype=None, rows_first=False):
    result = out_dtype or a.dtype
    batch, rows, columns = _check_bmm("bmm", a, b, result)
    return a.new_empty((rows, batch, columns) if rows_first else (batch, rows, columns), dtype=result)


@torch.library.register_fake("deepinfer::bmm_")
def _bmm_inplace_meta(out, a, b):
    check_written("bmm_", "out", out, _check_bmm("bmm_", a, b, out.dtype))
    _check_device("bmm_", "out", out, a)


def _check_outer(op: str, x, y, offsets, result: torch.dtype) -> tuple[int, int, int]:
    check(
        result in (x.dtype, torch.float32),
        f"{op}: the dtype of the result must be float32 or that of x, {name_of(x.dtype)}, got {name_of(result)}",
    )
    check(x.dim() == 2, f"{op}: x must have shape [P, M], got {shape_of(x)}")
    check_float_dtype(op, "x", x.dtype)
    check(
        y.dim() == 2 and y.shape[0] == x.shape[0],
        f"{op}: y must have shape [{x.shape[0]}, N], got {shape_of(y)}",
    )
    _check_like_x(op, "y", y, x)
    check(offsets.dtype == torch.int32, f"{op}: offsets must be int32, got {name_of(offsets.dtype)}")
    check(offsets.dim() == 1, f"{op}: offsets must have shape [E], got {shape_of(offsets)}")
    _check_device(op, "offsets", offsets, x)
    return offsets.shape[0], x.shape[1], y.shape[1]


@torch.library.register_fake("deepinfer::grouped_outer")
def _grouped_outer_meta(x, y, offsets, *, out_dtype=None):
    result = out_dtype or x.dtype
    return x.new_empty(_check_outer("grouped_outer", x, y, offsets, result), dtype=result)


@torch.library.register_fake("deepinfer::grouped_outer_")
def _grouped_outer_inplace_meta(out, x, y, offsets, *, accumulate=False):
    check_written("grouped_outer_", "out", out, _check_outer("grouped_outer_", x, y, offsets, out.dtype))
    _check_device("grouped_outer_", "out", out, x)


def _check_grouped(op: str, x, weight, groups_name: str, groups, bias) -> torch.Tensor:
    check_float_dtype(op, "x", x.dtype)
    check(
        weight.dim() == 3 and weight.shape[1] == x.shape[-1],
        f"{op}: weight must have shape [E, {x.shape[-1]}, N], got {shape_of(weight)}",
    )
    _check_like_x(op, "weight", weight, x)
    experts, _, columns = weight.shape
    check(groups.dtype == torch.int32, f"{op}: {groups_name} must be int32, got {name_of(groups.dtype)}")
    check(
        groups.dim() == 1 and groups.shape[0] == experts,
        f"{op}: {groups_name} must have shape [{experts}], got {shape_of(groups)}",
    )
    _check_device(op, groups_name, groups, x)
    _check_bias(op, "bias", bias, x, [experts, columns])
    return x.new_empty((*x.shape[:-1], columns))


@torch.library.register_fake("deepinfer::grouped_mm")
def _grouped_mm_meta(x, weight, offsets, bias=None):
    check(x.dim() == 2, f"grouped_mm: x must have shape [P, K], got {shape_of(x)}")
    return _check_grouped("grouped_mm", x, weight, "offsets", offsets, bias)


def _check_masked(op: str, x, weight, counts, bias) -> torch.Tensor:
    check(x.dim() == 3, f"{op}: x must have shape [E, M, K], got {shape_of(x)}")
    out = _check_grouped(op, x, weight, "counts", counts, bias)
    check(
        x.shape[0] == weight.shape[0],
        f"{op}: x must have shape [{weight.shape[0]}, M, {x.shape[2]}], got {shape_of(x)}",
    )
    return out


@torch.library.register_fake("deepinfer::masked_mm")
def _masked_mm_meta(x, weight, counts, bias=None):
    return _check_masked("masked_mm", x, weight, counts, bias)


@torch.library.register_fake("deepinfer::masked_mm_")
def _masked_mm_inplace_meta(out, x, weight, counts, bias=None):
    expected = _check_masked("masked_mm_", x, weight, counts, bias)
    check_written("masked_mm_", "out", out, expected.shape)
    _check_like_x("masked_mm_", "out", out, x)


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
    shared_gate=None,
    shared_up=None,
    shared_down=None,
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
    _check_shared_expert(op, x, shared_gate, shared_up, shared_down)
    return x.new_empty((tokens, hidden))


def _check_shared_expert(op, x, gate, up, down):
    if gate is None and up is None and down is None:
        return
    check(
        gate is not None and up is not None and down is not None,
        f"{op}: shared_gate, shared_up and shared_down go together",
    )
    hidden = x.shape[1]
    check(
        gate.dim() == 2 and gate.shape[1] == hidden,
        f"{op}: shared_gate must have shape [S, {hidden}], got {shape_of(gate)}",
    )
    check(
        up.shape == gate.shape,
        f"{op}: shared_up must have the shape of shared_gate, {shape_of(gate)}, got {shape_of(up)}",
    )
    expected = [hidden, gate.shape[0]]
    check(list(down.shape) == expected, f"{op}: shared_down must have shape {expected}, got {shape_of(down)}")
    for name, weight in (("shared_gate", gate), ("shared_up", up), ("shared_down", down)):
        _check_like_x(op, name, weight, x)
