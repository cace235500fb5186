"""Attention of heads in two parts: the same as with the parts put together."""

import pytest
import torch
from checking import assert_bit_equal, opcheck

from torch_deepinfer import ops
from torch_deepinfer.reference import attention as reference


def parts(heads, key_heads, queries, keys, nope, rope, value, dtype, device, shared=True, batch=2):
    """query, key, value, query_rope, key_rope; the first three by token in memory."""

    def by_token(count, tokens, size):
        return torch.randn(batch, tokens, count, size, device=device).to(dtype).transpose(1, 2)

    kv = by_token(key_heads, keys, nope + value)
    q = by_token(heads, queries, nope + rope)
    key_rope = by_token(1 if shared else key_heads, keys, rope)
    return q[..., :nope], kv[..., :nope], kv[..., nope:], q[..., nope:].contiguous(), key_rope


def joined(query, key, query_rope, key_rope):
    return torch.cat([query, query_rope], -1), torch.cat([key, key_rope.expand(-1, key.shape[1], -1, -1)], -1)


SHAPES = [  # heads, key_heads, queries, keys, nope, rope, value
    (4, 4, 300, 300, 128, 64, 128),
    (4, 2, 257, 400, 128, 64, 128),
    (2, 2, 130, 130, 64, 64, 128),
    (3, 3, 1, 70, 128, 64, 128),
    (4, 1, 5, 33, 16, 8, 24),
    (2, 2, 90, 90, 96, 32, 128),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["all", "causal", "mask"])
@pytest.mark.parametrize("shared", [True, False])
def test_as_with_whole_heads(device, dtype, shape, kind, shared):
    query, key, value, query_rope, key_rope = parts(*shape, dtype, device, shared)
    options = {"causal": kind == "causal", "scale": 0.11 if shared else None}
    mask = torch.rand(shape[2], shape[3], device=device) < 0.7 if kind == "mask" else None
    out = ops.attention(query, key, value, mask, **options, query_rope=query_rope, key_rope=key_rope)
    whole = joined(query, key, query_rope, key_rope)
    assert_bit_equal(out, ops.attention(*whole, value, mask, **options))
    assert out.transpose(1, 2).is_contiguous()
    expected = reference.attention(query, key, value, mask, **options, query_rope=query_rope, key_rope=key_rope)
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-5 if dtype == torch.float32 else 3e-2)


def test_strides(device):
    query, key, value, query_rope, key_rope = parts(2, 2, 300, 300, 128, 64, 128, torch.bfloat16, device)
    odd = [torch.cat([t[..., :1], t], -1)[..., 1:] for t in (query, key, query_rope, key_rope)]
    expected = ops.attention(query, key, value, query_rope=query_rope, key_rope=key_rope, causal=True)
    actual = ops.attention(odd[0], odd[1], value, query_rope=odd[2], key_rope=odd[3], causal=True)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-2)


def test_empty(device):
    query, key, value, query_rope, key_rope = parts(2, 2, 0, 5, 16, 8, 16, torch.bfloat16, device)
    assert ops.attention(query, key, value, query_rope=query_rope, key_rope=key_rope).shape == (2, 2, 0, 16)
    query, key, value, query_rope, key_rope = parts(2, 2, 3, 0, 16, 8, 16, torch.bfloat16, device)
    assert not ops.attention(query, key, value, query_rope=query_rope, key_rope=key_rope).any()


def test_opcheck(device):
    query, key, value, query_rope, key_rope = parts(4, 2, 3, 5, 16, 8, 16, torch.bfloat16, device)
    op = torch.ops.deepinfer.attention.default
    opcheck(op, (query, key, value), {"query_rope": query_rope, "key_rope": key_rope})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_rope": None}, "query_rope and key_rope go together"),
        ({"query_rope": torch.zeros(2, 3, 8)}, r"query_rope must have shape \[batch, heads, queries, r\]"),
        ({"query_rope": torch.zeros(2, 4, 3, 7)}, "the last dimension of query_rope must be a multiple of 8"),
        ({"query_rope": torch.zeros(2, 4, 4, 8)}, r"the batch, heads and queries of query, \[2, 4, 3, r\]"),
        ({"query_rope": torch.zeros(2, 4, 3, 248)}, "at most 256 columns together, got 264"),
        ({"key_rope": torch.zeros(2, 3, 5, 8)}, r"key_rope must have shape \[2, 2 or 1, 5, 8\], got \[2, 3, 5, 8\]"),
        ({"key_rope": torch.zeros(2, 1, 5, 8).half()}, "key_rope must have the dtype of query, float32, got float16"),
    ],
)
@pytest.mark.parametrize("meta", [False, True])
def test_errors(device, change, message, meta):
    names = ("query", "key", "value", "query_rope", "key_rope")
    given = dict(zip(names, parts(4, 2, 3, 5, 16, 8, 16, torch.float32, device), strict=True)) | change
    given = {name: t if t is None else t.to("meta" if meta else device) for name, t in given.items()}
    with pytest.raises(ValueError, match=message):
        ops.attention(**given)
