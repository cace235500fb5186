import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from checking import assert_bit_equal, layouts, opcheck
from products import offsets_of, relative_error, rounding

from torch_deepinfer import ops
from torch_deepinfer.reference import gemm_fp8 as reference

SHAPES = [(1, 1, 1), (1, 512, 1024), (3, 72, 130), (64, 136, 576), (128, 200, 260), (300, 392, 640)]


def codes(*size: int) -> torch.Tensor:
    return torch.randn(*size).to(torch.float8_e4m3fn)


def blocks_in(size: int) -> int:
    return -(-size // 128)


def scales(*size: int) -> torch.Tensor:
    return torch.rand(*size) + 0.5


def exact(a, b, a_scale, b_scale) -> torch.Tensor:
    """In float64 throughout: the scales are spread by hand."""

    def spread(scale, rows, columns):
        out = torch.empty(rows, columns, dtype=torch.float64)
        for i in range(rows):
            for block in range(blocks_in(columns)):
                row = 0 if scale.shape[0] == 1 else i if scale.shape[0] == rows else i // 128
                column = 0 if scale.shape[1] == 1 else block
                out[i, block * 128 : (block + 1) * 128] = scale[row, column].double()
        return out

    a = a.double() * spread(a_scale, *a.shape)
    weight = b.t().double() * spread(b_scale.t(), b.shape[1], b.shape[0])
    return a @ weight.t()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("a_kind", ["groups", "rows", "tensor"])
@pytest.mark.parametrize("b_kind", ["blocks", "groups", "columns", "tensor"])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_fp8_gemm_against_float64(device, shape, a_kind, b_kind, out_dtype):
    m, n, k = shape
    a, b = codes(m, k), codes(n, k).t()
    a_scale = {"groups": scales(m, blocks_in(k)), "rows": scales(m, 1), "tensor": scales(1, 1)}[a_kind]
    b_scale = {
        "blocks": scales(blocks_in(n), blocks_in(k)).t(),
        "groups": scales(n, blocks_in(k)).t(),
        "columns": scales(1, n),
        "tensor": scales(1, 1),
    }[b_kind]
    out = ops.fp8_gemm(a.to(device), b.to(device), a_scale.to(device), b_scale.to(device), out_dtype=out_dtype)
    assert out.dtype == (out_dtype or torch.bfloat16) and out.is_contiguous()
    # The matrix unit of a GPU keeps about 13 bits while it sums 128 products.
    tolerance = 2 * rounding(out.dtype) + (1e-3 if device == "cuda" else 0)
    assert relative_error(out, exact(a, b, a_scale, b_scale)) < tolerance


def test_fp8_gemm_of_quantised_operands(device):
    a, weight = torch.randn(70, 520, device=device).bfloat16(), torch.randn(300, 520, device=device).bfloat16()
    a_codes, a_scale = (t.to(device) for t in ops.quantize_per_token_group(a.cpu(), 128))
    codes, scale = (t.to(device) for t in ops.quantize_per_block(weight.cpu(), [128, 128]))
    out = ops.fp8_gemm(a_codes, codes.t(), a_scale, scale.t())
    assert relative_error(out, a.double() @ weight.double().t()) < 0.05


# sglang#39193: nothing is cut off scales that are no power of two; powers of two may come as float8_e8m0fnu.
def test_scales_as_exponents(device):
    a, b = codes(5, 256).to(device), codes(40, 256).t().to(device)
    a_scale, b_scale = (2.0 ** torch.randint(-8, 8, size) for size in ((5, 2), (2, 1)))
    expected = ops.fp8_gemm(a, b, a_scale.to(device), b_scale.to(device))
    exponents = (t.to(torch.float8_e8m0fnu).to(device) for t in (a_scale, b_scale))
    assert_bit_equal(ops.fp8_gemm(a, b, *exponents), expected)


@pytest.mark.parametrize("rows", [3, 130])
def test_fp8_gemm_layouts(device, rows):
    a, b, a_scale, b_scale = codes(rows, 272), codes(272, 144), scales(rows, 3), scales(3, 2)
    given = [t.to(device) for t in (a, b, a_scale, b_scale)]
    expected = ops.fp8_gemm(*given)
    for i, tensor in enumerate(given):
        # torch cannot fill float8 views; their layouts are those of bytes
        as_bytes = tensor.view(torch.uint8) if i < 2 else tensor
        for name, view in layouts(as_bytes).items():
            changed = list(given)
            changed[i] = view.view(tensor.dtype)
            assert_bit_equal(ops.fp8_gemm(*changed), expected, f"{i} {name}")


@pytest.mark.parametrize("shape", [(0, 4, 5), (4, 0, 5), (4, 5, 0)], ids=str)
def test_fp8_gemm_empty(device, shape):
    m, n, k = shape
    a, b = codes(m, k).to(device), codes(k, n).to(device)
    out = ops.fp8_gemm(a, b, scales(m, blocks_in(k)).to(device), scales(blocks_in(k), blocks_in(n)).to(device))
    assert_bit_equal(out, torch.zeros(m, n, dtype=torch.bfloat16))


def test_nan_stays_in_its_row(device):
    a, b, a_scale, b_scale = (t.to(device) for t in (codes(20, 256), codes(144, 256).t(), scales(20, 2), scales(2, 2)))
    clean = ops.fp8_gemm(a, b, a_scale, b_scale)
    a.view(torch.uint8)[3, 200] = 0x7F
    a_scale[7, 0] = math.nan
    out = ops.fp8_gemm(a, b, a_scale, b_scale)
    assert out[3].isnan().all() and out[7].isnan().all()
    rest = [i for i in range(20) if i not in (3, 7)]
    assert_bit_equal(out[rest], clean[rest])


def test_every_code(device):
    a = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None].repeat(1, 16)
    a[:, 1:] = 0
    b = torch.ones(16, 8).to(torch.float8_e4m3fn)
    one = torch.ones(1, 1)
    out = ops.fp8_gemm(*(t.to(device) for t in (a, b, one, one)), out_dtype=torch.float32)
    assert_bit_equal(out, a[:, :1].float().expand(256, 8))


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(m=st.integers(0, 40), n=st.integers(0, 300), k=st.integers(0, 400), seed=st.integers(0, 2**31))
def test_fp8_gemm_any_shape(m, n, k, seed):
    torch.manual_seed(seed)
    given = codes(m, k), codes(k, n), scales(m, blocks_in(k)), scales(blocks_in(k), blocks_in(n))
    out = ops.fp8_gemm(*given, out_dtype=torch.float32)
    expected = reference.fp8_gemm(*given, out_dtype=torch.float32)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)


