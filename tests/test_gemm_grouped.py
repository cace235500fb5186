import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from checking import assert_bit_equal, layouts, opcheck
from products import DTYPES, assert_near, offsets_of, relative_error, rounding

from torch_deepinfer import ops
from torch_deepinfer.reference import gemm as reference


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 31, 64, 100, 577])
@pytest.mark.parametrize("n", [1, 7, 48, 131])
@pytest.mark.parametrize("with_bias", [False, True])
def test_grouped_mm_against_float64(device, dtype, k, n, with_bias):
    sizes = [1, 0, 5, 2, 19, 3, 300]
    x = torch.randn(sum(sizes), k).to(dtype)
    weight = torch.randn(len(sizes), n, k).to(dtype).transpose(1, 2)
    bias = torch.randn(len(sizes), n).to(dtype) if with_bias else None
    offsets = offsets_of(sizes)
    exact = torch.cat(
        [
            part.double() @ weight[e].double() + (bias[e].double() if with_bias else 0)
            for e, part in enumerate(x.split(sizes))
        ]
    )
    out = ops.grouped_mm(
        x.to(device), weight.to(device), offsets.to(device), bias.to(device) if bias is not None else None
    )
    assert out.dtype == dtype and out.is_contiguous()
    assert relative_error(out, exact) < 2 * rounding(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_mm_layouts(device, dtype):
    x = torch.randn(9, 40).to(dtype)
    weight = torch.randn(3, 24, 40).to(dtype)
    offsets = offsets_of([4, 0, 5], device)
    expected = ops.grouped_mm(x.to(device), weight.transpose(1, 2).to(device), offsets)
    assert relative_error(expected, reference.grouped_mm(x, weight.transpose(1, 2), offsets.cpu())) < rounding(dtype)
    for name, view in layouts(x).items():
        assert_bit_equal(ops.grouped_mm(view.to(device), weight.transpose(1, 2).to(device), offsets), expected, name)
    for name, view in layouts(weight).items():
        view = view.to(device).transpose(1, 2)
        assert_bit_equal(ops.grouped_mm(x.to(device), view, offsets), expected, name)
    bias = torch.randn(3, 24).to(dtype)
    expected = ops.grouped_mm(x.to(device), weight.transpose(1, 2).to(device), offsets, bias.to(device))
    for name, view in layouts(bias).items():
        actual = ops.grouped_mm(x.to(device), weight.transpose(1, 2).to(device), offsets, view.to(device))
        assert_bit_equal(actual, expected, name)
    strided_offsets = torch.stack([offsets, offsets - 9], 1)[:, 0]
    actual = ops.grouped_mm(x.to(device), weight.transpose(1, 2).to(device), strided_offsets, bias.to(device))
    assert_bit_equal(actual, expected)


# BitBLAS#33: weights that are .t() views, slices and stride-0 expansions.
def test_grouped_mm_weight_views(device):
    x, base = torch.randn(3, 64, device=device), torch.randn(64, 8, device=device)
    offsets = offsets_of([3], device)
    for weight in (base, base.t().contiguous().t()):
        assert relative_error(ops.grouped_mm(x, weight[None], offsets), x.cpu() @ base.cpu()) < 1e-6
    wide = torch.randn(8, 96, device=device)
    out = ops.grouped_mm(x, wide[:, 16:80].t()[None], offsets)
    assert relative_error(out, x.cpu() @ wide.cpu()[:, 16:80].t()) < 1e-6
    row = torch.randn(1, 64, device=device)
    out = ops.grouped_mm(x, row.expand(8, 64).t()[None], offsets)
    assert relative_error(out, (x.cpu() @ row.cpu().t()).expand(3, 8)) < 1e-6
    column = torch.randn(64, 1, device=device)[:1].expand(64, 8)  # stride 0 along k as well
    assert relative_error(ops.grouped_mm(x, column[None], offsets), x.cpu() @ column.cpu()) < 1e-5
    shared = base[None].expand(2, 64, 8)
    out = ops.grouped_mm(x, shared, offsets_of([1, 2], device))
    assert relative_error(out, x.cpu() @ base.cpu()) < 1e-6


# grouped_gemm#36, MSLK#158, pytorch#172439, DeepGEMM#20: experts without rows, nothing left uninitialised.
@pytest.mark.parametrize("sizes", [[5, 0, 3], [0, 0, 0], [0, 8, 0], [0, 0, 8], [8, 0, 0]])
def test_grouped_mm_experts_without_rows(device, sizes):
    x = torch.randn(8, 4, device=device)
    weight = torch.randn(3, 4, 2, device=device)
    for expert, size in enumerate(sizes):
        if size == 0:
            weight[expert] = math.nan  # never read
    poison = torch.full((8, 2), math.nan, device=device)
    del poison
    offsets = offsets_of(sizes, device)
    out = ops.grouped_mm(x, weight, offsets).cpu()
    expected = reference.grouped_mm(x.cpu(), weight.cpu(), offsets.cpu())
    torch.testing.assert_close(out, expected)
    assert not out[sum(sizes) :].any()


# DeepGEMM#268: a tile of rows must not reach into the next expert.
@pytest.mark.parametrize("size", [1, 3, 8, 16, 32, 33])
def test_grouped_mm_tile_stays_in_its_expert(device, size):
    x = torch.randn(4 * size, 32, device=device)
    weight = torch.zeros(4, 32, 5, device=device)
    weight[1] = math.inf
    weight[3] = 1
    out = ops.grouped_mm(x, weight, offsets_of([size] * 4, device)).cpu()
    assert not out[:size].any() and not out[2 * size : 3 * size].any()
    torch.testing.assert_close(out[3 * size :], x[3 * size :].sum(1, keepdim=True).expand(size, 5).cpu())


def test_grouped_mm_rows_past_the_last_offset_are_zeros(device):
    x = torch.full((6, 16), math.nan, device=device)
    x[:2] = 1
    out = ops.grouped_mm(x, torch.ones(2, 16, 3, device=device), offsets_of([1, 1], device)).cpu()
    assert (out[:2] == 16).all() and (out[2:] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_stay_in_their_row(device, dtype):
    x = torch.randn(10, 70).to(device, dtype)
    weight = torch.randn(2, 70, 9).to(device, dtype)
    offsets = offsets_of([5, 5], device)
    clean = ops.grouped_mm(x, weight, offsets)
    x[2, 69], x[7, 3] = math.nan, math.inf
    out = ops.grouped_mm(x, weight, offsets)
    assert out[2].isnan().all() and not out[7].isfinite().any()
    rest = [0, 1, 3, 4, 5, 6, 8, 9]
    assert_bit_equal(out[rest], clean[rest])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 8, 5, 3), (4, 0, 5, 3), (4, 8, 0, 3), (4, 8, 5, 0)])
