"""Reference of the rope family."""

import torch

from torch_deepinfer.reference.norm import rms_norm


def _columns(table: torch.Tensor, rotary_dim: int, style: str) -> torch.Tensor:
    """One column for each output element."""
    if table.shape[-1] == rotary_dim:
        return table
    return table.repeat_interleave(2, -1) if style == "interleaved" else torch.cat([table, table], -1)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, style: str, rotary_dim: int) -> torch.Tensor:
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    cos, sin = _columns(cos, rotary_dim, style), _columns(sin, rotary_dim, style)
    if style == "half":
        a, b = turned.chunk(2, -1)
    else:
        a, b = turned[..., ::2], turned[..., 1::2]
    if style == "interleaved":
        turned, partner = turned, torch.stack([-b, a], -1).flatten(-2)
    else:
        turned, partner = torch.cat([a, b], -1), torch.cat([-b, a], -1)
    if cos.dtype != x.dtype:
        turned, partner, cos, sin = turned.float(), partner.float(), cos.float(), sin.float()
    return torch.cat([(turned * cos + partner * sin).to(x.dtype), rest], -1)


def rotary_embedding(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
    style: str = "half",
    inverse: bool = False,
    rotary_dim: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`torch_deepinfer.ops.rotary_embedding`."""
    if rotary_dim is None:
        rotary_dim = q.shape[-1]
    if positions is not None:
        cos, sin = cos[positions.long()], sin[positions.long()]
    if inverse:
        sin = -sin
    k_out = q.new_empty(0) if k is None else _rotate(k, cos, sin, style, rotary_dim)
    return _rotate(q, cos, sin, style, rotary_dim), k_out


def rotary_embedding_(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
    style: str = "half",
    inverse: bool = False,
    rotary_dim: int | None = None,
) -> None:
    """See :func:`torch_deepinfer.ops.rotary_embedding_`."""
    q_out, k_out = rotary_embedding(q, k, cos, sin, positions, style, inverse, rotary_dim)
    q.copy_(q_out)
    if k is not None:
        k.copy_(k_out)


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    *,
    positions: torch.Tensor | None = None,
    style: str = "half",
    inverse: bool = False,
    rotary_dim: int | None = None,
    weight_form: str = "cast_mul",
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`torch_deepinfer.ops.qk_norm_rope`."""
    q = rms_norm(q, q_weight, eps, weight_form)
    k = None if k is None else rms_norm(k, k_weight, eps, weight_form)
    return rotary_embedding(q, k, cos, sin, positions, style, inverse, rotary_dim)


def mla_qk_rope(
    q: torch.Tensor,
    k_nope: torch.Tensor | None,
    k_rope: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
    style: str = "half",
    inverse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`torch_deepinfer.ops.mla_qk_rope`."""
    q_nope, q_rope = q.split([q.shape[-1] - k_rope.shape[-1], k_rope.shape[-1]], -1)
    if k_nope is not None:
        k_rope = k_rope.expand(*k_nope.shape[:-1], -1)
    q_rope, k_rope = rotary_embedding(q_rope, k_rope, cos, sin, positions, style, inverse)
    return torch.cat([q_nope, q_rope], -1), k_rope if k_nope is None else torch.cat([k_nope, k_rope], -1)


def _write(cache: torch.Tensor, position: torch.Tensor, rows: torch.Tensor) -> None:
    """``rows[b, t]`` to ``cache[b, :, position[b, t]]``."""
    batch, tokens = rows.shape[:2]
    sequence = torch.arange(batch, device=rows.device)[:, None].expand(batch, tokens)
    cache[sequence, :, position.expand(batch, tokens).long()] = rows


def rotary_embedding_cache_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cache_position: torch.Tensor,
    positions: torch.Tensor | None = None,
    style: str = "half",
    inverse: bool = False,
    rotary_dim: int | None = None,
) -> torch.Tensor:
    """See :func:`torch_deepinfer.ops.rotary_embedding_cache_`."""
    q, k = rotary_embedding(q, k, cos, sin, positions, style, inverse, rotary_dim)
    _write(key_cache, cache_position, k)
    _write(value_cache, cache_position, v)
    return q


def qk_norm_rope_cache_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cache_position: torch.Tensor,
    eps: float,
    *,
    positions: torch.Tensor | None = None,
    style: str = "half",
    inverse: bool = False,
    rotary_dim: int | None = None,
    weight_form: str = "cast_mul",
) -> torch.Tensor:
    """See :func:`torch_deepinfer.ops.qk_norm_rope_cache_`."""
    q, k = rms_norm(q, q_weight, eps, weight_form), rms_norm(k, k_weight, eps, weight_form)
    return rotary_embedding_cache_(
        q, k, v, cos, sin, key_cache, value_cache, cache_position, positions, style, inverse, rotary_dim
    )
