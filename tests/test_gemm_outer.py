import math

import pytest
import torch
from checking import assert_bit_equal, layouts, opcheck
from products import DTYPES, offsets_of, relative_error, rounding

from torch_deepinfer import ops
from torch_deepinfer.reference import gemm as reference

SIZES = [[5, 0, 3], [0, 0], [64, 128, 65], [1, 200, 63, 0, 130], [300]]


def exact(x: torch.Tensor, y: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    return torch.stack([a.t() @ b for a, b in zip(x.double().split(sizes), y.double().split(sizes), strict=True)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (24, 40), (136, 72), (600, 520), (33, 70)], ids=str)
@pytest.mark.parametrize("widened", [False, True])
def test_grouped_outer(device, dtype, sizes, shape, widened):
    x, y = (torch.randn(sum(sizes) + 9, n).to(dtype) for n in shape)
    expected = exact(x[: sum(sizes)], y[: sum(sizes)], sizes)
    x[sum(sizes) :], y[sum(sizes) :] = math.nan, math.inf  # rows of no expert
    given = (t.to(device) for t in (x, y, offsets_of(sizes)))
    out = ops.grouped_outer(*given, out_dtype=torch.float32 if widened else None)
    assert out.dtype == (torch.float32 if widened else dtype) and out.is_contiguous()
    assert relative_error(out, expected) < 2 * rounding(out.dtype)


def test_nan_stays_with_its_expert(device):
    x, y, sizes = torch.randn(130, 64).bfloat16(), torch.randn(130, 72).bfloat16(), [40, 50, 40]
    x[40:90], y[40:90] = math.nan, math.inf
    out = ops.grouped_outer(*(t.to(device) for t in (x, y, offsets_of(sizes)))).cpu()
    assert out[1].isnan().all() and not out[0].isnan().any() and not out[2].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("result", [None, torch.float32])
def test_accumulate(device, dtype, result):
    sizes = [70, 0, 90]
    x, y = torch.randn(160, 48).to(dtype), torch.randn(160, 200).to(dtype)
    out = torch.randn(3, 48, 200).to(result or dtype)
    expected = exact(x, y, sizes) + out.double()
    given = [t.to(device) for t in (out, x, y, offsets_of(sizes))]
    ops.grouped_outer_(*given, accumulate=True)
    assert relative_error(given[0], expected) < 2 * rounding(out.dtype)
    ops.grouped_outer_(*given)
    assert relative_error(given[0], exact(x, y, sizes)) < 2 * rounding(out.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(device, dtype):
    sizes = [30, 41]
    x, y = torch.randn(71, 48).to(dtype), torch.randn(71, 64).to(dtype)
    expected = exact(x, y, sizes)
    offsets = offsets_of(sizes, device)
    for name, view in layouts(x).items():
        assert relative_error(ops.grouped_outer(view.to(device), y.to(device), offsets), expected) < 2 * rounding(
            dtype
        ), name
    for name, view in layouts(y).items():
        assert relative_error(ops.grouped_outer(x.to(device), view.to(device), offsets), expected) < 2 * rounding(
            dtype
        ), name
    for name, out in layouts(torch.zeros(2, 48, 64).to(dtype)).items():
        given = out.to(device)
        ops.grouped_outer_(given, x.to(device), y.to(device), offsets)
        assert relative_error(given, expected) < 2 * rounding(dtype), name


def test_the_same_bits(device):
    x, y = torch.randn(500, 384, device=device).bfloat16(), torch.randn(500, 640, device=device).bfloat16()
    offsets = offsets_of([100, 333, 67], device)
    first = ops.grouped_outer(x, y, offsets)
    for _ in range(20):
        assert_bit_equal(ops.grouped_outer(x, y, offsets), first)


@pytest.mark.parametrize("shape", [(0, 4, 5, 2), (4, 0, 5, 2), (4, 5, 0, 2), (4, 5, 6, 0)], ids=str)
def test_empty(device, shape):
    rows, m, n, experts = shape
    offsets = torch.zeros(experts, dtype=torch.int32, device=device)
    out = ops.grouped_outer(torch.randn(rows, m, device=device), torch.randn(rows, n, device=device), offsets)
    assert_bit_equal(out, torch.zeros(experts, m, n))


def test_matches_reference():
    x, y, offsets = torch.randn(20, 8), torch.randn(20, 12), offsets_of([3, 17])
    torch.testing.assert_close(ops.grouped_outer(x, y, offsets), reference.grouped_outer(x, y, offsets))
    out, other = torch.ones(2, 8, 12), torch.ones(2, 8, 12)
    ops.grouped_outer_(out, x, y, offsets, accumulate=True)
    reference.grouped_outer_(other, x, y, offsets, accumulate=True)
    torch.testing.assert_close(out, other)


def test_opcheck(device):
    x, y = torch.randn(9, 16, device=device), torch.randn(9, 24, device=device)
    offsets = offsets_of([4, 5], device)
    opcheck(torch.ops.deepinfer.grouped_outer.default, (x, y, offsets))
    out = torch.zeros(2, 16, 24, device=device)
    opcheck(torch.ops.deepinfer.grouped_outer_.default, (out, x, y, offsets), {"accumulate": True})


ERRORS = [
    ({"x": torch.zeros(4)}, r"x must have shape \[P, M\], got \[4\]"),
    ({"y": torch.zeros(5, 6)}, r"y must have shape \[4, N\], got \[5, 6\]"),
    ({"y": torch.zeros(4, 6).half()}, "y must have the dtype of x, float32, got float16"),
    ({"offsets": torch.zeros(2)}, "offsets must be int32, got float32"),
    ({"out_dtype": torch.bfloat16}, "the dtype of the result must be float32 or that of x, float32, got bfloat16"),
]


@pytest.mark.parametrize(("change", "message"), ERRORS, ids=[message[:20] for _, message in ERRORS])
def test_errors(change, message):
    given = {"x": torch.zeros(4, 5), "y": torch.zeros(4, 6), "offsets": offsets_of([1, 3])} | change
    with pytest.raises(ValueError, match=message):
        ops.grouped_outer(**given)
    meta = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    with pytest.raises(ValueError, match=message):
        ops.grouped_outer(**meta)


@pytest.mark.parametrize("ends", [[3, 2], [-1, 4], [2, 5]], ids=str)
def test_impossible_offsets(ends):
    with pytest.raises(ValueError, match="offsets must"):
        ops.grouped_outer(torch.zeros(4, 5), torch.zeros(4, 6), torch.tensor(ends).int())
