"""The index logits of sparse attention: which cached tokens a query should look at."""

import torch

from torch_deepinfer.ops.checks import check, name_of, shape_of

SCALE_BYTES = 4
DEPTHS = (32, 64, 128)


def mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    begins: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    """``out[s, t] = k_scale[t] * sum over h of weights[s, h] * relu(q[s, h] . k[t])`` for ``begins[s] <= t < ends[s]``.

    The lightning indexer of DeepSeek-V3.2 (arXiv:2512.02556): many heads of queries, one head of keys. The scale of a
    query's codes belongs into its weights. Sums are float32.

    Args:
        q: ``[S, H, D]`` float8_e4m3fn, D 32, 64 or 128. On a Hopper GPU D 128 with 32 or 64 heads is the fast case.
        k: ``[T, D]`` float8_e4m3fn.
        k_scale: ``[T]`` float32.
        weights: ``[S, H]`` float32.
        begins, ends: ``[S]`` int32, the tokens that each query may see, in [0, T].

    Returns:
        ``[S, T]`` float32, -inf for tokens outside ``[begins[s], ends[s])``.

    Raises:
        ValueError: a wrong shape, dtype or device; on CPU also a begin or end outside its range, which a GPU cuts off.
    """
    return torch.ops.deepinfer.mqa_logits(q, k, k_scale, weights, begins, ends)


def paged_mqa_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    max_length: int,
) -> torch.Tensor:
    """:func:`mqa_logits` of the last tokens of each request against its cached keys.

    Args:
        q: ``[B, N, H, D]`` float8_e4m3fn, N tokens of each of B requests; D 32, 64 or 128.
        cache: ``[pages, page_size, D + 4]`` uint8. A page is the float8_e4m3fn keys of all its tokens and then their
            float32 scales; the shape only counts the bytes.
        weights: ``[B * N, H]`` float32.
        lengths: ``[B, N]`` int32 in [0, max_length]: each query sees the tokens before its length.
        page_table: ``[B, P]`` int32, the pages of each request. Entries past its length are not used.
        max_length: the columns of the result, at most ``P * page_size``.

    Returns:
        ``[B * N, max_length]`` float32, -inf from each length on. On a GPU the logits of a page outside the cache are
        NaN.

    Raises:
        ValueError: a wrong shape, dtype or device; on CPU also a length or a page outside its range.
    """
    return torch.ops.deepinfer.paged_mqa_logits(q, cache, weights, lengths, page_table, max_length)


def _check(
    op: str, name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: list[int] | None, q: torch.Tensor
) -> None:
    check(tensor.dtype == dtype, f"{op}: {name} must be {name_of(dtype)}, got {name_of(tensor.dtype)}")
    if shape is not None:
        check(list(tensor.shape) == shape, f"{op}: {name} must have shape {shape}, got {shape_of(tensor)}")
    check(tensor.device == q.device, f"{op}: {name} must be on the same device as the first argument")


def _check_queries(op: str, q: torch.Tensor, shape: str) -> None:
    check(q.dim() == shape.count(",") + 1, f"{op}: q must have shape {shape}, got {shape_of(q)}")
    check(q.dtype == torch.float8_e4m3fn, f"{op}: q must be float8_e4m3fn, got {name_of(q.dtype)}")
    check(q.shape[-1] in DEPTHS, f"{op}: D must be 32, 64 or 128, got {q.shape[-1]}")


@torch.library.register_fake("deepinfer::mqa_logits")
def _mqa_logits_meta(q, k, k_scale, weights, begins, ends):
    op = "mqa_logits"
    _check_queries(op, q, "[S, H, D]")
    rows, heads, depth = q.shape
    check(k.dim() == 2, f"{op}: k must have shape [T, {depth}], got {shape_of(k)}")
    tokens = k.shape[0]
    _check(op, "k", k, torch.float8_e4m3fn, [tokens, depth], q)
    _check(op, "k_scale", k_scale, torch.float32, [tokens], q)
    _check(op, "weights", weights, torch.float32, [rows, heads], q)
    _check(op, "begins", begins, torch.int32, [rows], q)
    _check(op, "ends", ends, torch.int32, [rows], q)
    return q.new_empty((rows, tokens), dtype=torch.float32)


@torch.library.register_fake("deepinfer::paged_mqa_logits")
def _paged_mqa_logits_meta(q, cache, weights, lengths, page_table, max_length):
    op = "paged_mqa_logits"
    _check_queries(op, q, "[B, N, H, D]")
    batch, following, heads, depth = q.shape
    row = depth + SCALE_BYTES
    check(cache.dim() == 3, f"{op}: cache must have shape [pages, page_size, {row}], got {shape_of(cache)}")
    pages, page_size, _ = cache.shape
    _check(op, "cache", cache, torch.uint8, [pages, page_size, row], q)
    check(page_size > 0, f"{op}: the pages of cache must not be empty")
    _check(op, "weights", weights, torch.float32, [batch * following, heads], q)
    _check(op, "lengths", lengths, torch.int32, [batch, following], q)
    check(max_length >= 0, f"{op}: max_length must not be negative, got {max_length}")
    check(
        page_table.dim() == 2 and page_table.shape[0] == batch and page_table.shape[1] * page_size >= max_length,
        f"{op}: page_table must have shape [{batch}, P] with pages for max_length {max_length}, "
        f"got {shape_of(page_table)} with pages of {page_size}",
    )
    _check(op, "page_table", page_table, torch.int32, None, q)
    return q.new_empty((batch * following, max_length), dtype=torch.float32)
