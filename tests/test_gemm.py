import itertools
import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from checking import assert_bit_equal, layouts, opcheck
from products import DTYPES, assert_near, relative_error, rounding

from torch_deepinfer import ops
from torch_deepinfer.reference import gemm as reference

SHAPES = [(1, 1, 1), (3, 5, 7), (1, 640, 1024), (16, 136, 2112), (65, 130, 33), (128, 200, 577), (300, 264, 192)]


def on(device: str, given: dict) -> dict:
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in given.items()}


def difference(x: torch.Tensor, y: torch.Tensor) -> float:
    """1 - 2 x.y / (x.x + y.y)"""
    x, y = x.double().cpu(), y.double().cpu()
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("widened", [False, True])
def test_gemm_against_float64(device, dtype, shape, widened):
    m, n, k = shape
    a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    out = ops.gemm(a.to(device), b.to(device), out_dtype=torch.float32 if widened else None)
    exact = a.double() @ b.double()
    assert out.dtype == (torch.float32 if widened else dtype) and out.is_contiguous()
    assert relative_error(out, exact) < 2 * rounding(out.dtype)
    assert difference(out, exact) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("result", [None, torch.float32])
@pytest.mark.parametrize("options", [("bias",), ("c",), ("scale",), ("bias", "c", "scale")], ids="+".join)
@pytest.mark.parametrize("rows", [4, 150])
def test_gemm_options(device, dtype, result, options, rows):
    a, b = torch.randn(rows, 96).to(dtype), (torch.randn(96, 72) / 96**0.5).to(dtype)
    given = {"bias": torch.randn(72).to(result or dtype), "c": torch.randn(rows, 72).to(result or dtype), "scale": 0.3}
    given = {name: value for name, value in given.items() if name in options}
    out = ops.gemm(a.to(device), b.to(device), **on(device, given), out_dtype=result)
    assert_near(out.cpu(), reference.gemm(a, b, **given, out_dtype=result))


# One rounding: a bias that the product's own rounding would swallow.
def test_sum_and_bias_are_rounded_once(device):
    a, b = torch.full((2, 1), 1.0).bfloat16(), torch.full((1, 8), 1.0).bfloat16()
    half = torch.full((8,), 2.0**-8).bfloat16()  # half of the last place of 1
    c = torch.full((2, 8), 2.0**-8).bfloat16()
    out = ops.gemm(a.to(device), b.to(device), bias=half.to(device), c=c.to(device))
    assert (out == 1 + 2.0**-7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [9, 136])
def test_gemm_layouts(device, dtype, rows):
    given = {
        "a": torch.randn(rows, 72).to(dtype),
        "b": torch.randn(72, 40).to(dtype),
        "c": torch.randn(rows, 40).to(dtype),
    }
    expected = ops.gemm(**on(device, given))
    for name, tensor in given.items():
        for layout, view in layouts(tensor).items():
            # The copy to the device would make a layout dense; it is made there instead.
            moved = layouts(tensor.to(device))[layout]
            assert moved.stride() == view.stride()
            assert_bit_equal(ops.gemm(**on(device, given) | {name: moved}), expected, f"{name} {layout}")
    bias = torch.randn(40, 2, device=device).to(dtype)
    assert_bit_equal(
        ops.gemm(**on(device, given), bias=bias[:, 1]), ops.gemm(**on(device, given), bias=bias[:, 1].contiguous())
    )


# BitBLAS#33
def test_gemm_expanded_operands(device):
    row, column = torch.randn(1, 64, device=device), torch.randn(64, 1, device=device)
    a, b = row.expand(5, 64), (column / 8).expand(64, 9)
    assert_near(ops.gemm(a, b).cpu(), (row.cpu() @ column.cpu() / 8).expand(5, 9))
    assert_near(ops.gemm(a.bfloat16(), b.bfloat16()).cpu(), reference.gemm(a.bfloat16().cpu(), b.bfloat16().cpu()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 4, 5), (4, 0, 5), (4, 5, 0), (0, 0, 0)], ids=str)
