"""Rotary position embedding: pairs of elements turned by an angle per position (Su et al., 2021, arXiv 2104.09864)."""

import torch

from torch_deepinfer.ops.checks import check, check_float_dtype, check_written, name_of, shape_of
from torch_deepinfer.ops.norm import check_norm, check_weight_form

STYLES = ("half", "interleaved", "interleaved_to_half")


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
    """Rotates the first ``rotary_dim`` elements of every row of ``q`` and ``k``; the others pass through.

    Args:
        q: ``[..., head_size]``, float32, bfloat16 or float16, any strides.
        k: ``[..., head_size]`` of the dtype of ``q``, or None. Its leading dimensions may differ from those of ``q``.
        cos: the cosines, float32, bfloat16 or float16, any strides (also the stride 2 of ``torch.view_as_real``). The
            last dimension is ``rotary_dim / 2``, one column a pair, or ``rotary_dim``, one column an output element.
            Without ``positions`` the leading dimensions broadcast to those of ``q`` and ``k``: ``[B, 1, S, columns]``
            for ``q`` of ``[B, heads, S, head_size]``.
        sin: the sines, of the shape and dtype of ``cos``.
        positions: int32 or int64, broadcast to the leading dimensions of ``q`` and of ``k`` (``[tokens, 1]`` for ``q``
            of ``[tokens, heads, head_size]``). ``cos`` and ``sin`` are then caches ``[rows, columns]``.
        style: which elements make a pair, with ``n = rotary_dim``.

            - ``"half"``: ``i`` and ``i + n/2`` (Llama, GPT-NeoX)
            - ``"interleaved"``: ``2i`` and ``2i + 1`` (GPT-J, and the product of complex numbers)
            - ``"interleaved_to_half"``: ``2i`` and ``2i + 1``, written to ``i`` and ``i + n/2`` (DeepSeek-V3)
        inverse: rotate by the negative angle. For ``"interleaved_to_half"`` the order of the outputs stays the same.
        rotary_dim: even, default ``head_size``.

    Returns:
        ``(q, k)`` rotated, contiguous, in their own dtype; the second one is empty, ``[0]``, if ``k`` is None.

    A pair ``(a, b)`` becomes ``(a cos - b sin, b cos + a sin)``. If the tables have the dtype of ``q``, each product
    and the sum are rounded to it, as in ``q * cos + rotate_half(q) * sin``; otherwise the arithmetic is float32 and
    only the result is rounded.

    Raises:
        ValueError: a wrong shape, dtype, device or style; on a CPU also a position outside the cache. On a GPU the
            rotated elements of such a row are NaN.
    """
    return torch.ops.deepinfer.rotary_embedding.default(q, k, cos, sin, positions, style, inverse, rotary_dim)


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
    """:func:`rotary_embedding` in place: ``q`` and ``k`` are overwritten. They may be slices of one fused tensor.

    Raises:
        ValueError: as :func:`rotary_embedding`, with nothing written; also if ``q`` or ``k`` is expanded or has
            elements that share memory with each other, with the other one, or with ``cos``, ``sin`` or ``positions``.
        RuntimeError: ``q`` or ``k`` requires a gradient.
    """
    if torch.is_grad_enabled() and (q.requires_grad or (k is not None and k.requires_grad)):
        raise RuntimeError("rotary_embedding_: q and k are written without a gradient and must not require one")
    torch.ops.deepinfer.rotary_embedding_.default(q, k, cos, sin, positions, style, inverse, rotary_dim)


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
    """RMS norm of every head of ``q`` and ``k`` (Qwen3, Gemma 3), then :func:`rotary_embedding`.

    The bits are those of :func:`rms_norm` and :func:`rotary_embedding` one after the other on the same device.

    Args:
        q_weight: ``[head_size]``, float32, bfloat16 or float16; None for ``weight_form="none"``.
        k_weight: the same for ``k``, of the dtype of ``q_weight``; None without ``k``.
        eps: added to the mean of squares, not negative.
        weight_form: as in :func:`rms_norm`.

    The other arguments are those of :func:`rotary_embedding`.

    Returns:
        ``(q, k)`` normed and rotated, contiguous, in the dtype that :func:`rms_norm` returns; the second one is empty,
        ``[0]``, if ``k`` is None.

    Raises:
        ValueError: as :func:`rms_norm` and :func:`rotary_embedding`.
    """
    return torch.ops.deepinfer.qk_norm_rope.default(
        q,
        k,
        q_weight,
        k_weight,
        cos,
        sin,
        eps,
        positions=positions,
        style=style,
        inverse=inverse,
        rotary_dim=rotary_dim,
        weight_form=weight_form,
    )


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
    """The heads of latent attention (DeepSeek-V2, arXiv 2405.04434): the last columns of q and of k are rotated.

    A head is ``nope + rope`` wide. One ``k_rope`` serves all heads of a token: it broadcasts over those of ``k_nope``.

    Args:
        q: ``[..., nope + rope]``, float32, bfloat16 or float16, any strides.
        k_nope: ``[..., nope]`` of the dtype of ``q``, such as a slice of what ``kv_b_proj`` returns. Its leading
            dimensions may differ from those of ``q``. None if the keys are put together elsewhere.
        k_rope: ``[..., rope]`` of the dtype of ``q``; the leading dimensions broadcast to those of ``k_nope``:
            ``[B, S, 1, rope]`` for ``[B, S, heads, nope]``. ``rope`` is even.

    The other arguments are those of :func:`rotary_embedding`, with ``rope`` for ``rotary_dim``; without ``positions``,
    ``cos`` and ``sin`` broadcast to the leading dimensions of ``q`` and of ``k_nope`` (of ``k_rope`` if that is None).

    Returns:
        ``(q, k)``, contiguous: ``q`` with its last ``rope`` columns rotated, and ``[..., nope + rope]`` of ``k_nope``
        and the rotated ``k_rope``, or that alone if ``k_nope`` is None. The bits are those of :func:`rotary_embedding`.

    Raises:
        ValueError: a wrong shape, dtype, device or style; on a CPU also a position outside the cache. On a GPU the
            rotated elements of such a row are NaN.
    """
    return torch.ops.deepinfer.mla_qk_rope.default(q, k_nope, k_rope, cos, sin, positions, style, inverse)


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
    """:func:`rotary_embedding` of q and k, with the rotated k and v written into caches: one launch at decode.

    Args:
        q: ``[batch, tokens, heads, head_size]``, float32, bfloat16 or float16, any strides.
        k: ``[batch, tokens, kv_heads, head_size]`` of the dtype of ``q``.
        v: ``[batch, tokens, kv_heads, value_size]`` of the dtype of ``q``.
        cos: as for :func:`rotary_embedding`: ``[batch, tokens, 1, columns]``, or a cache with ``positions``.
        key_cache: ``[batch, kv_heads, length, head_size]`` of the dtype of ``q``, any strides; is written.
        value_cache: ``[batch, kv_heads, length, value_size]``, the same.
        cache_position: int32 or int64, broadcasts to ``[batch, tokens]``: token ``t`` of sequence ``b`` goes to
            ``key_cache[b, :, cache_position[b, t]]``. Which of two tokens at one position stays there is not defined.

    The other arguments are those of :func:`rotary_embedding`.

    Returns:
        ``q`` rotated, contiguous. The bits, those in the caches included, are those of :func:`rotary_embedding`.

    Raises:
        ValueError: a wrong shape, dtype, device or style, with nothing written; also if a cache is expanded, has
            elements that share memory with each other or shares memory with another argument; on a CPU also a position
            outside of a cache. On a GPU nothing is written for a token whose ``cache_position`` is outside.
        RuntimeError: a cache requires a gradient.
    """
    _check_no_gradient("rotary_embedding_cache_", key_cache, value_cache)
    return torch.ops.deepinfer.rotary_embedding_cache_.default(
        q, k, v, cos, sin, key_cache, value_cache, cache_position, positions, style, inverse, rotary_dim
    )


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
    """:func:`qk_norm_rope` of q and k, with the result for k and v written into caches: one launch at decode.

    The arguments are those of :func:`qk_norm_rope` and :func:`rotary_embedding_cache_`; ``v`` and the caches have the
    dtype that :func:`rms_norm` returns.

    Returns:
        ``q`` normed and rotated, contiguous. The bits, those in the caches included, are those of
        :func:`qk_norm_rope`.

    Raises:
        ValueError: as :func:`qk_norm_rope` and :func:`rotary_embedding_cache_`, with nothing written.
        RuntimeError: a cache requires a gradient.
    """
    _check_no_gradient("qk_norm_rope_cache_", key_cache, value_cache)
    return torch.ops.deepinfer.qk_norm_rope_cache_.default(
        q,
        k,
        v,
        q_weight,
        k_weight,
        cos,
        sin,
        key_cache,
        value_cache,
        cache_position,
        eps,
        positions=positions,
        style=style,
        inverse=inverse,
        rotary_dim=rotary_dim,
        weight_form=weight_form,
    )


