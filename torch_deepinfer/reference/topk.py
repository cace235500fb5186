"""Reference of the topk family."""

import torch


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
    """See :func:`torch_deepinfer.ops.topk`."""
    size = x.shape[-1]
    # Integers in the order of the floats: -0 equals 0, NaN of either sign is the greatest; what is absent comes last.
    bits = (x.float() + 0.0).view(torch.int32).long()
    key = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).masked_fill(x.isnan(), 2**31)
    present = torch.ones_like(x, dtype=torch.bool)
    if lengths is not None:
        present = torch.arange(size, device=x.device) < lengths.unsqueeze(-1)
        key = key.masked_fill(~present, -(2**40))
    order = key.sort(dim=-1, descending=True, stable=True).indices
    width = min(k, size)
    index = order[..., :width]
    found = present.gather(-1, index)
    if not sorted:  # absent ones are the last k anyway
        index = torch.where(found, index, size + torch.arange(width, device=x.device)).sort(-1).values
        found = index < size
        index = index.clamp(max=max(size - 1, 0))
    filled = torch.full((*x.shape[:-1], k), -torch.inf if fill_value is None else fill_value, device=x.device)
    values = filled.to(x.dtype)
    values[..., :width] = torch.where(found, x.gather(-1, index), values[..., :width])
    place = index
    if page_table is not None:
        page = page_table.long().gather(-1, index // page_size)
        found = found & (page >= 0)
        place = page * page_size + index % page_size
    if offsets is not None:
        place = place + offsets.unsqueeze(-1)
    indices = torch.full((*x.shape[:-1], k), fill_index, dtype=index_dtype or torch.int32, device=x.device)
    indices[..., :width] = torch.where(found, place, fill_index).to(indices.dtype)
    return (values if return_values else x.new_empty(0)), indices
