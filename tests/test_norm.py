import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from checking import assert_bit_equal, layouts, opcheck

from torch_deepinfer import ops
from torch_deepinfer.reference import norm as reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS = ["cast_mul", "mul_cast", "one_plus", "none"]


def exact(x: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    # The order of the sum of squares is free: one unit in the last place of the storage type.
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("hidden_size", [1, 15, 576, 1031])
def test_matches_reference(device, form, dtype, weight_dtype, hidden_size):
    x = torch.randn(3, 5, hidden_size, device=device).to(dtype)
    residual = torch.randn(3, 5, hidden_size, device=device).to(dtype)
    weight = None if form == "none" else torch.randn(hidden_size, device=device).to(weight_dtype)
    actual = ops.rms_norm(x, weight, 1e-6, form)
    expected = reference.rms_norm(x, weight, 1e-6, form)
    assert actual.dtype == expected.dtype
    close(actual, expected)
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-6, form)
    assert_bit_equal(total, x + residual)
    assert_bit_equal(normed, ops.rms_norm(x + residual, weight, 1e-6, form))


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(device, dtype):
    x = torch.randn(4, 6, 40).to(dtype)
    weight = torch.randn(40, device=device).to(dtype)
    expected = ops.rms_norm(x.to(device), weight, 1e-5)
    for name, view in layouts(x).items():
        assert_bit_equal(ops.rms_norm(view.to(device), weight, 1e-5), expected, name)
    strided_weight = torch.stack([weight, weight], -1)[:, 0]
    assert_bit_equal(ops.rms_norm(x.to(device), strided_weight, 1e-5), expected)
    expanded = x[:1].expand(4, 6, 40).to(device)
    assert_bit_equal(ops.rms_norm(expanded, weight, 1e-5)[3], expected[0])


# A row's result depends on its values alone: not on its neighbours, nor on alignment and strides.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_size", [24, 576, 2048, 7168, 40000])
def test_rows_are_independent(device, dtype, hidden_size):
    x, residual = (torch.randn(5, hidden_size, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(hidden_size, device=device).to(dtype)
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-6)
    shifted = torch.empty(5, hidden_size + 9, device=device, dtype=dtype)[:, 9:]
    shifted.copy_(x)
    assert_bit_equal(ops.add_rms_norm(shifted, residual, weight, 1e-6)[0], normed)
    assert_bit_equal(ops.add_rms_norm(x[3:4], residual[3:4], weight, 1e-6)[0], normed[3:4])
    heads = torch.empty(2, hidden_size, 5, device=device, dtype=dtype).transpose(1, 2)
    heads.copy_(total)
    assert_bit_equal(ops.rms_norm(heads, weight, 1e-6)[1], normed)
    wide = torch.empty(5, 3, hidden_size, device=device, dtype=dtype)
    wide.copy_(total[:, None])
    assert_bit_equal(ops.rms_norm(wide[:, 1:], weight, 1e-6)[:, 0], normed)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("width", [4096, 6144])
def test_more_than_2_to_31_elements(width):
    rows, hidden_size = 2**31 // 4096 + 5, 4096
    storage = torch.empty(rows, width, dtype=torch.bfloat16, device="cuda")
    x = storage[:, width - hidden_size :]
    x.normal_()
    out = ops.rms_norm(x, None, 1e-6, "none")
    assert out.numel() > 2**31
    for part in (slice(0, 3), slice(rows // 2, rows // 2 + 3), slice(rows - 3, rows)):
        assert_bit_equal(out[part], ops.rms_norm(x[part], None, 1e-6, "none"))


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    shape=st.lists(st.integers(0, 5), min_size=0, max_size=4),
    hidden_size=st.integers(1, 70),
    order=st.randoms(use_true_random=False),
    form=st.sampled_from(FORMS),
)
def test_any_shape_and_permutation(shape, hidden_size, order, form):
    x = torch.randn(*shape, hidden_size)
    dims = list(range(x.dim()))
    order.shuffle(dims)
    inverse = [dims.index(d) for d in range(x.dim())]
    view = x.permute(dims).contiguous().permute(inverse)
    weight = None if form == "none" else torch.randn(hidden_size)
    close(ops.rms_norm(view, weight, 1e-6, form), reference.rms_norm(x, weight, 1e-6, form))


# pytorch#133085: squares that overflow fp16.
def test_large_fp16(device):
    x = torch.tensor([[300.0, -300.0, 300.0, 300.0], [6e4, 6e4, -6e4, 6e4]], dtype=torch.float16, device=device)
    out = ops.rms_norm(x, torch.ones(4, dtype=torch.float16, device=device), 1e-6)
    assert_bit_equal(out, x.sign())


def test_squares_beyond_float32(device):
    x = torch.tensor([[1e25, -1e25], [3e38, 3e38]], dtype=torch.bfloat16, device=device)
    assert_bit_equal(ops.rms_norm(x, None, 1e-6, "none"), torch.zeros_like(x))


# coremltools#2821: zero rows and rows with one spike.
@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_zero_and_spiky_rows(device, eps):
    x = torch.full((2, 256), 1e-3)
    x[0] = 0
    x[1, 5] = 1e3
    out = ops.rms_norm(x.to(device), None, eps, "none").cpu()
    assert (out[0] == 0).all()
    torch.testing.assert_close(out.double(), exact(x, eps), rtol=1e-6, atol=1e-7)


def test_zero_row_without_eps_is_nan(device):
    assert ops.rms_norm(torch.zeros(1, 8, device=device), None, 0.0, "none").isnan().all()


# vllm#52104: the variance is taken of the rounded sum.
def test_variance_of_the_rounded_sum(device):
    x = (0.5 + torch.arange(64) / 128).bfloat16()
    residual = torch.full((64,), 3.0).bfloat16()
    exact_sum, rounded = x.double() + residual.double(), (x + residual).double()
    before, after = exact(exact_sum, 1e-6).bfloat16(), exact(rounded, 1e-6).bfloat16()
    assert not torch.equal(before, after)
    normed, _ = ops.add_rms_norm(x[None].to(device), residual[None].to(device), None, 1e-6, "none")
    assert_bit_equal(normed[0], after)


# aiter#5151: the new residual is rounded to nearest even.
def test_residual_rounds_to_nearest_even(device):
    x = torch.ones(4).bfloat16()
    residual = torch.tensor([2**-8, 3 * 2**-8, 2**-8 + 2**-12, -(2**-9)]).bfloat16()
    _, total = ops.add_rms_norm(x[None].to(device), residual[None].to(device), None, 1e-6, "none")
    assert total[0].tolist() == [1.0, 1.015625, 1.0078125, 1.0]


def test_nan_and_inf_stay_in_their_row(device):
    x = torch.randn(4, 33, device=device)
    x[1, 7] = math.nan
    x[2, 32] = math.inf
    out = ops.rms_norm(x, torch.ones(33, device=device), 1e-6)
    assert out[1].isnan().all() and out[2, 32].isnan() and (out[2, :32] == 0).all()
    close(out[[0, 3]], reference.rms_norm(x[[0, 3]], torch.ones(33, device=device), 1e-6))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda x, w: (x, w[:3], 1e-6), r"weight must have shape \[8\], got \[3\]"),
        (lambda x, w: (x, w[None], 1e-6), "weight must have shape"),
        (lambda x, w: (x, None, 1e-6), "weight is required"),
        (lambda x, w: (x, w, 1e-6, "none"), "weight must be None"),
        (lambda x, w: (x, w, 1e-6, "llama"), "weight_form must be .* got llama"),
        (lambda x, w: (x, w, -1.0), "eps must not be negative, got -1"),
        (lambda x, w: (x.int(), w, 1e-6), "x must be float32, bfloat16 or float16, got int32"),
        (lambda x, w: (x, w.long(), 1e-6), "weight must be float32, bfloat16 or float16, got int64"),
        (lambda x, w: (x[:, :0], w[:0], 1e-6), "last dimension of x must not be empty"),
        (lambda x, w: (x[0, 0], w, 1e-6), "at least one dimension"),
    ],
)
@pytest.mark.parametrize("meta", [False, True])
def test_errors(device, arguments, message, meta):
    x, weight = torch.randn(2, 8, device=device), torch.randn(8, device=device)
    given = arguments(x, weight)
    if meta:
        given = tuple(a.to("meta") if isinstance(a, torch.Tensor) else a for a in given)
    with pytest.raises(ValueError, match=message):
        ops.rms_norm(*given)


