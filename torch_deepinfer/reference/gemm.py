"""Reference of the gemm family."""

import torch
import torch.nn.functional as F


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See :func:`torch_deepinfer.ops.gemm`."""
    out = (a.float() @ b.float()) * scale
    if bias is not None:
        out = out + bias.float()
    if c is not None:
        out = out + c.float()
    return out.to(out_dtype or a.dtype)


def gemm_(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    accumulate: bool = False,
) -> None:
    """See :func:`torch_deepinfer.ops.gemm_`."""
    out.copy_(gemm(a, b, bias=bias, c=out if accumulate else None, scale=scale, out_dtype=out.dtype))


def bmm(
    a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype | None = None, rows_first: bool = False
) -> torch.Tensor:
    """See :func:`torch_deepinfer.ops.bmm`."""
    out = (a.float() @ b.float()).to(out_dtype or a.dtype)
    return out.transpose(0, 1).contiguous() if rows_first else out


def bmm_(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """See :func:`torch_deepinfer.ops.bmm_`."""
    out.copy_(bmm(a, b, out_dtype=out.dtype))


def grouped_mm(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """See :func:`torch_deepinfer.ops.grouped_mm`."""
    out = x.new_zeros(x.shape[0], weight.shape[2])
    begin = 0
    for expert, end in enumerate(offsets.tolist()):
        product = (x[begin:end].float() @ weight[expert].float()).to(x.dtype)
        out[begin:end] = product if bias is None else product + bias[expert]
        begin = end
    return out


def grouped_outer(
    x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """See :func:`torch_deepinfer.ops.grouped_outer`."""
    out = x.new_zeros(offsets.shape[0], x.shape[1], y.shape[1], dtype=out_dtype or x.dtype)
    begin = 0
    for expert, end in enumerate(offsets.tolist()):
        out[expert] = x[begin:end].float().t() @ y[begin:end].float()
        begin = end
    return out


def grouped_outer_(
    out: torch.Tensor, x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor, *, accumulate: bool = False
) -> None:
    """See :func:`torch_deepinfer.ops.grouped_outer_`."""
    product = grouped_outer(x, y, offsets, out_dtype=torch.float32)
    out.copy_(out.float() + product if accumulate else product)


def masked_mm(
    x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """See :func:`torch_deepinfer.ops.masked_mm`."""
    out = x.new_zeros(*x.shape[:2], weight.shape[2])
    for expert, count in enumerate(counts.tolist()):
        product = (x[expert, :count].float() @ weight[expert].float()).to(x.dtype)
        out[expert, :count] = product if bias is None else product + bias[expert]
    return out


def masked_mm_(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    counts: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> None:
    """See :func:`torch_deepinfer.ops.masked_mm_`."""
    result = masked_mm(x, weight, counts, bias)
    for expert, count in enumerate(counts.tolist()):
        out[expert, :count] = result[expert, :count]


def _activate(
    gate: torch.Tensor, up: torch.Tensor, activation: str, limit: float | None, alpha: float, up_offset: float
) -> torch.Tensor:
    if activation != "silu":
        return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if alpha == 1 and up_offset == 0:
        return F.silu(gate) * up
    return (up + up_offset) * (gate * torch.sigmoid(gate * alpha))


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
    """See :func:`torch_deepinfer.ops.fused_experts`."""
    total = x.new_zeros(x.shape, dtype=torch.float32)
    for j in range(topk_ids.shape[1]):
        for expert in range(gate_up.shape[0]):
            tokens = (topk_ids[:, j] == first_expert + expert).nonzero()[:, 0]
            hidden = (x[tokens].float() @ gate_up[expert].float().t()).to(x.dtype)
            if gate_up_bias is not None:
                hidden = hidden + gate_up_bias[expert]
            gate, up = (hidden[:, ::2], hidden[:, 1::2]) if interleaved else hidden.chunk(2, -1)
            y = _activate(gate, up, activation, limit, alpha, up_offset)
            y = (y.float() @ down[expert].float().t()).to(x.dtype)
            if down_bias is not None:
                y = y + down_bias[expert]
            total[tokens] += topk_weights[tokens, j, None].float() * y.float()
    out = total.to(x.dtype)
    if shared_gate is None or shared_up is None or shared_down is None:
        return out
    gate, up = ((x.float() @ weight.float().t()).to(x.dtype) for weight in (shared_gate, shared_up))
    y = _activate(gate, up, activation, limit, alpha, up_offset)
    return out + (y.float() @ shared_down.float().t()).to(x.dtype)