def _check_no_gradient(op: str, *caches: torch.Tensor) -> None:
    if torch.is_grad_enabled() and any(cache.requires_grad for cache in caches):
        raise RuntimeError(f"{op}: the caches are written without a gradient and must not require one")


def _check_broadcast(op: str, name: str, tensor: torch.Tensor, inner: int, x_name: str, x: torch.Tensor) -> None:
    given, wanted = tensor.shape[: tensor.dim() - inner], x.shape[:-1]
    fits = len(given) <= len(wanted)
    if fits and given:
        fits = all(g == 1 or g == w for g, w in zip(given, wanted[-len(given) :], strict=True))
    check(
        fits,
        f"{op}: {name} of shape {shape_of(tensor)} does not broadcast to the leading dimensions of {x_name}, "
        f"{shape_of(x)}",
    )


def _check_q(op, q, style) -> None:
    check(style in STYLES, f"{op}: style must be half, interleaved or interleaved_to_half, got {style}")
    check(q.dim() >= 1, f"{op}: q must have at least one dimension")
    check_float_dtype(op, "q", q.dtype)
    head_size = q.shape[-1]
    check(head_size <= 1 << 20, f"{op}: the last dimension of q must not exceed {1 << 20}, got {head_size}")


def _check(op, q, k, cos, sin, positions, style, rotary_dim) -> None:
    _check_q(op, q, style)
    head_size = q.shape[-1]
    n = head_size if rotary_dim is None else rotary_dim
    check(2 <= n <= head_size and n % 2 == 0, f"{op}: rotary_dim must be even and in [2, {head_size}], got {n}")
    if k is not None:
        check(
            k.dim() >= 1 and k.shape[-1] == head_size,
            f"{op}: k must have the last dimension of q, {head_size}, got {shape_of(k)}",
        )
        check(k.dtype == q.dtype, f"{op}: k must have the dtype of q, {name_of(q.dtype)}, got {name_of(k.dtype)}")
        check(k.device == q.device, f"{op}: k must be on the same device as the first argument")
    _check_angles(op, q, cos, sin, positions, n)
    _check_rows(op, cos, positions, {"q": q, "k": k})