def test_grouped_mm_empty(device, dtype, shape):
    p, k, n, e = shape
    x, weight = torch.randn(p, k, device=device).to(dtype), torch.randn(e, k, n, device=device).to(dtype)
    bias = torch.randn(e, n, device=device).to(dtype)
    offsets = torch.full((e,), p, dtype=torch.int32, device=device)
    expected = torch.zeros(p, n, dtype=dtype)
    assert_bit_equal(ops.grouped_mm(x, weight, offsets), expected)
    if k == 0:
        expected = bias[:1].expand(p, n)
    assert_bit_equal(ops.grouped_mm(x, weight, offsets, bias), expected)


# The answer to a token is the same in any batch: sums run along k alone.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [95, 2048])
def test_a_row_does_not_depend_on_the_others(device, dtype, k):
    x = torch.randn(301, k).to(device, dtype)
    weight = torch.randn(1, 50, k).to(device, dtype).transpose(1, 2)
    whole = ops.grouped_mm(x, weight, offsets_of([301], device))
    for rows in (slice(0, 1), slice(5, 7), slice(3, 6), slice(100, 117), slice(298, 301)):
        part = ops.grouped_mm(x[rows], weight, offsets_of([rows.stop - rows.start], device))
        assert_bit_equal(part, whole[rows])