def test_gemm_empty(device, dtype, shape):
    m, n, k = shape
    a, b = torch.randn(m, k, device=device).to(dtype), torch.randn(k, n, device=device).to(dtype)
    assert_bit_equal(ops.gemm(a, b), torch.zeros(m, n, dtype=dtype))
    bias, c = torch.randn(n, device=device).to(dtype), torch.randn(m, n, device=device).to(dtype)
    out = ops.gemm(a, b, bias=bias, c=c)
    expected = a.float() @ b.float() + bias.float() + c.float()
    assert_bit_equal(out, expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_stay_in_their_row_and_column(device, dtype):
    a, b = torch.randn(20, 70).to(device, dtype), torch.randn(70, 40).to(device, dtype)
    clean = ops.gemm(a, b)
    a[3, 69], b[0, 5] = math.nan, math.nan
    out = ops.gemm(a, b)
    assert out[3].isnan().all() and out[:, 5].isnan().all()
    rows, columns = [i for i in range(20) if i != 3], [i for i in range(40) if i != 5]
    assert_bit_equal(out[rows][:, columns], clean[rows][:, columns])


@pytest.mark.parametrize("shape", [(1, 512, 4096), (40, 256, 4096), (520, 640, 512)], ids=str)
def test_gemm_gives_the_same_bits_again(device, shape):
    m, n, k = shape
    a, b = torch.randn(m, k, device=device).bfloat16(), torch.randn(n, k, device=device).bfloat16().t()
    first = ops.gemm(a, b)
    for _ in range(20):
        assert_bit_equal(ops.gemm(a, b), first)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    m=st.integers(0, 70),
    n=st.integers(0, 70),
    k=st.integers(0, 150),
    dtype=st.sampled_from(DTYPES),
    transposed=st.tuples(st.booleans(), st.booleans()),
    options=st.sets(st.sampled_from(["bias", "c", "scale"])),
    seed=st.integers(0, 2**31),
)
def test_gemm_any_shape(m, n, k, dtype, transposed, options, seed):
    torch.manual_seed(seed)
    a = torch.randn(m, k).to(dtype) if not transposed[0] else torch.randn(k, m).to(dtype).t()
    b = ((torch.randn(k, n) if not transposed[1] else torch.randn(n, k).t()) / max(k, 1) ** 0.5).to(dtype)
    given = {"bias": torch.randn(n).to(dtype), "c": torch.randn(m, n).to(dtype), "scale": 0.1}
    given = {name: value for name, value in given.items() if name in options}
    assert_near(ops.gemm(a, b, **given), reference.gemm(a, b, **given))


# ---- gemm_ -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("result", [None, torch.float32])
def test_gemm_into(device, dtype, accumulate, result):
    a, b = torch.randn(37, 64).to(device, dtype), torch.randn(64, 48).to(device, dtype)
    bias, start = torch.randn(48).to(device, result or dtype), torch.randn(37, 48).to(device, result or dtype)
    expected = ops.gemm(a, b, bias=bias, c=start if accumulate else None, scale=0.5, out_dtype=result)
    for name, out in layouts(start.clone()).items():
        base = out if out._base is None else out._base
        untouched = torch.full_like(base, math.nan)
        out.copy_(start)
        base[:] = torch.where(base == 99, untouched, base)  # what layouts() puts around the values
        around = base.isnan()
        ops.gemm_(out, a, b, bias=bias, scale=0.5, accumulate=accumulate)
        assert_bit_equal(out, expected, name)
        assert_bit_equal(base.isnan(), around, name)  # nothing else was written


def test_gemm_into_refuses_shared_memory(device):
    a, b = torch.randn(8, 8, device=device), torch.randn(8, 8, device=device)
    kept = a.clone()
    for out in (
        torch.zeros(1, 8, device=device).expand(8, 8),
        torch.zeros(15, device=device).as_strided((8, 8), (1, 1)),
    ):
        with pytest.raises(ValueError, match="must not be expanded or have elements that share memory"):
            ops.gemm_(out, a, b)
    for out in (a, a.t(), b):
        with pytest.raises(ValueError, match="must not share memory with a, b or bias"):
            ops.gemm_(out, a, b)
    with pytest.raises(ValueError, match="must not share memory with a, b or bias"):
        ops.gemm_(out := torch.zeros(8, 8, device=device), a, b, bias=out[0])
    assert_bit_equal(a, kept)


def test_gemm_into_requires_no_gradient():
    out = torch.zeros(2, 2, requires_grad=True)
    with pytest.raises(RuntimeError, match="must not require one"):
        ops.gemm_(out, torch.ones(2, 3), torch.ones(3, 2))


