"""The k greatest elements of each row, without sorting it: one pass with a rising threshold, and a radix selection."""

import torch

from torch_deepinfer.ops.checks import check, check_float_dtype, name_of, shape_of

INDEX_DTYPES = (torch.int32, torch.int64)


def topk(
    x: torch.Tensor,
    k: int,
    lengths: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    *,
    sorted: bool = False,
    sorted_index: bool = False,
    index_dtype: torch.dtype | None = None,
    return_values: bool = True,
    page_table: torch.Tensor | None = None,
    page_size: int = 1,
    fill_index: int = -1,
    fill_value: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k`` greatest elements of each row and where they are.

    NaN of either sign is the greatest, -0 equals 0, and of equal elements those of the lower index are taken, on every
    device. So the result, its order included, follows from the input alone.

    Args:
        x: ``[..., N]``, float32, bfloat16 or float16, any strides, N below 2^31.
        k: how many, also more than N. On a GPU fast up to 4096, right beyond.
        lengths: ``[...]`` int32. Only the first ``lengths`` elements of a row take part, none if it is not positive,
            all if it exceeds N.
        offsets: ``[...]`` int32, added to the indices of a row.
        sorted: descending values, as ``torch.topk`` gives them.
        sorted_index: ascending indices. Without either, the order is some fixed one (now the same).
        index_dtype: int32 (default) or int64.
        return_values: False leaves the values out.
        page_table: ``[..., P]`` int32, P * page_size at least N. Index i becomes
            ``page_table[i // page_size] * page_size + i % page_size``, then the offset is added; a negative page gives
            ``fill_index``.
        page_size: elements of a page.
        fill_index: the index where a row has fewer than ``k`` elements.
        fill_value: the value there, -inf by default.

    Returns:
        ``(values [..., k] of the dtype of x, indices [..., k])``; values ``[0]`` without ``return_values``. Values are
        the very bits of the elements.

    Raises:
        ValueError: a wrong shape, dtype, device or k; both orders asked for; more than 2^30 sorted results on a GPU.
    """
    return torch.ops.deepinfer.topk.default(
        x,
        k,
        lengths,
        offsets,
        sorted=sorted,
        sorted_index=sorted_index,
        index_dtype=index_dtype,
        return_values=return_values,
        page_table=page_table,
        page_size=page_size,
        fill_index=fill_index,
        fill_value=fill_value,
    )


def _check_row_argument(name: str, t: torch.Tensor | None, x: torch.Tensor) -> None:
    if t is None:
        return
    check(t.device == x.device, f"topk: {name} must be on the same device as the first argument")
    check(t.dtype == torch.int32, f"topk: {name} must be int32, got {name_of(t.dtype)}")
    check(
        t.shape == x.shape[:-1],
        f"topk: {name} must have the shape of x without its last dimension, got {shape_of(t)} for x {shape_of(x)}",
    )


@torch.library.register_fake("deepinfer::topk")
def _topk_meta(
    x,
    k,
    lengths=None,
    offsets=None,
    *,
    sorted=False,
    sorted_index=False,
    index_dtype=None,
    return_values=True,
    page_table=None,
    page_size=1,
    fill_index=-1,
    fill_value=None,
):
    check(x.dim() >= 1, "topk: x must have at least one dimension")
    check_float_dtype("topk", "x", x.dtype)
    size = x.shape[-1]
    check(size < 2**31, f"topk: rows must have fewer than 2^31 elements, got {size}")
    check(0 <= k < 2**31, f"topk: k must lie in [0, 2^31), got {k}")
    check(not (sorted and sorted_index), "topk: sorted and sorted_index exclude each other")
    check(
        not (sorted and x.device.type == "cuda" and k > 2**30),
        f"topk: k must not exceed 2^30 for sorted results on a GPU, got {k}",
    )
    dtype = torch.int32 if index_dtype is None else index_dtype
    check(dtype in INDEX_DTYPES, f"topk: index_dtype must be int32 or int64, got {name_of(dtype)}")
    _check_row_argument("lengths", lengths, x)
    _check_row_argument("offsets", offsets, x)
    check(page_size >= 1, f"topk: page_size must be at least 1, got {page_size}")
    if page_table is not None:
        check(page_table.device == x.device, "topk: page_table must be on the same device as the first argument")
        check(page_table.dtype == torch.int32, f"topk: page_table must be int32, got {name_of(page_table.dtype)}")
        check(
            page_table.dim() == x.dim()
            and page_table.shape[:-1] == x.shape[:-1]
            and page_table.shape[-1] * page_size >= size,
            f"topk: page_table must have the leading dimensions of x and pages for {size} elements, "
            f"got {shape_of(page_table)} with page_size {page_size}",
        )
    shape = (*x.shape[:-1], k)
    return x.new_empty(shape if return_values else (0,)), x.new_empty(shape, dtype=dtype)