TILINGS = [
    (64, 64, 1, 2, 1, 0, 1, False),
    (64, 64, 1, 2, 1, 0, 1, True),
    (64, 128, 2, 4, 1, 0, 1, True),
    (128, 128, 2, 2, 0, 0, 1, False),
    (96, 128, 2, 1, 0, 0, 1, True),
    (128, 128, 2, 1, 0, 0, 1, True),
    (128, 128, 2, 2, 0, 0, 1, True),
    (160, 128, 2, 1, 0, 0, 1, True),
    (192, 128, 2, 2, 0, 0, 1, True),
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_every_tiling(force_tiling, tiling):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("tilings are of the Hopper kernel")
    force_tiling(*tiling)
    for m, n, k in ((328, 1000, 720), (72, 136, 1104), (8, 72, 64), (1000, 1600, 384)):
        a, b = codes(m, k), codes(n, k).t()
        a_scale, b_scale = scales(m, blocks_in(k)), scales(blocks_in(k), blocks_in(n))
        given = [t.cuda() for t in (a, b, a_scale, b_scale)]
        first = ops.fp8_gemm(*given)
        assert relative_error(first, exact(a, b, a_scale, b_scale)) < 2 * rounding(torch.bfloat16) + 1e-3, (m, n, k)
        wide = ops.fp8_gemm(*given, out_dtype=torch.float32)
        assert relative_error(wide, exact(a, b, a_scale, b_scale)) < 2e-3, (m, n, k)
        for _ in range(20):
            assert_bit_equal(ops.fp8_gemm(*given), first)
        ends = offsets_of([m // 3, 0, m - m // 3 - 5])
        weight, weight_scale = torch.stack([b.view(torch.uint8)] * 3).view(b.dtype), torch.stack([b_scale] * 3)
        out = ops.fp8_grouped_mm(given[0], *(t.cuda() for t in (weight, ends, a_scale, weight_scale)))
        assert relative_error(out[: m - 5], first[: m - 5]) < 2 * rounding(torch.bfloat16), (m, n, k)
        assert not out[m - 5 :].any()


# ---- grouped ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("sizes", [[5, 0, 3], [0, 0, 0], [0, 130, 0], [64, 129, 1]], ids=str)
def test_fp8_grouped_mm(device, columns, sizes):
    x, weight = codes(sum(sizes) + 2, 320), codes(3, 200, 320).transpose(1, 2)
    x_scale, weight_scale = scales(sum(sizes) + 2, 3), scales(3, 200 if columns else 2, 3).transpose(1, 2)
    offsets = offsets_of(sizes)
    expected = reference.fp8_grouped_mm(x, weight, offsets, x_scale, weight_scale)
    x.view(torch.uint8)[sum(sizes) :] = 0x7F  # NaN in rows of no expert
    poison = torch.full(expected.shape, math.nan, device=device)
    del poison
    given = (x, weight, offsets, x_scale, weight_scale)
    out = ops.fp8_grouped_mm(*(t.to(device) for t in given)).cpu()
    assert not out[sum(sizes) :].any()
    assert relative_error(out, expected) < 2 * rounding(torch.bfloat16)


@pytest.mark.parametrize("most", [1, 2, 8, 33, 65, 200])
def test_fp8_masked_mm(device, most):
    x, weight = codes(4, most, 256), codes(4, 128, 256).transpose(1, 2)
    x_scale, weight_scale = scales(4, most, 2), scales(4, 2, 1)
    counts = torch.tensor([most, 0, most // 2, 1], dtype=torch.int32)
    expected = reference.fp8_masked_mm(x, weight, counts, x_scale, weight_scale)
    outside = torch.arange(most)[None] >= counts[:, None]
    x_scale[outside] = math.nan
    given = (x, weight, counts, x_scale, weight_scale)
    given = tuple(t.to(device) for t in given)
    out = ops.fp8_masked_mm(*given).cpu()
    assert not out[outside].any()
    assert relative_error(out, expected) < 2 * rounding(torch.bfloat16)
    into = torch.full((4, 128, most), 7.0, device=device).bfloat16().transpose(1, 2)
    ops.fp8_masked_mm_(into, *given)
    assert_bit_equal(into.cpu(), torch.where(outside[..., None], 7.0, out.float()).bfloat16())


@pytest.mark.parametrize("offsets", [[3, 2], [-1, 2], [2, 7]], ids=str)
def test_bad_offsets_on_a_cpu(offsets):
    with pytest.raises(ValueError, match="offsets must"):
        ops.fp8_grouped_mm(
            codes(6, 16), codes(2, 16, 8), torch.tensor(offsets, dtype=torch.int32), scales(6, 1), scales(2, 1, 1)
        )


# ---- errors, opcheck -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.zeros(6, 200)}, "a must be float8_e4m3fn, got float32"),
        ({"a": codes(200)}, r"a must have shape \[M, K\], got \[200\]"),
        ({"b": codes(100, 3)}, r"b must have shape \[200, N\], got \[100, 3\]"),
        ({"b": torch.zeros(200, 300).half()}, "b must be float8_e4m3fn, got float16"),
        ({"a_scale": scales(6, 3)}, r"a_scale must have shape \[6 or 1, 2 or 1\], got \[6, 3\]"),
        ({"a_scale": scales(6)}, "a_scale must have shape"),
        ({"a_scale": scales(6, 2).half()}, "a_scale must be float32 or float8_e8m0fnu, got float16"),
        ({"b_scale": scales(3, 2)}, r"b_scale must have shape \[2 or 1, 300 or 3 or 1\], got \[3, 2\]"),
        ({"b_scale": scales(2, 3).double()}, "b_scale must be float32 or float8_e8m0fnu, got float64"),
        ({"out_dtype": torch.int32}, "out_dtype must be float32, bfloat16 or float16, got int32"),
    ],
)
@pytest.mark.parametrize("meta", [False, True])
def test_fp8_gemm_errors(device, change, message, meta):
    given = {"a": codes(6, 200), "b": codes(200, 300), "a_scale": scales(6, 2), "b_scale": scales(2, 3)} | change
    where = "meta" if meta else device
    with pytest.raises(ValueError, match=message):
        ops.fp8_gemm(**{k: v.to(where) if isinstance(v, torch.Tensor) else v for k, v in given.items()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(6, 200)}, "x must be float8_e4m3fn"),
        ({"weight": codes(2, 100, 8)}, r"weight must have shape \[E, 200, N\]"),
        ({"groups": torch.tensor([1, 2])}, "must be int32, got int64"),
        ({"groups": torch.tensor([1]).int()}, r"must have shape \[2\], got \[1\]"),
        ({"x_scale": scales(6, 1)}, "x_scale must have the leading shape of x and 2 columns"),
        ({"weight_scale": scales(2, 2, 5)}, r"weight_scale must have shape \[2 or 1, 2 or 1, 8 or 1 or 1\]"),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("meta", [False, True])
def test_fp8_grouped_errors(device, change, message, masked, meta):
    given = {
        "x": codes(6, 200),
        "weight": codes(2, 200, 8),
        "groups": torch.tensor([1, 2]).int(),
        "x_scale": scales(6, 2),
        "weight_scale": scales(2, 2, 1),
    } | change
    if masked:
        given["x"], given["x_scale"] = (given[name].unflatten(0, (2, 3)) for name in ("x", "x_scale"))
    with pytest.raises(ValueError, match=message):
        op = ops.fp8_masked_mm if masked else ops.fp8_grouped_mm
        op(*(t.to("meta" if meta else device) for t in given.values()))


def test_fp8_opcheck(device):
    a, b, a_scale, b_scale = (t.to(device) for t in (codes(6, 144), codes(144, 8), scales(6, 2), scales(2, 1)))
    opcheck(torch.ops.deepinfer.fp8_gemm.default, (a, b, a_scale, b_scale))
    opcheck(torch.ops.deepinfer.fp8_gemm.default, (a[:0], b, a_scale[:0], b_scale), {"out_dtype": torch.float32})
    groups = torch.tensor([3, 3], dtype=torch.int32, device=device)
    weight, weight_scale = b.expand(2, 144, 8).contiguous(), b_scale.expand(2, 2, 1).contiguous()
    opcheck(torch.ops.deepinfer.fp8_grouped_mm.default, (a, weight, groups, a_scale, weight_scale))
    masked = a.unflatten(0, (2, 3)), weight, groups, a_scale.unflatten(0, (2, 3)), weight_scale
    opcheck(torch.ops.deepinfer.fp8_masked_mm.default, masked)
    opcheck(torch.ops.deepinfer.fp8_masked_mm_.default, (torch.zeros(2, 3, 8, device=device), *masked))