ERRORS = [
    ({"a": torch.zeros(2, 3, 4)}, r"a must have shape \[M, K\], got \[2, 3, 4\]"),
    ({"a": torch.zeros(6, 4).double()}, "a must be float32, bfloat16 or float16, got float64"),
    ({"b": torch.zeros(5, 3)}, r"b must have shape \[4, N\], got \[5, 3\]"),
    ({"b": torch.zeros(4)}, r"b must have shape \[4, N\], got \[4\]"),
    ({"b": torch.zeros(4, 3).half()}, "b must have the dtype of a, float32, got float16"),
    ({"bias": torch.zeros(4)}, r"bias must have shape \[3\], got \[4\]"),
    ({"bias": torch.zeros(3).bfloat16()}, "bias must have the dtype of the result, float32, got bfloat16"),
]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *ERRORS,
        ({"c": torch.zeros(3, 6)}, r"c must have shape \[6, 3\], got \[3, 6\]"),
        ({"c": torch.zeros(6, 3).half()}, "c must have the dtype of the result, float32, got float16"),
        ({"out_dtype": torch.bfloat16}, "dtype of the result must be float32 or that of a, float32, got bfloat16"),
    ],
)
@pytest.mark.parametrize("meta", [False, True])
def test_gemm_errors(device, change, message, meta):
    given = {"a": torch.zeros(6, 4), "b": torch.zeros(4, 3)} | change
    with pytest.raises(ValueError, match=message):
        ops.gemm(**on("meta" if meta else device, given))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *ERRORS[2:],
        ({"out": torch.zeros(3, 6)}, r"out must have shape \[6, 3\], got \[3, 6\]"),
        ({"out": torch.zeros(6, 3).half()}, "dtype of the result must be float32 or that of a, float32, got float16"),
    ],
)
@pytest.mark.parametrize("meta", [False, True])
def test_gemm_into_errors(device, change, message, meta):
    given = {"out": torch.ones(6, 3), "a": torch.zeros(6, 4), "b": torch.zeros(4, 3)} | change
    given = on("meta" if meta else device, given)
    with pytest.raises(ValueError, match=message):
        ops.gemm_(**given)
    assert meta or (given["out"] != 0).all() or "out" in change


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemm_opcheck(device, dtype):
    a, b = torch.randn(6, 8).to(device, dtype), torch.randn(8, 5).to(device, dtype)
    bias, c = torch.randn(5, device=device), torch.randn(6, 5, device=device)
    op, into = torch.ops.deepinfer.gemm.default, torch.ops.deepinfer.gemm_.default
    opcheck(op, (a, b))
    opcheck(op, (a.t().contiguous().t(), b[:, :0]))
    opcheck(op, (a[:0], b), {"bias": bias, "c": c[:0], "out_dtype": torch.float32})
    opcheck(op, (a, b.t().contiguous().t()), {"bias": bias, "c": c, "scale": 2.0, "out_dtype": torch.float32})
    opcheck(into, (c.clone(), a, b), {"bias": bias, "accumulate": True})
    opcheck(into, (c.t().contiguous().t(), a, b))


# ---- the choice of tiles on a GPU ------------------------------------------------------------------------------------