def _check_angles(op, q, cos, sin, positions, n) -> None:
    check_float_dtype(op, "cos", cos.dtype)
    check(
        sin.dtype == cos.dtype, f"{op}: sin must have the dtype of cos, {name_of(cos.dtype)}, got {name_of(sin.dtype)}"
    )
    check(sin.shape == cos.shape, f"{op}: sin must have the shape of cos, {shape_of(cos)}, got {shape_of(sin)}")
    for name, table in (("cos", cos), ("sin", sin)):
        check(table.device == q.device, f"{op}: {name} must be on the same device as the first argument")
    columns = cos.shape[-1] if cos.dim() else 0
    check(
        columns == n or columns * 2 == n,
        f"{op}: the last dimension of cos must be rotary_dim or half of it, {n} or {n // 2}, got {shape_of(cos)}",
    )
    if positions is not None:
        check(cos.dim() == 2, f"{op}: with positions, cos must be a cache [rows, columns], got {shape_of(cos)}")
        check(
            positions.dtype in (torch.int32, torch.int64),
            f"{op}: positions must be int32 or int64, got {name_of(positions.dtype)}",
        )
        check(positions.device == q.device, f"{op}: positions must be on the same device as the first argument")


def _check_rows(op, cos, positions, rotated) -> None:
    for x_name, x in rotated.items():
        if x is None:
            continue
        if positions is not None:
            _check_broadcast(op, "positions", positions, 0, x_name, x)
        else:
            _check_broadcast(op, "cos", cos, 1, x_name, x)