@pytest.mark.parametrize("meta", [False, True])
def test_residual_errors(device, meta):
    x, weight = torch.randn(2, 8, device="meta" if meta else device), torch.randn(8, device="meta" if meta else device)
    with pytest.raises(ValueError, match=r"residual must have the shape of x, \[2, 8\], got \[1, 8\]"):
        ops.add_rms_norm(x, x[:1], weight, 1e-6)
    with pytest.raises(ValueError, match="residual must have the dtype of x"):
        ops.add_rms_norm(x, x.bfloat16(), weight, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_opcheck(device, dtype, form):
    weight = None if form == "none" else torch.randn(8, device=device)
    base = torch.randn(3, 5, 8, device=device).to(dtype)
    column_major = base.transpose(0, 2).contiguous().transpose(0, 2)
    for x in (base, base.transpose(0, 1), base[..., :0, :], base[:, 1:, :], column_major):
        opcheck(torch.ops.deepinfer.rms_norm.default, (x, weight, 1e-6, form))
        opcheck(torch.ops.deepinfer.add_rms_norm.default, (x, x.clone(), weight, 1e-6, form))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden_size", [8, 31, 33, 100, 576, 2047, 4096, 33000])
def test_cpu_norm_has_the_bits_of_the_unfused_code(hidden_size, dtype):
    """Greedy text stays the same only if no bit changes, so the squares are summed in the order of torch's own sum."""
    x, residual = torch.randn(2, max(4, 2**18 // hidden_size), hidden_size).to(dtype)
    weight = torch.rand(hidden_size).to(dtype)
    hidden = (x + residual).float()
    expected = weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-5)).to(dtype)
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert_bit_equal(total, x + residual)
    assert_bit_equal(normed, expected)
    assert_bit_equal(ops.rms_norm(total, weight, 1e-5), expected)