TILINGS = [
    (64, 16, 1, 1, 0, 0, 1),
    (64, 32, 1, 4, 1, 0, 1),
    (64, 64, 1, 1, 0, 0, 2),
    (64, 128, 1, 2, 1, 0, 1),
    (64, 256, 1, 1, 0, 1, 1),
    (128, 64, 2, 8, 1, 0, 1),
    (128, 128, 2, 2, 0, 0, 1),
    (128, 192, 2, 1, 0, 1, 1),
    (128, 256, 2, 2, 0, 0, 1),
    (128, 256, 2, 2, 0, 1, 1),
    (256, 128, 2, 2, 0, 0, 1),
    (256, 128, 2, 4, 1, 0, 1),
    (144, 128, 2, 1, 0, 0, 1, True),
    (64, 128, 2, 2, 0, 0, 1, True),
    (128, 128, 2, 2, 1, 0, 1, True),
    (176, 128, 2, 2, 0, 0, 1, True),
    (256, 128, 2, 1, 0, 0, 1, True),
    (128, 128, 2, 2, 0, 0, 1, False, True),
    (128, 192, 2, 1, 0, 0, 1, False, True),
    (176, 128, 2, 1, 0, 0, 1, True, True),
    (192, 192, 3, 1, 0, 0, 1, True),
    (192, 192, 3, 2, 1, 0, 1, True),
]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_more_than_2_to_31_elements():
    a = torch.empty(2**31 // 4096 + 5, 64, dtype=torch.bfloat16, device="cuda").normal_()
    b = torch.empty(64, 4096, dtype=torch.bfloat16, device="cuda").normal_()
    out = ops.gemm(a, b)
    assert out.numel() > 2**31
    for part in (slice(0, 64), slice(len(a) - 64, len(a))):
        assert relative_error(out[part], a[part].double() @ b.double()) < 2 * rounding(out.dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("dense_k", [(True, True), (False, True), (True, False), (False, False)], ids=str)
def test_every_tiling(force_tiling, tiling, dense_k):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("tilings are of the Hopper kernel")
    share = tiling[1] // (1 if tiling[4] else tiling[3])
    if not dense_k[0] and share % 64 != 0:
        pytest.skip("tokens along the dense dimension come in 64s")
    if not dense_k[1] and tiling[0] % 64 != 0:
        pytest.skip("columns along the dense dimension come in 64s")
    force_tiling(*tiling)
    for m, n, k in ((328, 1000, 712), (72, 136, 1096), (8, 72, 64), (2000, 1920, 200)):
        a = torch.randn(m, k).bfloat16() if dense_k[0] else torch.randn(k, m).bfloat16().t()
        b = torch.randn(n, k).bfloat16().t() if dense_k[1] else torch.randn(k, n).bfloat16()
        c, bias = torch.randn(m, n), torch.randn(n)
        exact = a.double() @ b.double() + bias + c
        a, b, c, bias = (t.cuda() for t in (a, b, c, bias))
        assert relative_error(ops.gemm(a, b, c=c, bias=bias, out_dtype=torch.float32), exact) < 2e-6
        narrow = ops.gemm(a, b, c=c.bfloat16(), bias=bias.bfloat16())
        assert relative_error(narrow, exact) < 2 * rounding(torch.bfloat16)


@pytest.mark.parametrize("processors", [78, 132])
@pytest.mark.parametrize("experts", [0, 8, 256])
@pytest.mark.parametrize("e4m3", [False, True])
def test_tiling_is_one_that_the_kernel_has(experts, processors, e4m3):
    rows, columns = [1, 8, 17, 64, 100, 128, 300, 512, 1000, 4096, 100000], [1, 64, 256, 576, 2112, 7168, 129280]
    dense = [(True, True)] if e4m3 else [(True, True), (True, False), (False, True), (False, False)]
    for m, n, k, (weight_dense_k, x_dense_k), out_bytes in itertools.product(
        rows, columns, [1, 512, 7168], dense, [2, 4]
    ):
        shape = m, n, k, experts, weight_dense_k, x_dense_k, e4m3, out_bytes
        tiling = torch.ops.deepinfer._gemm_tiling(*shape, processors)
        tile_n, tile_m, warpgroups, stages, cluster, split, streamed, blocks, tokens_as_rows, in_turn, shared = tiling
        tall, across = (tile_m, tile_n) if tokens_as_rows else (tile_n, tile_m)
        tall //= 1 if in_turn else warpgroups
        assert tall in (64, 128) and across % 16 == 0 and across <= 256, shape
        registers = tall // 64 * across // 2 * (2 if e4m3 else 1)  # of sums and products
        assert registers <= (96 if warpgroups == 3 else 192), shape
        assert weight_dense_k or tile_n % 64 == 0, shape
        table = 4096 if experts else 0
        assert stages >= 3 and (shared + table + 512 + 1024) * blocks <= 228 * 1024, shape
        assert cluster in (1, 2, 4, 8) and (split or cluster <= 2), shape
        assert not (streamed and (split or experts or blocks > 1 or tokens_as_rows)), shape
        if split:
            assert tile_m % cluster == 0 and tile_m * tile_n * 4 <= stages * (tile_m + tile_n) * 128, shape
            assert not experts, shape
        elif not x_dense_k:
            assert tile_m // cluster % 64 == 0, shape