@hypothesis.settings(max_examples=80, deadline=None)
@hypothesis.given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    k=st.integers(1, 150),
    n=st.integers(1, 60),
    tail=st.integers(0, 3),
    dtype=st.sampled_from(DTYPES),
    dense_k=st.booleans(),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_grouped_mm_any_shape(sizes, k, n, tail, dtype, dense_k, with_bias, seed):
    torch.manual_seed(seed)
    x = torch.randn(sum(sizes) + tail, k).to(dtype)
    weight = (torch.randn(len(sizes), n, k) / k**0.5).to(dtype).transpose(1, 2)
    bias = torch.randn(len(sizes), n).to(dtype) if with_bias else None
    offsets = offsets_of(sizes)
    out = ops.grouped_mm(x, weight if dense_k else weight.contiguous(), offsets, bias)
    assert_near(out, reference.grouped_mm(x, weight, offsets, bias))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 3, 4)}, r"x must have shape \[P, K\], got \[2, 3, 4\]"),
        ({"x": torch.zeros(6, 4).double()}, "x must be float32, bfloat16 or float16, got float64"),
        ({"weight": torch.zeros(2, 5, 3)}, r"weight must have shape \[E, 4, N\], got \[2, 5, 3\]"),
        ({"weight": torch.zeros(4, 3)}, "weight must have shape"),
        ({"weight": torch.zeros(2, 4, 3).half()}, "weight must have the dtype of x, float32, got float16"),
        ({"offsets": torch.tensor([2, 6])}, "offsets must be int32, got int64"),
        ({"offsets": offsets_of([2, 2, 2])}, r"offsets must have shape \[2\], got \[3\]"),
        ({"bias": torch.zeros(3)}, r"bias must have shape \[2, 3\], got \[3\]"),
        ({"bias": torch.zeros(2, 3).bfloat16()}, "bias must have the dtype of x"),
    ],
)
@pytest.mark.parametrize("meta", [False, True])
def test_grouped_mm_errors(device, change, message, meta):
    given = {"x": torch.zeros(6, 4), "weight": torch.zeros(2, 4, 3), "offsets": offsets_of([2, 4]), "bias": None}
    given |= change
    with pytest.raises(ValueError, match=message):
        ops.grouped_mm(**{k: v if v is None else v.to("meta" if meta else device) for k, v in given.items()})


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([3, 2], "ascending and not negative, got 2 after 3"),
        ([-1, 2], "ascending and not negative, got -1 after 0"),
        ([2, 7], "must not exceed the 6 rows of x, got 7"),
    ],
)
def test_grouped_mm_bad_offsets(offsets, message):
    with pytest.raises(ValueError, match=message):
        ops.grouped_mm(torch.zeros(6, 4), torch.zeros(2, 4, 3), torch.tensor(offsets, dtype=torch.int32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_mm_opcheck(device, dtype):
    x = torch.randn(6, 8).to(device, dtype)
    weight = torch.randn(3, 8, 5).to(device, dtype)
    bias = torch.randn(3, 5).to(device, dtype)
    offsets, none = offsets_of([1, 3, 2], device), offsets_of([0, 0, 0], device)
    column_major = x.t().contiguous().t()
    for args in (
        (x, weight, offsets),
        (x, weight.transpose(1, 2).contiguous().transpose(1, 2), offsets, bias),
        (column_major, weight, offsets, bias),
        (x[:1], weight, none),
        (x[:0], weight, none, bias),
    ):
        opcheck(torch.ops.deepinfer.grouped_mm.default, args)


# ---- masked_mm -------------------------------------------------------------------------------------------------------


# DeepGEMM#268, DeepGEMM#20: fewer rows than a tile, experts without rows, anything in the rows that do not count.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("most", [1, 2, 8, 33, 65, 300])
@pytest.mark.parametrize("with_bias", [False, True])
def test_masked_mm(device, dtype, most, with_bias):
    x, weight = torch.randn(4, most, 256).to(dtype), torch.randn(4, 128, 256).to(dtype).transpose(1, 2)
    counts = torch.tensor([most, 0, most // 2, 1], dtype=torch.int32)
    bias = torch.randn(4, 128).to(dtype) if with_bias else None
    expected = reference.masked_mm(x, weight, counts, bias)
    valid = torch.arange(most)[None] < counts[:, None]
    x[~valid] = math.nan
    weight.transpose(1, 2)[1] = math.nan  # of an expert without rows
    poison = torch.full((4, most, 128), math.nan, device=device)
    del poison
    bias = bias.to(device) if with_bias else None
    out = ops.masked_mm(x.to(device), weight.to(device), counts.to(device), bias).cpu()
    assert out.is_contiguous() and not out[~valid].any()
    assert relative_error(out[valid], expected[valid]) < rounding(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_mm_equals_grouped_mm(device, dtype):
    x, weight = torch.randn(3, 50, 72).to(device, dtype), torch.randn(3, 72, 40).to(device, dtype)
    counts = torch.tensor([50, 7, 20], dtype=torch.int32, device=device)
    out = ops.masked_mm(x, weight, counts)
    rows = torch.cat([x[e, :n] for e, n in enumerate(counts.tolist())])
    expected = ops.grouped_mm(rows, weight, counts.cumsum(0).int())
    assert_bit_equal(torch.cat([out[e, :n] for e, n in enumerate(counts.tolist())]), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_mm_layouts(device, dtype):
    x, weight = torch.randn(3, 9, 40).to(dtype), torch.randn(3, 40, 24).to(dtype)
    counts = torch.tensor([9, 0, 4], dtype=torch.int32, device=device)
    expected = ops.masked_mm(x.to(device), weight.to(device), counts)
    for name, view in layouts(x).items():
        assert_bit_equal(ops.masked_mm(view.to(device), weight.to(device), counts), expected, name)
    for name, view in layouts(weight).items():
        assert_bit_equal(ops.masked_mm(x.to(device), view.to(device), counts), expected, name)
    assert_bit_equal(ops.masked_mm(x.to(device), weight.to(device), torch.stack([counts, counts], 1)[:, 1]), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_mm_into_leaves_other_rows(device, dtype):
    x, weight = torch.randn(3, 9, 40).to(device, dtype), torch.randn(3, 40, 24).to(device, dtype)
    counts = torch.tensor([9, 0, 4], dtype=torch.int32, device=device)
    expected = ops.masked_mm(x, weight, counts)
    expected[torch.arange(9, device=device)[None] >= counts[:, None]] = 7
    for name, out in layouts(torch.full((3, 9, 24), 7.0).to(device, dtype)).items():
        ops.masked_mm_(out, x, weight, counts)
        assert_bit_equal(out, expected, name)
    for out in (x[..., :24], torch.zeros(1, 9, 24, device=device).to(dtype).expand(3, 9, 24)):
        with pytest.raises(ValueError, match="out is written and must not"):
            ops.masked_mm_(out, x, weight, counts)


@pytest.mark.parametrize("shape", [(0, 4, 8, 5), (3, 0, 8, 5), (3, 4, 0, 5), (3, 4, 8, 0)])
def test_masked_mm_empty(device, shape):
    e, m, k, n = shape
    x, weight = torch.randn(e, m, k, device=device), torch.randn(e, k, n, device=device)
    counts = torch.full((e,), m // 2, dtype=torch.int32, device=device)
    out = ops.masked_mm(x, weight, counts)
    assert out.shape == (e, m, n) and not out[:, m // 2 :].any()
    assert_bit_equal(ops.masked_mm(x, weight, counts * 0), torch.zeros(e, m, n))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(6, 4)}, r"x must have shape \[E, M, K\], got \[6, 4\]"),
        ({"x": torch.zeros(3, 6, 4)}, r"x must have shape \[2, M, 4\], got \[3, 6, 4\]"),
        ({"weight": torch.zeros(2, 5, 3)}, r"weight must have shape \[E, 4, N\], got \[2, 5, 3\]"),
        ({"counts": torch.zeros(2)}, "counts must be int32, got float32"),
        ({"counts": torch.zeros(3).int()}, r"counts must have shape \[2\], got \[3\]"),
        ({"bias": torch.zeros(2, 4)}, r"bias must have shape \[2, 3\], got \[2, 4\]"),
    ],
)
@pytest.mark.parametrize("meta", [False, True])
def test_masked_mm_errors(device, change, message, meta):
    counts = torch.zeros(2, dtype=torch.int32)
    given = {"x": torch.zeros(2, 6, 4), "weight": torch.zeros(2, 4, 3), "counts": counts, "bias": None} | change
    with pytest.raises(ValueError, match=message):
        ops.masked_mm(**{k: v if v is None else v.to("meta" if meta else device) for k, v in given.items()})


@pytest.mark.parametrize("count", [-1, 7])
def test_masked_mm_bad_counts(count):
    with pytest.raises(ValueError, match=rf"counts must lie in \[0, 6\], got {count}"):
        ops.masked_mm(torch.zeros(2, 6, 4), torch.zeros(2, 4, 3), torch.tensor([6, count], dtype=torch.int32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_mm_opcheck(device, dtype):
    x, weight = torch.randn(2, 5, 8).to(device, dtype), torch.randn(2, 8, 6).to(device, dtype)
    counts = torch.tensor([5, 2], dtype=torch.int32, device=device)
    opcheck(torch.ops.deepinfer.masked_mm.default, (x, weight, counts))
    opcheck(torch.ops.deepinfer.masked_mm.default, (x[:, :0], weight, counts * 0, torch.randn(2, 6).to(x)))
    opcheck(torch.ops.deepinfer.masked_mm_.default, (torch.randn(2, 5, 6).to(x), x, weight, counts))