@torch.library.register_fake("deepinfer::rotary_embedding")
def _rotary_embedding_meta(q, k, cos, sin, positions=None, style="half", inverse=False, rotary_dim=None):
    _check("rotary_embedding", q, k, cos, sin, positions, style, rotary_dim)
    return q.new_empty(q.shape), q.new_empty((0,) if k is None else k.shape)


@torch.library.register_fake("deepinfer::rotary_embedding_")
def _rotary_embedding_inplace_meta(q, k, cos, sin, positions=None, style="half", inverse=False, rotary_dim=None):
    op = "rotary_embedding_"
    _check(op, q, k, cos, sin, positions, style, rotary_dim)
    for name, x in (("q", q), ("k", k)):
        if x is not None:
            check_written(op, name, x, x.shape)


@torch.library.register_fake("deepinfer::qk_norm_rope")
def _qk_norm_rope_meta(
    q,
    k,
    q_weight,
    k_weight,
    cos,
    sin,
    eps,
    *,
    positions=None,
    style="half",
    inverse=False,
    rotary_dim=None,
    weight_form="cast_mul",
):
    op = "qk_norm_rope"
    _check(op, q, k, cos, sin, positions, style, rotary_dim)
    dtype = _check_norms(op, q, k, q_weight, k_weight, eps, weight_form)
    return q.new_empty(q.shape, dtype=dtype), q.new_empty(0 if k is None else k.shape, dtype=dtype)


def _check_norms(op, q, k, q_weight, k_weight, eps, weight_form) -> torch.dtype:
    """Returns the dtype of the normed rows."""
    check_weight_form(op, weight_form)
    dtype = check_norm(op, q, "q_weight", q_weight, eps, weight_form)
    if k is None:
        check(k_weight is None, f"{op}: k_weight must be None without k")
        return dtype
    check_norm(op, k, "k_weight", k_weight, eps, weight_form)
    if q_weight is not None:
        check(
            k_weight.dtype == q_weight.dtype,
            f"{op}: k_weight must have the dtype of q_weight, {name_of(q_weight.dtype)}, got {name_of(k_weight.dtype)}",
        )
    return dtype


@torch.library.register_fake("deepinfer::mla_qk_rope")
def _mla_qk_rope_meta(q, k_nope, k_rope, cos, sin, positions=None, style="half", inverse=False):
    op = "mla_qk_rope"
    _check_q(op, q, style)
    check(k_rope.dim() >= 1, f"{op}: k_rope must have at least one dimension")
    head_size, rope = q.shape[-1], k_rope.shape[-1]
    check(
        2 <= rope <= head_size and rope % 2 == 0,
        f"{op}: the last dimension of k_rope must be even and in [2, {head_size}], got {shape_of(k_rope)}",
    )
    if k_nope is not None:
        check(
            k_nope.dim() >= 1 and k_nope.shape[-1] == head_size - rope,
            f"{op}: the last dimension of k_nope must be that of q less that of k_rope, {head_size - rope}, "
            f"got {shape_of(k_nope)}",
        )
    for name, x in (("k_nope", k_nope), ("k_rope", k_rope)):
        if x is not None:
            check(
                x.dtype == q.dtype, f"{op}: {name} must have the dtype of q, {name_of(q.dtype)}, got {name_of(x.dtype)}"
            )
            check(x.device == q.device, f"{op}: {name} must be on the same device as the first argument")
    _check_angles(op, q, cos, sin, positions, rope)
    _check_rows(op, cos, positions, {"q": q})
    if k_nope is None:
        _check_rows(op, cos, positions, {"k_rope": k_rope})
        return q.new_empty(q.shape), q.new_empty(k_rope.shape)
    _check_broadcast(op, "k_rope", k_rope, 1, "k_nope", k_nope)
    _check_rows(op, cos, positions, {"k_nope": k_nope})
    return q.new_empty(q.shape), q.new_empty((*k_nope.shape[:-1], head_size))


