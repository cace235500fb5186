"""The quant family in every format: codes of four bits, packed scales, column layout; and the ops beside the two of
test_quant.py."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from checking import assert_bit_equal, layouts, opcheck

from torch_deepinfer import ops
from torch_deepinfer.reference import quant as reference

E4M3, E8M0, E2M1 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2
CODES = [E4M3, torch.int8, E2M1]
SCALES = [{}, {"round_scale": True}, {"scale_dtype": E8M0}, {"scale_dtype": torch.int32}]
BLOCKS = [[1, n] for n in (128, 64, 32, 16, 6, 1, -1)] + [[128, 128], [32, 32], [16, 48], [128, 1], [7, 1], [-1, 4]]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")


def plain(t: torch.Tensor) -> torch.Tensor:
    """Something to compare: a NaN of float8_e4m3fn may have any sign."""
    if t.dtype in (E2M1, E8M0):
        return t.cpu().contiguous().view(torch.uint8)
    return t.float() if t.dtype == E4M3 else t


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit, with the same strides where these matter."""
    assert actual.dtype == expected.dtype
    if actual.numel():
        strides = [[s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in (actual, expected)]
        assert strides[0] == strides[1]
    assert_bit_equal(plain(actual), plain(expected))


def quantize(module, x: torch.Tensor, block_size: list[int], **options) -> tuple[torch.Tensor, torch.Tensor]:
    """By the op for these blocks; groups of one element by that for blocks, which takes them for any code."""
    if block_size == [1, -1]:
        return module.quantize_per_token(x, **options)
    if block_size[0] == 1 and block_size[1] > 1:
        return module.quantize_per_token_group(x, block_size[1], **options)
    if block_size[0] > 1 and block_size[1] == 1:
        return module.quantize_per_channel(x, block_size[0], **options)
    return module.quantize_per_block(x, block_size, **options)


def spread(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(*shape, device=device) * torch.logspace(-3, 3, shape[-1], device=device)


@pytest.mark.parametrize("layout", ["row", "column"])
@pytest.mark.parametrize("options", SCALES)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("block_size", BLOCKS)
def test_matches_reference(device, block_size, code, options, layout):
    inputs = [((5, 2050), torch.bfloat16), ((2, 70, 130), torch.float32), ((2, 3, 33, 10), torch.float16)]
    for shape, dtype in inputs if not options else inputs[1:2]:
        x = spread(*shape, device=device).to(dtype)
        x[..., 2, 3], x[..., 1, :4] = torch.nan, 0
        given = {"dtype": code, **options}
        actual = quantize(ops, x, block_size, scale_layout=layout, **given)
        expected = quantize(reference, x.cpu(), block_size, scale_layout=layout, **given)
        for a, e in zip(actual, expected, strict=True):
            same(a, e)
        scales = ops.quantization_scales(x, block_size, scale_layout=layout, **given)
        same(scales, expected[1])
        same(
            ops.quantize_with_scales(x, scales, block_size, dtype=code),
            reference.quantize_with_scales(x.cpu(), expected[1], block_size, dtype=code),
        )
        for out in DTYPES if not options else [dtype]:
            same(ops.dequantize(*actual, block_size, out), reference.dequantize(*expected, block_size, out))


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(
    shape=st.lists(st.integers(0, 6), min_size=0, max_size=3),
    columns=st.integers(0, 70),
    block_size=st.tuples(st.sampled_from([-1, 1, 2, 5, 100]), st.sampled_from([-1, 1, 2, 16, 34])),
    code=st.sampled_from(CODES),
    options=st.sampled_from(SCALES),
    layout=st.sampled_from(["row", "column"]),
)
def test_any_shape(shape, columns, block_size, code, options, layout):
    x = torch.randn(*shape, columns // 2 * 2)
    block_size = list(block_size) if x.dim() > 1 else [1, block_size[1]]
    given = {"dtype": code, "scale_layout": layout, **options}
    codes, scales = reference._quantize(
        x, block_size, code, options.get("round_scale", False), options.get("scale_dtype"), layout
    )
    same(ops.quantization_scales(x, block_size, **given), scales)
    if x.dim() > 1:
        actual = ops.quantize_per_block(x, block_size, **given)
        same(actual[0], codes)
        same(actual[1], scales)
    same(ops.dequantize(codes, scales, block_size), reference.dequantize(codes, scales, block_size))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("block_size", [[1, 16], [4, 16], [3, 1]])
def test_layouts(device, block_size, code):
    x = torch.randn(4, 6, 40).bfloat16()
    options = {"dtype": code, "scale_dtype": torch.int32}
    codes, scales = quantize(ops, x.to(device), block_size, **options)
    back = ops.dequantize(codes, scales, block_size)
    for name, view in layouts(x).items():
        actual = quantize(ops, view.to(device), block_size, **options)
        assert_bit_equal(plain(actual[0]), plain(codes), name)
        assert_bit_equal(actual[1], scales, name)
    for name, view in layouts(scales).items():
        assert_bit_equal(ops.dequantize(codes, view, block_size), back, name)
        with_scales = ops.quantize_with_scales(x.to(device), view, block_size, dtype=code)
        assert_bit_equal(plain(with_scales), plain(codes), name)


def test_strided_pairs(device):
    """Codes of four bits inside wider rows; the bytes of a row lie beside each other."""
    codes, scales = ops.quantize_per_token_group(torch.randn(6, 128, device=device), 32, dtype=E2M1)
    back = ops.dequantize(codes, scales, [1, 32])
    wide = torch.zeros(6, 80, dtype=torch.uint8, device=device)
    wide[:, 3:67] = codes.view(torch.uint8)
    assert_bit_equal(ops.dequantize(wide[:, 3:67].view(E2M1), scales, [1, 32]), back)


# DeepGEMM#337: different scales in a word, groups that are no multiple of four.
@pytest.mark.parametrize("layout", ["row", "column"])
@pytest.mark.parametrize("groups", [1, 3, 4, 6, 56])
def test_packed_scales(device, groups, layout):
    x = torch.randn(5, groups, 32, device=device) * 2.0 ** torch.randint(-9, 9, (5, groups, 1), device=device)
    bytes_ = ops.quantize_per_token_group(x.flatten(1), 32, scale_dtype=E8M0)[1].view(torch.uint8).int().cpu()
    words = ops.quantize_per_token_group(x.flatten(1), 32, scale_dtype=torch.int32, scale_layout=layout)[1].cpu()
    assert words.shape == (5, (groups + 3) // 4)
    for g in range(words.shape[1] * 4):
        byte = words[:, g // 4] >> (8 * (g % 4)) & 0xFF
        assert torch.equal(byte, bytes_[:, g] if g < groups else torch.zeros_like(byte))


@pytest.mark.parametrize(("scale_dtype", "unit"), [(torch.float32, 4), (torch.int32, 4), (E8M0, 16)])
@pytest.mark.parametrize("rows", [1, 3, 16, 17])
def test_column_layout(device, rows, scale_dtype, unit):
    x = torch.randn(2, rows, 256, device=device)
    row, column = (
        ops.quantize_per_token_group(x, 32, scale_dtype=scale_dtype, scale_layout=layout)[1]
        for layout in ("row", "column")
    )
    pitch = (rows + unit - 1) // unit * unit
    assert column.stride() == (pitch * column.shape[2], 1, pitch) and row.is_contiguous()
    assert_bit_equal(plain(column), plain(row))
    vector = ops.quantize_per_token_group(x[0, 0], 32, scale_dtype=scale_dtype, scale_layout="column")[1]
    assert vector.stride() == (unit,)
    assert_bit_equal(plain(vector), plain(row[0, 0]))


def e2m1_codes(x: torch.Tensor) -> torch.Tensor:
    """Converts values up to 6 at scale 1."""
    pairs = torch.stack([x, torch.full_like(x, 6.0)], -1)
    codes, scales = ops.quantize_per_token_group(pairs, 2, dtype=E2M1)
    codes = codes.view(torch.uint8)[:, 0]
    assert (scales == 1).all() and (codes >> 4 == 7).all()
    return codes & 15


def test_e2m1_conversion(device):
    middle = (GRID[1:] + GRID[:-1]) / 2
    near = torch.cat([GRID, middle])
    random = torch.rand(10_000) * 6
    above, below = torch.nextafter(near, torch.tensor(9.0)).clamp(max=6), torch.nextafter(near, torch.tensor(-9.0))
    x = torch.cat([near, above, below.clamp(min=0), torch.tensor([1e-45, 2**-126]), random])
    distance = (x.double()[:, None] - GRID.double()).abs()
    tie = distance == distance.amin(-1, keepdim=True)
    expected = torch.where(tie, torch.arange(8) + 8 * (torch.arange(8) % 2), 99).amin(-1) % 8  # even first
    assert (tie.sum(-1) == 2).sum() == 7
    assert torch.equal(e2m1_codes(x.to(device)).cpu().long(), expected)
    assert torch.equal(e2m1_codes(-x.to(device)).cpu().long(), expected + 8)


def test_e2m1_pairs_and_their_values(device):
    """The first of a pair is in the low four bits."""
    x = torch.tensor([0.5, 6.0, -1.5, 2.0], device=device)
    codes, scales = ops.quantize_per_token(x, dtype=E2M1)
    assert codes.view(torch.uint8).tolist() == [0x71, 0x4B] and scales.tolist() == [1.0]
    every = torch.arange(256, dtype=torch.uint8, device=device)
    back = ops.dequantize(every.view(E2M1), torch.ones(1, device=device), [1, -1], torch.float32).cpu()
    signed = torch.cat([GRID, -GRID])
    assert_bit_equal(
        back, torch.stack([signed[every.cpu().long() & 15], signed[every.cpu().long() >> 4]], -1).flatten()
    )


@pytest.mark.parametrize("options", SCALES)
def test_e2m1_floor(device, options):
    x = torch.tensor([[0.0] * 4, [1e-45] * 4, [6 * 2.0**-126] * 4], device=device)
    codes, scales = ops.quantize_per_token(x, dtype=E2M1, **options)
    assert codes.view(torch.uint8).tolist() == [[0, 0], [0, 0], [0x77, 0x77]]
    if scales.dtype == torch.int32:
        assert scales.tolist() == [[1]] * 3
    else:
        assert scales.float().tolist() == [[2.0**-126]] * 3


# pytorch#160957: a scale too small for the data.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("code", "largest"), [(E4M3, 448.0), (torch.int8, 127.0), (E2M1, 6.0)])
def test_given_scales_saturate(device, dtype, code, largest):
    inf, nan = torch.inf, torch.nan
    x = torch.tensor([449, 464, 465, 1000, 6e4, inf, nan, 0.0], dtype=dtype, device=device)
    one = torch.ones(1, device=device)
    back = ops.dequantize(ops.quantize_with_scales(x, one, [1, -1], dtype=code), one, [1, -1], torch.float32)
    assert back[:6].tolist() == [largest] * 6
    assert back[6].isnan() if code == E4M3 else back[6] == 0
    negative = ops.dequantize(ops.quantize_with_scales(-x, one, [1, -1], dtype=code), one, [1, -1], torch.float32)
    assert negative[:6].tolist() == [-largest] * 6
    codes = ops.quantize_with_scales(x[-1:].repeat(2), torch.full_like(one, nan), [1, -1], dtype=code)
    assert codes.float().isnan().all() if code == E4M3 else (plain(codes) == 0).all()


@pytest.mark.parametrize("code", CODES)
def test_given_scales_multiply_by_the_reciprocal(device, code):
    x = torch.randn(64, 256, device=device)
    scales = torch.rand(64, 2, device=device) + 0.01
    codes = ops.quantize_with_scales(x, scales, [1, 128], dtype=code)
    same(codes, reference.quantize_with_scales(x.cpu(), scales.cpu(), [1, 128], dtype=code))
    rounded = ops.quantize_per_token_group(x, dtype=code, round_scale=True)
    same(ops.quantize_with_scales(x, rounded[1], [1, 128], dtype=code), rounded[0])


def test_whole_rows_of_any_length(device):
    """One CUDA block holds up to 16384 elements of 16 bits; what is left is read again."""
    for size, dtype in [
        (7168, torch.bfloat16),
        (40_000, torch.float16),
        (20_000, torch.float32),
        (130, torch.bfloat16),
    ]:
        x = torch.randn(3, size, device=device).to(dtype)
        x[0, -1], x[1, 0] = 100, -50
        for code in CODES:
            for a, e in zip(
                ops.quantize_per_token(x, dtype=code), reference.quantize_per_token(x.cpu(), dtype=code), strict=True
            ):
                same(a, e)


@pytest.mark.parametrize("code", CODES)
def test_large_blocks(device, code):
    x = spread(600, 1000, device=device).bfloat16()
    for block_size in ([-1, -1], [500, 1], [300, 700], [600, 8]):
        actual = quantize(ops, x, block_size, dtype=code)
        for a, e in zip(actual, quantize(reference, x.cpu(), block_size, dtype=code), strict=True):
            same(a, e)


def double(x: torch.Tensor) -> torch.Tensor:
    """torch_npu converts to float32 instead."""
    return torch.ones_like(x, dtype=torch.float64)


ERRORS = [
    (lambda x: ops.quantize_per_token_group(x, scale_layout="col"), "scale_layout must be row or column, got col"),
    (lambda x: ops.quantize_per_token_group(x, 3, dtype=E2M1), "group_size must be even with .* got 3"),
    (lambda x: ops.quantize_per_token_group(x[:, 1:], dtype=E2M1), "last dimension of x must be even .* got 7"),
    (lambda x: ops.quantize_per_token(x[:, :0]), "the last dimension of x must not be empty"),
    (lambda x: ops.quantize_per_token(x[0, 0]), "x must have at least one dimension"),
    (lambda x: ops.quantize_per_token(double(x)), "x must be float32, bfloat16 or float16, got float64"),
    (lambda x: ops.quantize_per_channel(x, 0), "block_rows must be positive, or -1 for all rows, got 0"),
    (lambda x: ops.quantize_per_channel(x[0]), "x must have at least two dimensions"),
    (lambda x: ops.quantize_per_channel(x, dtype=torch.half), "dtype must be float8_e4m3fn, .* got float16"),
    (lambda x: ops.quantization_scales(x, [1]), r"block_size must be two numbers, .* got \[1\]"),
    (lambda x: ops.quantization_scales(x[0, 0], [1, 1]), "x must have at least one dimension"),
    (lambda x: ops.quantization_scales(x, [1, 8], scale_dtype=torch.int64), "scale_dtype must be .* got int64"),
    (lambda x: ops.quantize_with_scales(x, x, [1, 4]), r"scales must have shape \[2, 2\], got \[2, 8\]"),
    (lambda x: ops.quantize_with_scales(x, x.int(), [1, 1]), r"scales must have shape \[2, 2\], got \[2, 8\]"),
    (lambda x: ops.quantize_with_scales(x, x.long(), [1, 1]), "scales must be float32, .* got int64"),
    (lambda x: ops.quantize_with_scales(x, x[:, :1], [1, 0]), r"block_size must be two numbers, .* got \[1, 0\]"),
    (lambda x: ops.quantize_with_scales(x, x[:, :1], [1, -1], dtype=torch.half), "dtype must be .* got float16"),
    (
        lambda x: ops.dequantize(x.to(torch.uint8).view(E2M1), x[:, :1], [1, 8]),
        r"scales must have shape \[2, 2\], got \[2, 1\]",
    ),
    (lambda x: ops.dequantize(x.to(torch.uint8).view(E2M1), x, [1, 3]), r"block_size\[1\] must be even .* got 3"),
]


@pytest.mark.parametrize(("call", "message"), ERRORS)
def test_errors(device, call, message):
    texts = []
    for where in (device, "meta"):
        with pytest.raises(ValueError, match=message) as error:
            call(torch.zeros(2, 8, device=where))
        texts.append(str(error.value))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("options", [*SCALES, {"dtype": torch.int8}])
@pytest.mark.parametrize("layout", ["row", "column"])
def test_opcheck(device, options, layout):
    base = torch.randn(3, 5, 8, device=device).bfloat16()
    options = {"scale_layout": layout, **options}
    for x in (base.transpose(0, 1), base[..., :0, :], base[:, 1:, 2:], base[0, 0]):
        opcheck(torch.ops.deepinfer.quantize_per_token.default, (x,), options)
        opcheck(torch.ops.deepinfer.quantize_per_token_group.default, (x, 3), options)
        opcheck(torch.ops.deepinfer.quantization_scales.default, (x, [1, 4]), options)
        if x.dim() > 1:
            opcheck(torch.ops.deepinfer.quantize_per_block.default, (x, [2, 3]), options)
            opcheck(torch.ops.deepinfer.quantize_per_channel.default, (x, 2), options)
        codes, scales = ops.quantize_per_token_group(x, 3, **options)
        opcheck(torch.ops.deepinfer.dequantize.default, (codes, scales, [1, 3]))
        opcheck(torch.ops.deepinfer.quantize_with_scales.default, (x, scales, [1, 3]), {"dtype": codes.dtype})


# The rest is for a GPU alone.


@needs_gpu
@pytest.mark.gpu
def test_padding_is_neither_written_nor_read():
    x = torch.randn(5, 512, device="cuda")
    codes, given = ops.quantize_per_token_group(x, scale_layout="column")
    padded = torch.full((4, given.stride(1)), torch.nan, device="cuda")
    scales = padded.mT[:5].copy_(given)
    assert scales.stride() == given.stride()
    assert ops.dequantize(codes, scales, [1, 128]).isfinite().all()
    same(ops.quantize_with_scales(x, scales, [1, 128]), ops.quantize_with_scales(x, scales.contiguous(), [1, 128]))


# vllm#53390: offsets beyond 2^31.
@needs_gpu
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("block_size", [[1, 128], [128, 128], [128, 1]])
def test_more_than_2_to_31_elements(block_size):
    columns = 4096
    rows = 2**31 // columns + 256
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda").normal_()
    codes, scales = quantize(ops, x, block_size)
    back = ops.dequantize(codes, scales, block_size)
    down = block_size[0]
    for first in (0, rows // 256 * 128, rows - 128):
        part = slice(first, first + 128)
        expected = quantize(ops, x[part].contiguous(), block_size)
        same(codes[part], expected[0])
        assert_bit_equal(scales[first // down : (first + 128) // down], expected[1])
        assert_bit_equal(back[part], ops.dequantize(*expected, block_size))


@needs_gpu
@pytest.mark.gpu
def test_replayed_graph():
    x = torch.randn(64, 512, device="cuda").bfloat16()
    functions = [
        lambda: ops.quantize_per_token_group(x, scale_dtype=torch.int32, scale_layout="column"),
        lambda: ops.quantize_per_block(x, [32, 32]),
        lambda: ops.quantize_per_channel(x, 32),
    ]
    for function in functions:
        function()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            actual = function()
        x.normal_()
        graph.replay()
        for a, e in zip(actual, function(), strict=True):
            same(a, e)
