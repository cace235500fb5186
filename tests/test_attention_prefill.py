"""Attention of many queries: on Hopper the kernel of its matrix unit."""

import pytest
import torch
import torch.nn.functional as F
from checking import assert_bit_equal
from products import relative_error

from torch_deepinfer import ops

DTYPES = [torch.bfloat16, torch.float16]
HEADS = [(64, 64), (128, 128), (192, 128)]  # sizes of the heads of queries and values

# batch, heads, heads of keys, queries, keys
SHAPES = [
    (1, 2, 2, 16, 16),
    (2, 3, 1, 17, 17),
    (1, 4, 2, 128, 128),
    (1, 2, 1, 129, 129),
    (3, 8, 2, 300, 300),
    (1, 2, 2, 200, 77),
    (2, 2, 1, 64, 513),
    (1, 2, 2, 255, 1024),
    (1, 3, 3, 700, 256),
]


def tensors(device, shape, sizes, dtype=torch.bfloat16):
    """As a model has them: a token's heads side by side."""
    batch, heads, shared, queries, keys = shape
    made = []
    for count, tokens, size in ((heads, queries, sizes[0]), (shared, keys, sizes[0]), (shared, keys, sizes[1])):
        made.append(torch.randn(batch, tokens, count, size, device=device).to(dtype).transpose(1, 2))
    return made


def exact(q, k, v, causal=False, scale=None):
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q.double(), k, v, is_causal=causal, scale=scale)


def assert_near(out, expected):
    assert out.shape == expected.shape and out.transpose(1, 2).is_contiguous()
    assert relative_error(out, expected) < {torch.bfloat16: 4e-3, torch.float16: 6e-4}[out.dtype]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sizes", HEADS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_shapes(device, shape, sizes, causal):
    for dtype in DTYPES:
        given = tensors(device, shape, sizes, dtype)
        assert_near(ops.attention(*given, causal=causal), exact(*given, causal))
        assert_near(ops.attention(*given, causal=causal, scale=0.3), exact(*given, causal, 0.3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("sizes", HEADS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_many_tokens(sizes, causal):
    """More items than processors; no larger an error than torch's own attention has."""
    given = tensors("cuda", (2, 24, 24, 1111, 1111), sizes)
    expected = exact(*given, causal)
    out = ops.attention(*given, causal=causal)
    theirs = F.scaled_dot_product_attention(*given, is_causal=causal)
    assert relative_error(out, expected) < 1.1 * relative_error(theirs, expected)
    for _ in range(10):
        assert_bit_equal(ops.attention(*given, causal=causal), out)


@pytest.mark.parametrize("causal", [False, True])
def test_layouts(device, causal):
    shape = (2, 4, 2, 200, 150)
    q, k, v = tensors(device, shape, (128, 128))
    expected = ops.attention(q, k, v, causal=causal)
    for name, change in {
        "dense": torch.Tensor.contiguous,
        "padded": lambda x: F.pad(x, (0, 8))[..., :128],
        "not aligned": lambda x: F.pad(x, (1, 3))[..., 1:129],
        "other order": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
        "not dense": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    }.items():
        assert relative_error(ops.attention(change(q), change(k), change(v), causal=causal), expected) < 4e-3, name
    one = k[:, :1].expand(-1, 4, -1, -1), v[:, :1].expand(-1, 4, -1, -1)
    assert_near(ops.attention(q, *one, causal=causal), exact(q, *one, causal))


def test_rows_do_not_depend_on_others(device):
    """Neither on the sequences beside them nor on tokens that are not seen."""
    q, k, v = tensors(device, (3, 4, 4, 333, 333), (192, 128))
    whole = ops.attention(q, k, v, causal=True)
    assert_bit_equal(ops.attention(q[1:2], k[1:2], v[1:2], causal=True), whole[1:2])
    short = ops.attention(q[:, :, :130], k[:, :, :130], v[:, :, :130], causal=True)
    assert relative_error(short, whole[:, :, :130]) < 4e-3


def test_what_no_query_sees_takes_no_part(device):
    q, k, v = tensors(device, (1, 2, 2, 100, 160), (128, 128))
    expected = ops.attention(q, k[:, :, :100], v[:, :, :100], causal=True)
    for worst in (float("nan"), float("inf")):
        k[:, :, 100:], v[:, :, 100:] = worst, worst
        assert_bit_equal(ops.attention(q, k, v, causal=True), expected)


def test_nan_and_infinity(device):
    q, k, v = tensors(device, (1, 2, 2, 150, 150), (128, 128))
    q[0, 0, 40, 3] = float("nan")
    v[0, 1, 60, 5] = float("inf")
    out = ops.attention(q, k, v, causal=True)
    assert out[0, 0, 40].isnan().all() and not out[0, 0, :40].isnan().any() and not out[0, 0, 41:].isnan().any()
    assert (out[0, 1, 60:, 5] == float("inf")).all()


@pytest.mark.parametrize("at", [0, 127, 128, 299])
def test_greatest_score_anywhere(device, at):
    """Scores up to some thousands, of which one dwarfs the others: the softmax neither overflows nor loses it."""
    q, k, v = tensors(device, (1, 1, 1, 130, 300), (64, 64))
    q[:] = q[:, :, :1]
    k[:, :, at] = 100 * q[0, 0, 0]
    assert_bit_equal(ops.attention(q, k, v, scale=1.0), v[:, :, at : at + 1].expand_as(q))