def _check_caches(op, q, k, v, key_cache, value_cache, cache_position, dtype) -> None:
    check(q.dim() == 4, f"{op}: q must be [batch, tokens, heads, head_size], got {shape_of(q)}")
    batch, tokens = q.shape[:2]
    check(
        k.dim() == 4 and k.shape[:2] == q.shape[:2],
        f"{op}: k must have the batch and the tokens of q, got {shape_of(k)}",
    )
    check(
        v.dim() == 4 and v.shape[:3] == k.shape[:3],
        f"{op}: v must have the batch, the tokens and the heads of k, got {shape_of(v)}",
    )
    heads, length = k.shape[2], key_cache.shape[2] if key_cache.dim() == 4 else 0
    caches = {"key_cache": (key_cache, k.shape[3]), "value_cache": (value_cache, v.shape[3])}
    for name, (cache, width) in caches.items():
        check(
            cache.dim() == 4 and list(cache.shape) == [batch, heads, length, width],
            f"{op}: {name} must be [{batch}, {heads}, length, {width}], got {shape_of(cache)}",
        )
    for name, x in {"v": v, "key_cache": key_cache, "value_cache": value_cache}.items():
        check(
            x.dtype == dtype,
            f"{op}: {name} must have the dtype of the rotated k, {name_of(dtype)}, got {name_of(x.dtype)}",
        )
        check(x.device == q.device, f"{op}: {name} must be on the same device as the first argument")
    check(
        cache_position.dtype in (torch.int32, torch.int64),
        f"{op}: cache_position must be int32 or int64, got {name_of(cache_position.dtype)}",
    )
    check(cache_position.device == q.device, f"{op}: cache_position must be on the same device as the first argument")
    given = cache_position.shape
    check(
        len(given) <= 2 and all(g == 1 or g == w for g, w in zip(given, q.shape[2 - len(given) : 2], strict=True)),
        f"{op}: cache_position of shape {shape_of(cache_position)} does not broadcast to the batch and tokens, "
        f"[{batch}, {tokens}]",
    )
    for name, (cache, _) in caches.items():
        check_written(op, name, cache, cache.shape)


@torch.library.register_fake("deepinfer::rotary_embedding_cache_")
def _rotary_embedding_cache_meta(
    q,
    k,
    v,
    cos,
    sin,
    key_cache,
    value_cache,
    cache_position,
    positions=None,
    style="half",
    inverse=False,
    rotary_dim=None,
):
    op = "rotary_embedding_cache_"
    _check(op, q, k, cos, sin, positions, style, rotary_dim)
    _check_caches(op, q, k, v, key_cache, value_cache, cache_position, q.dtype)
    return q.new_empty(q.shape)


@torch.library.register_fake("deepinfer::qk_norm_rope_cache_")
def _qk_norm_rope_cache_meta(
    q,
    k,
    v,
    q_weight,
    k_weight,
    cos,
    sin,
    key_cache,
    value_cache,
    cache_position,
    eps,
    *,
    positions=None,
    style="half",
    inverse=False,
    rotary_dim=None,
    weight_form="cast_mul",
):
    op = "qk_norm_rope_cache_"
    _check(op, q, k, cos, sin, positions, style, rotary_dim)
    dtype = _check_norms(op, q, k, q_weight, k_weight, eps, weight_form)
    _check_caches(op, q, k, v, key_cache, value_cache, cache_position, dtype)
    return q.new_empty(q.shape, dtype=dtype)
