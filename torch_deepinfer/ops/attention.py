"""Scaled dot-product attention (Vaswani et al., 2017, arXiv 1706.03762)."""

import torch

from torch_deepinfer.ops.checks import check, check_float_dtype, name_of, shape_of

MOST_DEPTH = 256


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
) -> torch.Tensor:
    """``softmax(scale * query @ key^T + mask) @ value`` for every head, with the arguments of torch's own attention.

    With ``query_rope`` and ``key_rope`` that of ``cat([query, query_rope], -1)`` and ``cat([key, key_rope], -1)``, as
    in latent attention, where only these columns are rotated and all heads may share those of the keys.

    Args:
        query: ``[batch, heads, queries, d]``, float32, bfloat16 or float16, any strides.
        key: ``[batch, key_heads, keys, d]`` of the dtype of ``query``. ``key_heads`` divides ``heads``: neighbouring
            heads of ``query`` share one.
        value: ``[batch, key_heads, keys, d_v]`` of the same dtype. ``d`` and ``d_v`` are multiples of 8 up to 256.
        mask: broadcast to ``[batch, heads, queries, keys]``. bool: True where a query sees a key. float32 or of the
            dtype of ``query``: added to the scores, and -inf hides a key.
        scale: of the scores; ``d ** -0.5`` by default, where ``d`` counts all columns.
        causal: query ``i`` sees the keys up to ``i``; without ``mask``.
        query_rope: ``[batch, heads, queries, r]`` of the dtype of ``query``, any strides.
        key_rope: ``[batch, key_heads or 1, keys, r]`` of the same dtype.

    Returns:
        ``[batch, heads, queries, d_v]`` of the dtype of ``query``, in memory ``[batch, queries, heads, d_v]``, so that
        ``transpose(1, 2).flatten(2)`` is a view.

    Scores, softmax and sums are float32; a GPU rounds the weights to the dtype of ``value``. A query that sees no key
    gets zeros. A key that no query of its batch sees takes no part, whatever it holds. Of one that some see, NaN or
    infinity in the value may reach the others: 0 times NaN is NaN.

    Raises:
        ValueError: a wrong shape, dtype or device, or both ``mask`` and ``causal``.
    """
    return torch.ops.deepinfer.attention.default(
        query, key, value, mask, scale=scale, causal=causal, query_rope=query_rope, key_rope=key_rope
    )


def _check_heads(name: str, tensor: torch.Tensor, shape: str) -> None:
    check(tensor.dim() == 4, f"attention: {name} must have shape {shape}, got {shape_of(tensor)}")
    depth = tensor.shape[3]
    check(
        8 <= depth <= MOST_DEPTH and depth % 8 == 0,
        f"attention: the last dimension of {name} must be a multiple of 8 up to {MOST_DEPTH}, got {depth}",
    )


def _check_like_query(name: str, tensor: torch.Tensor, query: torch.Tensor) -> None:
    check(
        tensor.dtype == query.dtype,
        f"attention: {name} must have the dtype of query, {name_of(query.dtype)}, got {name_of(tensor.dtype)}",
    )
    check(tensor.device == query.device, f"attention: {name} must be on the same device as the first argument")


def _check_mask(mask: torch.Tensor, query: torch.Tensor, keys: int) -> None:
    check(
        mask.dtype in (torch.bool, torch.float32, query.dtype),
        f"attention: mask must be bool, float32 or of the dtype of query, {name_of(query.dtype)}, "
        f"got {name_of(mask.dtype)}",
    )
    check(mask.device == query.device, "attention: mask must be on the same device as the first argument")
    wanted = [*query.shape[:3], keys]
    fits = mask.dim() <= 4 and all(
        size == 1 or size == whole for size, whole in zip(mask.shape, wanted[4 - mask.dim() :], strict=True)
    )
    check(fits, f"attention: mask must broadcast to {wanted}, got {shape_of(mask)}")


def _check_rope(query, key, query_rope, key_rope):
    check(query_rope is not None and key_rope is not None, "attention: query_rope and key_rope go together")
    _check_heads("query_rope", query_rope, "[batch, heads, queries, r]")
    batch, heads, queries, depth = query.shape
    key_heads, keys = key.shape[1:3]
    rope = query_rope.shape[3]
    check(
        query_rope.shape[:3] == query.shape[:3],
        f"attention: query_rope must have the batch, heads and queries of query, [{batch}, {heads}, {queries}, r], "
        f"got {shape_of(query_rope)}",
    )
    check(
        depth + rope <= MOST_DEPTH,
        f"attention: query and query_rope must have at most {MOST_DEPTH} columns together, got {depth + rope}",
    )
    check(
        key_rope.dim() == 4
        and key_rope.shape[0] == batch
        and key_rope.shape[1] in (key_heads, 1)
        and key_rope.shape[2:] == (keys, rope),
        f"attention: key_rope must have shape [{batch}, {key_heads} or 1, {keys}, {rope}], got {shape_of(key_rope)}",
    )
    _check_like_query("query_rope", query_rope, query)
    _check_like_query("key_rope", key_rope, query)


@torch.library.register_fake("deepinfer::attention")
def _attention_meta(query, key, value, mask=None, *, scale=None, causal=False, query_rope=None, key_rope=None):
    check_float_dtype("attention", "query", query.dtype)
    _check_heads("query", query, "[batch, heads, queries, d]")
    _check_heads("key", key, "[batch, key_heads, keys, d]")
    _check_heads("value", value, "[batch, key_heads, keys, d_v]")
    _check_like_query("key", key, query)
    _check_like_query("value", value, query)
    batch, heads, queries, depth = query.shape
    key_heads, keys = key.shape[1:3]
    check(
        key.shape[0] == batch and key.shape[3] == depth,
        f"attention: key must have the batch and the last dimension of query, {batch} and {depth}, got {shape_of(key)}",
    )
    check(
        value.shape[:3] == (batch, key_heads, keys),
        f"attention: value must have the batch, heads and keys of key, [{batch}, {key_heads}, {keys}, d_v], "
        f"got {shape_of(value)}",
    )
    check(
        key_heads > 0 and heads % key_heads == 0,
        f"attention: the heads of key must divide those of query, {heads}, got {key_heads}",
    )
    check(not (causal and mask is not None), "attention: causal attention takes no mask")
    if mask is not None:
        _check_mask(mask, query, keys)
    if query_rope is not None or key_rope is not None:
        _check_rope(query, key, query_rope, key_rope)
    return query.new_empty((batch, queries, heads, value.shape[3])).transpose(1, 2)
