import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from checking import assert_bit_equal, layouts, opcheck

from torch_deepinfer import ops
from torch_deepinfer.reference import quant as reference

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CODES = [E4M3, torch.int8]
SCALES = [{}, {"round_scale": True}, {"scale_dtype": E8M0}]
LARGEST = {E4M3: 448.0, torch.int8: 127.0}


def same(actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Codes and scales are equal bit for bit; a NaN may have any sign."""
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype and a.is_contiguous()
        assert_bit_equal(a.float(), e.float())


def quantize(x: torch.Tensor, block_size: list[int], module=ops, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Token groups if the blocks are one row high."""
    if block_size[0] == 1:
        return module.quantize_per_token_group(x, block_size[1], **options)
    return module.quantize_per_block(x, block_size, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("options", SCALES)
@pytest.mark.parametrize("block_size", [[1, 128], [1, 32], [1, 7], [1, -1], [128, 128], [16, 48], [-1, 3], [-1, -1]])
def test_matches_reference(device, dtype, code, options, block_size):
    x = (torch.randn(3, 70, 300, device=device) * torch.logspace(-4, 4, 70, device=device)[:, None]).to(dtype)
    x[0, :8] = 0
    actual = quantize(x, block_size, dtype=code, **options)
    expected = quantize(x, block_size, reference, dtype=code, **options)
    same(actual, expected)
    assert not actual[1].float().isnan().any()
    for out in DTYPES:
        back = ops.dequantize(*actual, block_size, out)
        assert_bit_equal(back, reference.dequantize(*expected, block_size, out))
    assert_bit_equal(ops.dequantize(*actual, block_size), ops.dequantize(*actual, block_size, torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [[1, 16], [4, 16]])
def test_layouts(device, dtype, block_size):
    """FBGEMM#2713, vllm#19452: the strides of the input are not those of the output."""
    x = torch.randn(4, 6, 40).to(dtype)
    codes, scales = quantize(x.to(device), block_size)
    back = ops.dequantize(codes, scales, block_size)
    for name, view in layouts(x).items():
        actual = quantize(view.to(device), block_size)
        assert_bit_equal(actual[0].float(), codes.float(), name)
        assert_bit_equal(actual[1], scales, name)
    for (name, view), strided_scales in zip(layouts(codes).items(), layouts(scales).values(), strict=True):
        assert_bit_equal(ops.dequantize(view, strided_scales, block_size), back, name)
    expanded = x[:, :1].expand(4, 6, 40).to(device)
    same(quantize(expanded, block_size), quantize(expanded.contiguous(), block_size))


@hypothesis.settings(max_examples=80, deadline=None)
@hypothesis.given(
    shape=st.lists(st.integers(0, 6), min_size=0, max_size=3),
    columns=st.integers(0, 70),
    block_size=st.tuples(st.sampled_from([-1, 1, 2, 5, 100]), st.sampled_from([-1, 1, 3, 16, 33, 2**62])),
    code=st.sampled_from(CODES),
    options=st.sampled_from(SCALES),
    dtype=st.sampled_from(DTYPES),
    order=st.randoms(use_true_random=False),
)
def test_any_shape_and_permutation(shape, columns, block_size, code, options, dtype, order):
    x = torch.randn(*shape, columns).to(dtype)
    dims = list(range(x.dim()))
    order.shuffle(dims)
    view = x.permute(dims).contiguous().permute([dims.index(d) for d in range(x.dim())])
    block_size = list(block_size) if x.dim() > 1 else [1, block_size[1]]
    whole = [min(n, 70) for n in block_size]  # the reference fills its blocks up
    actual = quantize(view, block_size, dtype=code, **options)
    same(actual, quantize(x, whole, reference, dtype=code, **options))
    back = ops.dequantize(*actual, block_size, dtype)
    assert_bit_equal(back, reference.dequantize(*actual, whole, dtype))


def test_more_dimensions_than_strides(device):
    x = torch.randn(*[2] * 12, device=device)
    for view in (x.permute([*range(10, -1, -1), 11]), x.permute([*range(11, -1, -1)])):
        same(quantize(view, [2, 2]), quantize(view.contiguous(), [2, 2]))


def raw_codes(x: torch.Tensor, code: torch.dtype) -> torch.Tensor:
    """Converts values within the range of the code, 1-D, at scale 1: each shares a group with the largest code."""
    groups = torch.stack([x, torch.full_like(x, LARGEST[code])], -1)
    codes, scales = ops.quantize_per_token_group(groups, 2, dtype=code)
    assert (scales == 1).all() and (codes[:, 1].float() == LARGEST[code]).all()
    return codes[:, 0]


# sglang#40581: a conversion in software. Every value, every midpoint and its neighbours, both signs, denormals of both
# types.
def test_e4m3_conversion_around_every_code(device):
    table = torch.arange(127, dtype=torch.uint8).view(E4M3).double()
    middle = (table[1:] + table[:-1]) / 2
    near = torch.cat([table, middle]).float()
    up, down = torch.nextafter(near, torch.tensor(1e9)), torch.nextafter(near, torch.tensor(-1.0)).clamp(min=0)
    tiny = torch.tensor([1e-45, 2**-126, 1e-38, 2**-10 * (1 + 2**-23)])
    x = torch.cat([near, up.clamp(max=448), down, tiny])
    below = (torch.searchsorted(table, x.double(), right=True) - 1).clamp(0, 125)
    to_below, to_above = x.double() - table[below], table[below + 1] - x.double()
    code = torch.where((to_above < to_below) | ((to_above == to_below) & (below % 2 == 1)), below + 1, below)
    expected = code.to(torch.uint8)
    assert (expected == x.to(E4M3).view(torch.uint8)).all()
    assert torch.equal(raw_codes(x.to(device), E4M3).cpu().view(torch.uint8), expected)
    assert torch.equal(raw_codes(-x.to(device), E4M3).cpu().view(torch.uint8), expected | 0x80)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("code", CODES)
def test_conversion_of_every_16_bit_value(device, dtype, code):
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    x = x[x.abs() <= LARGEST[code]]
    expected = x.float().round().to(code) if code == torch.int8 else x.float().to(code)
    assert torch.equal(raw_codes(x.to(device), code).cpu().view(torch.uint8), expected.view(torch.uint8))


def test_conversion_of_many_float32(device):
    x = torch.randint(0, 2**31, (200_000,)).to(torch.int32).view(torch.float32)
    x = x[x <= 448]
    assert torch.equal(raw_codes(x.to(device), E4M3).cpu().view(torch.uint8), x.to(E4M3).view(torch.uint8))


def test_int8_rounds_half_to_even(device):
    x = torch.arange(-127, 127, device=device) + 0.5
    assert torch.equal(raw_codes(x, torch.int8), x.round().to(torch.int8))
    assert raw_codes(torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5], device=device), torch.int8).tolist() == [
        0, 2, 2, 0, -2, 126,
    ]  # fmt: skip


@pytest.mark.parametrize("code", CODES)
def test_codes_stay_in_range(device, code):
    """max / amax may round up: the product with amax then lies above the largest code and has to round back to it."""
    amax = (torch.rand(100_000, device=device) + 0.1) * torch.logspace(-3, 30, 100_000, device=device)
    largest = torch.full_like(amax, LARGEST[code])
    assert (amax * (largest / amax) > largest).any()
    codes, scales = ops.quantize_per_token_group(amax[:, None], 1, dtype=code)
    assert torch.equal(codes[:, 0].float(), largest)
    assert torch.equal(scales[:, 0], amax / largest)


@pytest.mark.parametrize("code", CODES)
def test_data_is_not_multiplied_by_the_inverse_of_the_stored_scale(device, code):
    """3/64 of amax is the tie 21 of e4m3, half of it the tie 63.5 of int8: the last bit of the factor decides."""
    amax = torch.arange(1, 4000, 2, device=device).float()
    x = torch.stack([amax * (3 / 64 if code == E4M3 else 1 / 2), amax], -1)
    codes, scales = ops.quantize_per_token_group(x, -1, dtype=code)
    same((codes, scales), reference.quantize_per_token_group(x, -1, dtype=code))
    by_inverse = x * (1 / scales)
    by_inverse = (by_inverse.round() if code == torch.int8 else by_inverse.clamp(-448, 448)).to(code)
    assert not torch.equal(codes.float(), by_inverse.float())


@pytest.mark.parametrize("code", CODES)
def test_rounded_scales_are_the_next_power_of_two(device, code):
    powers = torch.arange(-12, 40, device=device)
    exact = LARGEST[code] * torch.ldexp(torch.ones(52, device=device), powers)
    above, below = exact * (1 + 2**-23), exact * (1 - 2**-23)
    for amax, exponent in [(exact, powers), (above, powers + 1), (below, powers)]:
        for options in SCALES[1:]:
            codes, scales = ops.quantize_per_token_group(amax[:, None], 1, dtype=code, **options)
            assert torch.equal(scales[:, 0].float(), torch.ldexp(torch.ones(52, device=device), exponent))
            assert (codes.float().abs() <= LARGEST[code]).all()
    assert (scales.view(torch.uint8)[:, 0] == exponent + 127).all()


@pytest.mark.parametrize("options", SCALES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("block_size", [[1, 20], [2, 20], [1, -1]])
def test_nan_and_inf_poison_their_block_only(device, options, dtype, code, bad, block_size):
    x = torch.randn(4, 60, device=device).to(dtype)
    clean = quantize(x, block_size, dtype=code, **options)
    x[1, 39] = bad
    codes, scales = quantize(x, block_size, dtype=code, **options)
    same((codes, scales), quantize(x, block_size, reference, dtype=code, **options))
    rows = slice(0, 2) if block_size[0] == 2 else slice(1, 2)
    columns = slice(0, 60) if block_size[1] == -1 else slice(20, 40)
    poisoned = torch.zeros(4, 60, dtype=torch.bool, device=device)
    poisoned[rows, columns] = True
    assert torch.equal(ops.dequantize(codes, scales, block_size).isnan(), poisoned)
    assert scales.float().isnan().sum() == 1
    assert (codes[poisoned].float().isnan() if code == E4M3 else codes[poisoned] == 0).all()
    assert torch.equal(codes[~poisoned].float(), clean[0][~poisoned].float())


# kernels-community#681: a block of zeros.
@pytest.mark.parametrize("options", SCALES)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("block_size", [[1, 128], [1, -1], [128, 128], [-1, -1]])
def test_zero_block(device, options, code, block_size):
    x = torch.zeros(2, 256, dtype=torch.bfloat16, device=device)
    codes, scales = quantize(x, block_size, dtype=code, **options)
    assert (codes.view(torch.uint8) == 0).all()
    assert scales.float().isfinite().all() and (scales.float() > 0).all()
    x[1, 128:] = 3.0
    codes, scales = quantize(x, block_size, dtype=code)
    back = ops.dequantize(codes, scales, block_size)
    assert torch.equal(back, x)


def test_amax_floor(device):
    x = torch.tensor([[1e-5, -2e-6, 0.0], [1e-12, 1e-40, -1e-45]], device=device)
    codes, scales = ops.quantize_per_token_group(x)
    assert scales.tolist() == [[torch.tensor(1e-4).div(448).item()]] * 2
    assert torch.equal(codes.float()[0], (x[0] * (torch.tensor(448.0) / 1e-4).item()).to(E4M3).float())
    codes, scales = ops.quantize_per_token_group(x, dtype=torch.int8)
    assert codes[1].tolist() == [1, 0, 0] and codes[0].tolist() == [127, -25, 0]


# openvino#32410: 127 / amax does not fit into float16.
@pytest.mark.parametrize(("code", "magnitude"), [(torch.int8, 2e-5), (E4M3, 3e-4)])
def test_small_fp16_rows(device, code, magnitude):
    x = (torch.randn(2, 64, device=device) * magnitude).half()
    assert (torch.tensor(LARGEST[code]).half() / x.abs().amax(-1).cpu()).isinf().any()
    codes, scales = ops.quantize_per_token_group(x, -1, dtype=code)
    scaled_codes, scaled_scales = ops.quantize_per_token_group(x.float() * 2**10, -1, dtype=code)
    assert torch.equal(codes.float(), scaled_codes.float())
    assert torch.equal(scales * 2**10, scaled_scales)


# sglang#29038: each token and each of its groups has its own magnitude.
def test_three_dimensions_keep_their_scales(device):
    magnitudes = 4.0 ** (torch.arange(3)[:, None] * 3 + torch.arange(4))
    x = (torch.randn(3, 4, 256) * magnitudes[..., None]).to(device)
    codes, scales = ops.quantize_per_token_group(x)
    assert scales.shape == (3, 4, 2)
    back = ops.dequantize(codes, scales, [1, 128], torch.float32)
    groups, scale = x.view(3, 4, 2, 128).double(), scales[..., None].double()
    assert ((back.view(3, 4, 2, 128).double() - groups).abs() <= groups.abs() * 2**-4 + scale * 2**-10).all()


# llm-compressor#2286: weights that blocks do not divide; the tail's amax covers the valid part alone.
@pytest.mark.parametrize("shape", [(576, 2048), (192, 320), (4544, 768), (1, 7), (1, 1)])
def test_uneven_weights(device, shape):
    weight = torch.randn(shape, device=device)
    weight[-1, -1] = 100.0
    codes, scales = ops.quantize_per_block(weight)
    assert scales.shape == ((shape[0] + 127) // 128, (shape[1] + 127) // 128)
    assert torch.equal(scales[-1, -1], weight[-1, -1] / weight.new_tensor(448))
    full = scales.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    assert_bit_equal(ops.dequantize(codes, scales, [128, 128], torch.float32), codes.float() * full)


@pytest.mark.parametrize("code", CODES)
def test_dequantize_every_code(device, code):
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(code)
    for dtype in DTYPES:
        one = ops.dequantize(codes, torch.ones(1, device=device), [1, -1], dtype)
        assert_bit_equal(one, codes.float().to(dtype))
        scale = torch.tensor([0.3], device=device)
        assert_bit_equal(ops.dequantize(codes, scale, [1, -1], dtype), (codes.float() * scale).to(dtype))


def test_dequantize_every_e8m0_scale(device):
    scales = torch.arange(256, dtype=torch.uint8, device=device).view(E8M0)
    codes = torch.full((256, 1), 1.5, device=device).to(E4M3)
    back = ops.dequantize(codes, scales[:, None], [1, 1], torch.float32)
    assert_bit_equal(back[:, 0], 1.5 * scales.float())


def double(x: torch.Tensor) -> torch.Tensor:
    """torch_npu converts to float32 instead."""
    return torch.ones_like(x, dtype=torch.float64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ops.quantize_per_token_group(x, 0), "group_size must be positive, or -1 for the whole row, got 0"),
        (lambda x: ops.quantize_per_token_group(x, -2), "group_size must be positive, .* got -2"),
        (lambda x: ops.quantize_per_token_group(double(x)), "x must be float32, bfloat16 or float16, got float64"),
        (
            lambda x: ops.quantize_per_token_group(x, dtype=torch.uint8),
            "dtype must be float8_e4m3fn, int8 or float4_e2m1fn_x2, got uint8",
        ),
        (
            lambda x: ops.quantize_per_token_group(x, scale_dtype=torch.bfloat16),
            "scale_dtype must be float32, float8_e8m0fnu or int32, got bfloat16",
        ),
        (lambda x: ops.quantize_per_token_group(x[0, 0]), "x must have at least one dimension"),
        (lambda x: ops.quantize_per_block(x[0]), "x must have at least two dimensions"),
        (lambda x: ops.quantize_per_block(x, [128]), r"block_size must be two numbers, .* got \[128\]"),
        (lambda x: ops.quantize_per_block(x, [128, 0]), r"positive or -1 for the whole dimension, got \[128, 0\]"),
        (lambda x: ops.quantize_per_block(x.long()), "x must be float32, bfloat16 or float16, got int64"),
        (lambda x: ops.dequantize(x, x[:, :1], [1, 8]), "q must be float8_e4m3fn, int8 or .* got float32"),
        (
            lambda x: ops.dequantize(x.to(torch.int8), x[:, :1], [1, 4]),
            r"scales must have shape \[2, 2\], got \[2, 1\]",
        ),
        (lambda x: ops.dequantize(x.to(torch.int8), x[:, 0], [1, 8]), r"scales must have shape \[2, 1\], got \[2\]"),
        (
            lambda x: ops.dequantize(x.to(torch.int8), x.half()[:, :1], [1, 8]),
            "scales must be float32, .* got float16",
        ),
        (lambda x: ops.dequantize(x.to(torch.int8), x[:, :1], [1, -8]), r"block_size must be .* got \[1, -8\]"),
        (
            lambda x: ops.dequantize(x.to(torch.int8), x[:, :1], [1, 8], torch.int8),
            "dtype must be float32, .* got int8",
        ),
        (lambda x: ops.dequantize(x.to(torch.int8)[0, 0], x[0, 0], [1, 8]), "q must have at least one dimension"),
    ],
)
def test_errors(device, call, message):
    texts = []
    for where in (device, "meta"):
        with pytest.raises(ValueError, match=message) as error:
            call(torch.zeros(2, 8, device=where))
        texts.append(str(error.value))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("options", SCALES)
def test_opcheck(device, code, options):
    base = torch.randn(3, 5, 8, device=device).bfloat16()
    column_major = base.transpose(0, 2).contiguous().transpose(0, 2)
    for x in (base.transpose(0, 1), base[..., :0, :], base[:, :1], base[:, 1:, 2:], column_major, base[0, 0]):
        opcheck(torch.ops.deepinfer.quantize_per_token_group.default, (x, 3), {"dtype": code, **options})
        block_size = [1, 4]
        if x.dim() > 1:
            block_size = [2, -1]
            opcheck(torch.ops.deepinfer.quantize_per_block.default, (x, block_size), {"dtype": code, **options})
        codes, scales = quantize(x, block_size, dtype=code, **options)
        opcheck(torch.ops.deepinfer.dequantize.default, (codes, scales, block_size))
        if x.dim() > 1:
            opcheck(
                torch.ops.deepinfer.dequantize.default, (codes.mT.contiguous().mT, scales, block_size, torch.float32)
            )
