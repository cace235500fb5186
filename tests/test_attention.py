import pytest
import torch
import torch.nn.functional as F
from checking import assert_bit_equal, layouts, opcheck
from hypothesis import given, settings
from hypothesis import strategies as st
from products import DTYPES, relative_error

from torch_deepinfer import ops
from torch_deepinfer.reference import attention as reference

INF = float("inf")

# batch, heads, heads of keys, queries, keys, size of a query, size of a value
SHAPES = [
    (1, 1, 1, 1, 1, 8, 8),
    (2, 4, 2, 1, 100, 64, 64),
    (3, 16, 16, 1, 130, 192, 128),
    (2, 8, 1, 3, 77, 128, 128),
    (1, 32, 2, 1, 300, 128, 128),
    (2, 6, 2, 5, 33, 80, 96),
    (1, 4, 4, 40, 40, 64, 64),
    (1, 2, 1, 1, 1500, 256, 256),
    (1, 20, 1, 9, 64, 72, 8),
]


def tensors(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    batch, heads, shared, queries, keys, depth, value_depth = shape
    q = torch.randn(batch, heads, queries, depth).to(dtype)
    k = torch.randn(batch, shared, keys, depth).to(dtype)
    return q, k, torch.randn(batch, shared, keys, value_depth).to(dtype)


def masks(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Tensor | None]:
    """Every kind of mask, of every form that models have."""
    batch, heads, _, queries, keys, _, _ = shape
    length = torch.randint(0, keys + 1, (batch,))
    seen = torch.rand(batch, heads, queries, keys) < 0.6
    cache = (torch.arange(keys) < length[:, None])[:, None, None]
    return {
        "none": None,
        "cache": cache,
        "expanded": cache.expand(batch, heads, queries, keys),
        "one": torch.rand(keys) < 0.5,
        "each": seen,
        "added": torch.where(seen[:, :1], torch.randn(batch, 1, queries, keys), -INF).to(dtype),
        "added in float32": torch.where(cache, 0.0, -INF),
        "smallest": torch.where(cache, 0.0, torch.finfo(dtype).min).to(dtype),
    }


def moved(device: str, *given: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [t if t is None else t.to(device) for t in given]


def assert_near(out: torch.Tensor, expected: torch.Tensor, message: str = "") -> None:
    """Weights and result are rounded once each; where there are no weights, there are zeros."""
    assert out.shape == expected.shape and out.dtype == expected.dtype, message
    out = out.cpu()
    assert_bit_equal(out.isnan(), expected.isnan(), message)
    zero = (expected == 0).all(-1)
    assert_bit_equal(out[zero], expected[zero], message)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}[out.dtype]
    torch.testing.assert_close(
        out, expected, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{message} {m}"
    )


EVERY_MASK = SHAPES[1:5]  # on a GPU, where each kind is compiled for each size
CASES = [(shape, dtype) for shape in SHAPES for dtype in DTYPES if dtype != torch.float16 or shape == SHAPES[3]]


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_attention(device, shape, dtype):
    q, k, v = tensors(shape, dtype)
    for name, mask in masks(shape, dtype).items():
        if device == "cuda" and shape not in EVERY_MASK and name not in ("none", "added"):
            continue
        out = ops.attention(*moved(device, q, k, v, mask))
        assert_near(out, reference.attention(q, k, v, mask), name)
        assert out.transpose(1, 2).is_contiguous()
    if device == "cuda" and shape not in EVERY_MASK:
        return
    for scale in (0.0, -0.3, 1.0):
        out = ops.attention(*moved(device, q, k, v), scale=scale, causal=True)
        assert_near(out, reference.attention(q, k, v, scale=scale, causal=True), f"causal, scale {scale}")


@settings(max_examples=15 if torch.cuda.is_available() else 60, deadline=None)
@given(data=st.data())
def test_any_shape(data):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    draw = data.draw
    # Sizes of heads are compiled in: few of them for a GPU.
    sizes = st.sampled_from([64, 136]) if device == "cuda" else st.integers(1, 32).map(lambda n: 8 * n)
    shared, group = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    shape = (draw(st.integers(0, 3)), shared * group, shared, draw(st.integers(0, 9)), draw(st.integers(0, 200)))
    shape += (draw(sizes), draw(sizes))
    dtype = draw(st.sampled_from(DTYPES))
    torch.manual_seed(draw(st.integers(0, 1000)))
    q, k, v = tensors(shape, dtype)
    name, mask = draw(st.sampled_from(list(masks(shape, dtype).items())))
    causal = mask is None and draw(st.booleans())
    out = ops.attention(*moved(device, q, k, v, mask), causal=causal)
    assert_near(out, reference.attention(q, k, v, mask, causal=causal), f"{name} {causal}")


@pytest.mark.parametrize("queries", [1, 4])
def test_is_torchs(device, queries):
    q, k, v = moved(device, *tensors((2, 8, 2, queries, 260, 64, 64), torch.bfloat16))
    mask = torch.rand(2, 1, queries, 260, device=device) < 0.7
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    assert relative_error(ops.attention(q, k, v, mask), expected) < 5e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(device, dtype):
    given = moved(device, *tensors((3, 4, 2, 2, 70, 64, 48), dtype), torch.rand(3, 4, 2, 70) < 0.7)
    expected = ops.attention(*given)
    for i in range(4):
        for name, view in layouts(given[i]).items():
            changed = list(given)
            changed[i] = view
            assert_near(ops.attention(*changed), expected.cpu(), f"{i} {name}")


def test_packed_projection(device):
    packed = torch.randn(2, 90, 12, 64, device=device).bfloat16().transpose(1, 2)
    q, k, v = packed[:, :8], packed[:, 8:10], packed[:, 10:]
    expected = reference.attention(q.cpu(), k.cpu(), v.cpu(), causal=True)
    assert_near(ops.attention(q, k, v, causal=True), expected)
    assert_near(ops.attention(q[:, :, -1:], k, v), reference.attention(q[:, :, -1:].cpu(), k.cpu(), v.cpu()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_nobody_sees_takes_no_part(device, dtype):
    q, k, v = tensors((2, 8, 2, 1, 150, 64, 64), dtype)
    seen = torch.rand(2, 1, 1, 150) < 0.5
    expected = ops.attention(*moved(device, q, k, v, seen))
    hidden = ~seen[:, 0, 0, :, None].expand(2, 150, 64)
    for worst in (float("nan"), INF, -INF, torch.finfo(dtype).max):
        poisoned = [torch.where(hidden[:, None], torch.tensor(worst, dtype=dtype), t) for t in (k, v)]
        assert_bit_equal(ops.attention(*moved(device, q, *poisoned, seen)), expected, str(worst))
        added = torch.where(seen, 0.0, -INF).to(dtype)
        assert_bit_equal(ops.attention(*moved(device, q, *poisoned, added)), expected, f"added {worst}")


def test_nan_and_infinity_that_are_seen(device):
    q, k, v = tensors((1, 2, 2, 1, 64, 64, 64), torch.bfloat16)
    q[0, 1, 0, 3] = float("nan")
    out = ops.attention(*moved(device, q, k, v))
    assert_near(out, reference.attention(q, k, v))
    assert out[0, 1].isnan().all() and not out[0, 0].isnan().any()
    q, k, v = tensors((1, 2, 2, 1, 64, 64, 64), torch.bfloat16)
    v[0, 0, 5, 7] = INF
    assert_near(ops.attention(*moved(device, q, k, v)), reference.attention(q, k, v))


def test_greatest_score_anywhere(device):
    """A score that dwarfs the others, in the first, a middle and the last place."""
    q, k, v = tensors((1, 1, 1, 1, 333, 64, 64), torch.bfloat16)
    for at in (0, 100, 332):
        mask = torch.zeros(333)
        mask[at] = 300.0
        out = ops.attention(*moved(device, q, k, v, mask)).cpu()
        assert_bit_equal(out[0, 0, 0], v[0, 0, at], str(at))


def test_same_bits_each_time(device):
    given = moved(device, *tensors((2, 8, 8, 1, 1024, 192, 128), torch.bfloat16))
    expected = ops.attention(*given)
    for _ in range(20):
        assert_bit_equal(ops.attention(*given), expected)


@pytest.mark.parametrize("shape", [(0, 2, 1, 3, 5, 8, 8), (2, 2, 1, 0, 5, 8, 8), (2, 2, 1, 3, 0, 8, 16)], ids=str)
def test_empty(device, shape):
    out = ops.attention(*moved(device, *tensors(shape, torch.bfloat16)))
    assert out.shape == (shape[0], 2, shape[3], shape[6]) and (out == 0).all()


def test_opcheck(device):
    q, k, v = moved(device, *tensors((2, 4, 2, 3, 20, 16, 8), torch.bfloat16))
    op = torch.ops.deepinfer.attention.default
    opcheck(op, (q, k, v), {"causal": True})
    opcheck(op, (q.transpose(1, 2).contiguous().transpose(1, 2), k, v, torch.rand(20, device=device) < 0.5))


def changed(**change: torch.Tensor) -> dict[str, torch.Tensor | None]:
    names = ("query", "key", "value", "mask")
    return dict(zip(names, (*tensors((2, 4, 2, 3, 20, 16, 8), torch.bfloat16), None), strict=True)) | change


ERRORS = [
    (changed(query=torch.zeros(4, 3, 16)), r"query must have shape \[batch, heads, queries, d\], got \[4, 3, 16\]"),
    (changed(query=torch.zeros(2, 4, 3, 16).double()), "query must be float32, bfloat16 or float16, got float64"),
    (changed(query=torch.zeros(2, 4, 3, 12).bfloat16()), "query must be a multiple of 8 up to 256, got 12"),
    (changed(value=torch.zeros(2, 2, 20, 264).bfloat16()), "value must be a multiple of 8 up to 256, got 264"),
    (changed(key=torch.zeros(2, 2, 20, 16)), "key must have the dtype of query, bfloat16, got float32"),
    (changed(key=torch.zeros(2, 2, 20, 8).bfloat16()), r"last dimension of query, 2 and 16, got \[2, 2, 20, 8\]"),
    (changed(value=torch.zeros(2, 2, 19, 8).bfloat16()), r"\[2, 2, 20, d_v\], got \[2, 2, 19, 8\]"),
    (
        changed(key=torch.zeros(2, 3, 20, 16).bfloat16(), value=torch.zeros(2, 3, 20, 8).bfloat16()),
        "the heads of key must divide those of query, 4, got 3",
    ),
    (changed(mask=torch.zeros(20).long()), "mask must be bool, float32 or of the dtype of query, bfloat16, got int64"),
    (changed(mask=torch.zeros(2, 20)), r"mask must broadcast to \[2, 4, 3, 20\], got \[2, 20\]"),
    (changed(mask=torch.zeros(20), causal=True), "causal attention takes no mask"),
]


@pytest.mark.parametrize(("given", "message"), ERRORS, ids=[message[:30] for _, message in ERRORS])
def test_errors(given, message):
    with pytest.raises(ValueError, match=message):
        ops.attention(**given)
    with pytest.raises(ValueError, match=message):
        ops.attention(**{k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in given.items()})
