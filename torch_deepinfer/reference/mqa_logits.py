"""Reference of the index logits of sparse attention."""

import torch


def mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    begins: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    """See :func:`torch_deepinfer.ops.mqa_logits`."""
    products = torch.einsum("shd,td->sht", q.float(), k.float())
    logits = torch.einsum("sht,sh->st", products.relu(), weights) * k_scale
    token = torch.arange(k.shape[0], device=k.device)
    seen = (token >= begins[:, None]) & (token < ends[:, None])
    return torch.where(seen, logits, -torch.inf)


def paged_mqa_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    max_length: int,
) -> torch.Tensor:
    """See :func:`torch_deepinfer.ops.paged_mqa_logits`."""
    batch, following, _, depth = q.shape
    pages, page_size, _ = cache.shape
    flat = cache.reshape(pages, -1)
    keys = flat[:, : page_size * depth].contiguous().view(q.dtype).view(pages, page_size, depth).float()
    scales = flat[:, page_size * depth :].contiguous().view(torch.float32)
    out = q.new_full((batch * following, max_length), -torch.inf, dtype=torch.float32)
    for b in range(batch):
        for n in range(following):
            row, length = b * following + n, int(lengths[b, n])
            token = torch.arange(length, device=q.device)
            page, at = page_table[b, token // page_size].long(), token % page_size
            products = q[b, n].float() @ keys[page, at].t()
            out[row, :length] = (products.relu() * weights[row, :, None]).sum(0) * scales[page, at]
    return out
