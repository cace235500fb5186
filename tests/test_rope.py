import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from checking import assert_bit_equal, layouts, opcheck

from torch_deepinfer import ops
from torch_deepinfer.reference import rope as reference

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STYLES = ["half", "interleaved", "interleaved_to_half"]


def tables(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of unrelated angles: every column different."""
    angle = torch.rand(shape) * 2 * math.pi
    return angle.cos().to(dtype), angle.sin().to(dtype)


def table_of(positions: list[int], dim: int, theta: float = 1e4) -> tuple[torch.Tensor, torch.Tensor]:
    """The float64 cosines and sines of a model, one column a pair."""
    frequencies = theta ** (-torch.arange(0, dim, 2).double() / dim)
    angle = torch.tensor(positions).double()[:, None] * frequencies
    return angle.cos(), angle.sin()


def check(device, q, k, *args, **kwargs) -> None:
    """The functional and the in-place op against the reference, bit for bit."""
    expected = reference.rotary_embedding(q, k, *args, **kwargs)
    move = lambda a: a.to(device) if isinstance(a, torch.Tensor) else a  # noqa: E731
    q, k, *args = map(move, (q, k, *args))
    kwargs = {name: move(a) for name, a in kwargs.items()}
    actual = ops.rotary_embedding(q, k, *args, **kwargs)
    assert all(t.is_contiguous() for t in actual)
    assert_bit_equal(actual[0], expected[0], "q")
    assert_bit_equal(actual[1], expected[1], "k")
    q, k = q.clone(), None if k is None else k.clone()
    ops.rotary_embedding_(q, k, *args, **kwargs)
    assert_bit_equal(q, expected[0], "q in place")
    if k is not None:
        assert_bit_equal(k, expected[1], "k in place")


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("table_dtype", DTYPES)
@pytest.mark.parametrize(("head_size", "rotary_dim"), [(64, None), (80, 50), (72, 72), (3, 2)])
def test_matches_reference(device, style, dtype, table_dtype, head_size, rotary_dim):
    q, k = torch.randn(2, 5, 7, head_size).to(dtype), torch.randn(2, 1, 7, head_size).to(dtype)
    for columns in ((rotary_dim or head_size) // 2, rotary_dim or head_size):
        cos, sin = tables(2, 1, 7, columns, dtype=table_dtype)
        for inverse in (False, True):
            check(device, q, k, cos, sin, None, style, inverse, rotary_dim)
        check(device, q, None, cos, sin, style=style, rotary_dim=rotary_dim)


@pytest.mark.parametrize("style", STYLES)
def test_wide_rows(device, style):
    check(device, torch.randn(3, 2, 1200), None, *tables(3, 1, 550), style=style, rotary_dim=1100)


# The code of the models, written as they write it.
def test_bit_equal_to_eager_half(device):
    def rotate_half(x):
        return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)

    for dtype in DTYPES:
        q, k = torch.randn(2, 8, 33, 64).to(dtype), torch.randn(2, 2, 33, 64).to(dtype)
        cos, sin = (torch.cat([t, t], -1).to(dtype) for t in tables(2, 1, 33, 32))
        actual = ops.rotary_embedding(*(t.to(device) for t in (q, k, cos, sin)))
        assert_bit_equal(actual[0], q * cos + rotate_half(q) * sin)
        assert_bit_equal(actual[1], k * cos + rotate_half(k) * sin)


def test_bit_equal_to_eager_pairs_to_halves(device):
    q = torch.randn(1, 4, 9, 64).bfloat16()
    cos, sin = tables(1, 1, 9, 32, dtype=torch.bfloat16)
    a, b = q[..., ::2], q[..., 1::2]
    tensors = (q.to(device), None, cos.to(device), sin.to(device))
    actual, _ = ops.rotary_embedding(*tensors, style="interleaved_to_half")
    assert_bit_equal(actual, torch.cat([a * cos - b * sin, b * cos + a * sin], -1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_complex_product(device, dtype):
    q = torch.randn(2, 9, 4, 64).to(dtype)
    angles = torch.polar(torch.ones(9, 32), torch.rand(9, 32) * 6)[:, None]
    product = torch.view_as_complex(q.float().unflatten(-1, (-1, 2))) * angles
    expected = torch.view_as_real(product).flatten(-2).to(dtype)
    parts = torch.view_as_real(angles.to(device))
    assert parts[..., 0].stride(-1) == 2
    actual, _ = ops.rotary_embedding(q.to(device), None, parts[..., 0], parts[..., 1], style="interleaved")
    # torch may fuse a multiplication with the addition of a complex product.
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("columns", [16, 32])
def test_positions(device, index_dtype, columns):
    q, k = torch.randn(6, 4, 40), torch.randn(6, 2, 40)
    cos, sin = tables(11, columns)
    positions = torch.tensor([10, 0, 3, 3, 7, 1], dtype=index_dtype)
    check(device, q, k, cos, sin, positions[:, None], "half", False, 32)
    check(device, q.transpose(0, 1), k.transpose(0, 1), cos, sin, positions, "interleaved", True, 32)
    check(device, q, q, cos, sin, positions[:, None].expand(6, 4), rotary_dim=32)
    wide = torch.stack([positions, positions], -1)[:, :1]
    check(device, q, k, cos[:, ::1].t().contiguous().t(), sin, wide, rotary_dim=32)
    check(device, q, None, cos, sin, positions[:1], rotary_dim=32)


# onnxruntime#27597
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bad", [-1, 8, 2**31 - 1, -(2**31)])
def test_positions_outside_the_cache(index_dtype, bad):
    q = torch.randn(3, 2, 16)
    cos, sin = tables(8, 8)
    positions = torch.tensor([[0], [7], [bad]], dtype=index_dtype)
    with pytest.raises(ValueError, match=rf"positions must lie in \[0, 8\), got {bad}"):
        ops.rotary_embedding(q, None, cos, sin, positions)
    before = q.clone()
    with pytest.raises(ValueError, match=rf"positions must lie in \[0, 8\), got {bad}"):
        ops.rotary_embedding_(q, None, cos, sin, positions)
    assert_bit_equal(q, before)
    ops.rotary_embedding(q, None, cos, sin, positions.clamp(0, 7))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_positions_outside_the_cache_on_a_gpu(style, index_dtype):
    """There is no error without waiting for the device: the rotated elements become NaN, and nothing else does."""
    q, k = torch.randn(4, 3, 24, device="cuda"), torch.randn(4, 1, 24, device="cuda")
    cos, sin = (t.cuda() for t in tables(8, 8))
    positions = torch.tensor([[3], [-1], [8], [2**31 - 1]], dtype=index_dtype, device="cuda")
    expected = ops.rotary_embedding(q[:1], k[:1], cos, sin, positions[:1], style, rotary_dim=16)
    functional = ops.rotary_embedding(q, k, cos, sin, positions, style, rotary_dim=16)
    in_place = q.clone(), k.clone()
    ops.rotary_embedding_(*in_place, cos, sin, positions, style, rotary_dim=16)
    for actual in (functional, in_place):
        for y, x, first in zip(actual, (q, k), expected, strict=True):
            assert_bit_equal(y[:1], first)
            assert y[1:, :, :16].isnan().all()
            assert_bit_equal(y[1:, :, 16:], x[1:, :, 16:])


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("style", STYLES)
def test_replayed_graph(style):
    q, k = torch.randn(40, 200, device="cuda").bfloat16(), torch.randn(40, 64, device="cuda").bfloat16()
    cos, sin = (t.cuda() for t in tables(50, 32, dtype=torch.bfloat16))
    positions = torch.randint(0, 50, (40, 1), device="cuda")
    heads = q[:, 8:].unflatten(-1, (3, 64)), k.unflatten(-1, (1, 64))
    ops.rotary_embedding_(*(x.clone() for x in heads), cos, sin, positions, style)
    ops.rotary_embedding_(*heads, cos, sin, positions, style)  # the layout of the slices may be another kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.rotary_embedding_(*heads, cos, sin, positions, style)
    for _ in range(2):
        positions.random_(0, 50)
        for x in (q, k):
            x.normal_()
        expected = reference.rotary_embedding(*heads, cos, sin, positions, style)
        graph.replay()
        assert_bit_equal(heads[0], expected[0], "q")
        assert_bit_equal(heads[1], expected[1], "k")


def test_position_beyond_int32():
    cos, sin = tables(8, 8)
    with pytest.raises(ValueError, match=f"got {2**32}"):
        ops.rotary_embedding(torch.randn(1, 16), None, cos, sin, torch.tensor([2**32]))


# pie#603: the frequencies and the partner follow rotary_dim, not the head size.
@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_partial_rotation(device, style):
    x = torch.randn(2, 256)
    cos, sin = table_of([700, 2355], 64)
    actual = ops.rotary_embedding(
        x.to(device), None, cos.float().to(device), sin.float().to(device), style=style, rotary_dim=64
    )[0].cpu()
    assert_bit_equal(actual[:, 64:], x[:, 64:])
    a, b = (x[:, :32], x[:, 32:64]) if style == "half" else (x[:, :64:2], x[:, 1:64:2])
    a, b = a.double(), b.double()
    pairs = (a * cos - b * sin, b * cos + a * sin)
    expected = torch.cat(pairs, -1) if style == "half" else torch.stack(pairs, -1).flatten(-2)
    torch.testing.assert_close(actual[:, :64].double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(actual.norm(dim=-1), x.norm(dim=-1))


# flash-attention#823, xformers#325: the tables are read in their own dtype and the result has that of q.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("table_dtype", DTYPES)
def test_table_dtypes(device, dtype, table_dtype):
    q = torch.randn(4, 64).to(dtype)
    cos, sin = (t.to(table_dtype) for t in table_of([3, 500, 4000, 9000], 64))
    actual, _ = ops.rotary_embedding(q.to(device), None, cos.to(device), sin.to(device))
    assert actual.dtype == dtype
    a, b, c, s = q[:, :32].double(), q[:, 32:].double(), cos.double(), sin.double()
    exact = torch.cat([a * c - b * s, b * c + a * s], -1)
    ulp = {torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    roundings = 3 if dtype == table_dtype else 1
    size = exact.abs().max().item()
    torch.testing.assert_close(actual.cpu().double(), exact, rtol=0, atol=roundings * ulp * size)
    if table_dtype == torch.float32:
        single = reference.rotary_embedding(q.float(), None, cos, sin)[0]
        assert_bit_equal(actual, single.to(dtype))


# flash-attention#1195: offsets beyond 2^31 elements; memory that is not touched is not used.
@pytest.mark.parametrize("style", STYLES)
def test_offsets_beyond_int32(device, style):
    stride = 2**31 + 8
    far = torch.empty(stride + 72, dtype=torch.bfloat16, device=device).as_strided((2, 72), (stride, 1))
    values = torch.randn(2, 72, device=device).bfloat16()
    far.copy_(values)
    cos, sin = (t.to(device) for t in tables(2, 36))
    expected, _ = ops.rotary_embedding(values, None, cos, sin, style=style)
    assert_bit_equal(ops.rotary_embedding(far, None, cos, sin, style=style)[0], expected)
    ops.rotary_embedding_(far, None, cos, sin, style=style)
    assert_bit_equal(far, expected)


# flash-attention#1195 in full: more than 2^31 elements, a head size that is no power of two.
@needs_gpu
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_more_than_2_to_31_elements(style):
    tokens = 2**31 // (32 * 72) + 5
    q = torch.empty(tokens, 32, 72, dtype=torch.bfloat16, device="cuda").normal_()
    cos, sin = (t.cuda() for t in tables(64, 36, dtype=torch.bfloat16))
    positions = torch.randint(0, 64, (tokens, 1), device="cuda")
    parts = [slice(0, 3), slice(tokens // 2, tokens // 2 + 3), slice(tokens - 3, tokens)]
    expected = [reference.rotary_embedding(q[part], None, cos, sin, positions[part], style)[0] for part in parts]
    out, _ = ops.rotary_embedding(q, None, cos, sin, positions, style)
    ops.rotary_embedding_(q, None, cos, sin, positions, style)
    assert q.numel() > 2**31
    for part, wanted in zip(parts, expected, strict=True):
        assert_bit_equal(out[part], wanted)
        assert_bit_equal(q[part], wanted)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(device, style, dtype):
    q = torch.randn(3, 4, 6, 40).to(dtype)
    cos, sin = tables(4, 6, 20)
    expected, _ = reference.rotary_embedding(q, None, cos, sin, None, style)
    for name, view in layouts(q).items():
        view = view.to(device)
        for table_name, (c, s) in zip(
            layouts(cos), zip(layouts(cos).values(), layouts(sin).values(), strict=True), strict=True
        ):
            c, s = c.to(device), s.to(device)
            actual, _ = ops.rotary_embedding(view, None, c, s, None, style)
            assert_bit_equal(actual, expected, f"{name}, tables {table_name}")
    for name, view in layouts(q.clone()).items():
        view = view.to(device)
        ops.rotary_embedding_(view, None, cos.to(device), sin.to(device), None, style)
        assert_bit_equal(view, expected, f"{name} in place")
    expanded = q[:1].expand(3, 4, 6, 40).to(device)
    actual, _ = ops.rotary_embedding(expanded, None, cos.to(device), sin.to(device), None, style)
    assert_bit_equal(actual[2], expected[0])


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(data=st.data())
def test_any_shape_and_stride(data):
    """Random leading dimensions, any of them broadcast in the tables or the positions, in permuted memory."""

    def permuted(t: torch.Tensor) -> torch.Tensor:
        dims = data.draw(st.permutations(range(t.dim())))
        return t.permute(dims).contiguous().permute([dims.index(d) for d in range(t.dim())])

    def broadcast(lead: list[int]) -> list[int]:
        shape = [data.draw(st.sampled_from([1, n])) for n in lead]
        return shape[data.draw(st.integers(0, len(shape))) :]

    lead = data.draw(st.lists(st.integers(0, 4), max_size=4))
    rotary_dim = 2 * data.draw(st.integers(1, 20))
    head_size = rotary_dim + data.draw(st.integers(0, 5))
    dtype, table_dtype = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(DTYPES))
    columns = data.draw(st.sampled_from([rotary_dim, rotary_dim // 2]))
    q = permuted(torch.randn(*lead, head_size).to(dtype))
    positions, table_lead = None, broadcast(lead)
    if data.draw(st.booleans()):
        positions = permuted(
            torch.randint(0, 5, table_lead, dtype=data.draw(st.sampled_from([torch.int32, torch.int64])))
        )
        table_lead = [5]
    cos, sin = (permuted(t) for t in tables(*table_lead, columns, dtype=table_dtype))
    k = torch.randn_like(q) if data.draw(st.booleans()) else None
    style = data.draw(st.sampled_from(STYLES))
    check("cpu", q, k, cos, sin, positions, style, data.draw(st.booleans()), rotary_dim)


def test_work_is_split_anywhere(device):
    """Enough rows for several threads, whose shares begin inside a block of positions."""
    q, k = torch.randn(1, 100, 13, 64).transpose(1, 2), torch.randn(1, 100, 3, 64).transpose(1, 2)
    check(device, q, k, *tables(1, 1, 100, 32))
    check(device, q.contiguous(), k.contiguous(), *tables(1, 1, 100, 32))
    check(device, q, None, *tables(13, 1, 32))
    check(device, q, None, *tables(32))


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_inverse_returns_the_input(device, style):
    q = torch.randn(5, 3, 32, device=device)
    cos, sin = (t.to(device) for t in tables(5, 1, 16))
    there, _ = ops.rotary_embedding(q, None, cos, sin, style=style)
    back, _ = ops.rotary_embedding(there, None, cos, sin, style=style, inverse=True)
    torch.testing.assert_close(back, q, rtol=1e-5, atol=1e-6)
    assert (there - q).abs().max() > 0.1


def test_no_token_and_one_token(device):
    for tokens in (0, 1):
        q, k = torch.randn(2, tokens, 3, 8), torch.randn(2, tokens, 1, 8)
        check(device, q, k, *tables(2, tokens, 1, 4))
        check(device, q, k, *tables(4, 4), torch.zeros(2, tokens, 1, dtype=torch.int64))
    check(device, torch.randn(8), torch.randn(0, 8), *tables(4))
    check(device, torch.randn(0, 8), torch.randn(3, 8), *tables(4))
    check(device, torch.randn(0, 8), None, *tables(0, 4), torch.zeros(0, dtype=torch.int32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_stay_in_their_pair(device, dtype):
    q = torch.randn(3, 32).to(dtype)
    q[0, 3], q[1, 20] = math.nan, math.inf
    cos, sin = (t.clamp(min=0.1) for t in tables(3, 16, dtype=dtype))
    check(device, q, None, cos, sin)
    actual, _ = ops.rotary_embedding(q.to(device), None, cos.to(device), sin.to(device))
    assert actual.isnan().nonzero().tolist() == [[0, 3], [0, 19]]
    assert actual.isinf().nonzero().tolist() == [[1, 4], [1, 20]]


def test_every_bf16_nan_survives(device):
    """NaNs of any payload: rounding must not carry one into infinity or zero."""
    bits = torch.cat([torch.arange(0x7F81, 0x8000), torch.arange(0xFF81, 0x10000)])
    q = bits.to(torch.int32).to(torch.int16).view(torch.bfloat16)[:, None].repeat(1, 2).to(device)
    assert q.isnan().all()
    for dtype in (torch.bfloat16, torch.float32):
        cos, sin = (t.to(device) for t in tables(1, dtype=dtype))
        assert ops.rotary_embedding(q, None, cos, sin)[0].isnan().all()


# ---- in place ----


@pytest.mark.parametrize("style", STYLES)
def test_slices_of_a_fused_row(device, style):
    qkv = torch.randn(7, (4 + 2 + 2) * 16, device=device)
    cos, sin = (t.to(device) for t in tables(7, 1, 8))
    split = lambda t: [part.unflatten(-1, (-1, 16)) for part in t.split([64, 32, 32], -1)]  # noqa: E731
    q, k, v = split(qkv)
    expected = ops.rotary_embedding(q, k, cos, sin, style=style)
    before = v.clone()
    assert ops.rotary_embedding_(q, k, cos, sin, style=style) is None
    assert_bit_equal(split(qkv)[0], expected[0])
    assert_bit_equal(split(qkv)[1], expected[1])
    assert_bit_equal(split(qkv)[2], before)


def shared_memory_cases() -> dict[str, tuple]:
    base = torch.arange(4096.0)
    q = base[:128].view(8, 16)
    far = base[1024:1152].view(8, 16)
    cos, sin = base[2048:2112].view(8, 8), base[3072:3136].view(8, 8)
    return {
        "expanded": (q[:1].expand(8, 16), None, cos, sin),
        "expanded columns": (base[:8, None].expand(8, 16), None, cos, sin),
        "windows": (base[:24].unfold(0, 16, 1)[:8], None, cos, sin),
        "k expanded": (far, q[:1].expand(8, 16), cos, sin),
        "q is k": (q, q, cos, sin),
        "k begins inside q": (q, base[120:248].view(8, 16), cos, sin),
        "k inside the rows of q": (base[:256].view(8, 32)[:, :16], base[8:264].view(8, 32)[:, :16], cos, sin),
        "cos inside q": (q, None, base[64:128].view(8, 8), sin),
        "sin inside k": (far, q, cos, base[:64].view(8, 8)),
    }


@pytest.mark.parametrize("name", shared_memory_cases())
def test_shared_memory_is_refused(name):
    q, k, cos, sin = shared_memory_cases()[name]
    before = q.clone()
    with pytest.raises(ValueError, match="must not"):
        ops.rotary_embedding_(q, k, cos, sin)
    assert_bit_equal(q, before)
    ops.rotary_embedding(q, k, cos, sin)


def test_positions_inside_q_are_refused():
    memory = torch.zeros(8, 16)
    positions = memory.view(torch.int32)[:, 0]
    with pytest.raises(ValueError, match="must not share memory with positions"):
        ops.rotary_embedding_(memory, None, *tables(1, 8), positions)


def test_interlocked_memory_is_accepted():
    """Views that lie inside each other's range without a common element."""
    cos, sin = tables(8, 8)
    base = torch.randn(8, 64)
    pairs = {
        "columns in turn": (base[:, ::2][:, :16], base[:, 1::2][:, :16]),
        "rows in turn": (base[::2, :16], base[1::2, :16]),
        "neighbours": (base[:, :16], base[:, 16:32]),
        "strides 3 and 2": (torch.randn(128).as_strided((2, 3, 16), (3 * 16, 2 * 16, 1)), None),
    }
    for name, (q, k) in pairs.items():
        c, s = (t[: q.shape[-2]] for t in (cos, sin))
        expected = reference.rotary_embedding(q, k, c, s)
        ops.rotary_embedding_(q, k, c, s)
        assert_bit_equal(q, expected[0], name)
        if k is not None:
            assert_bit_equal(k, expected[1], name)


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=3),
    strides=st.lists(st.integers(0, 9), min_size=3, max_size=3),
)
def test_shared_memory_is_found_exactly(sizes, strides):
    sizes[-1] = 2 * sizes[-1]
    q = torch.zeros(256).as_strided(sizes, strides[: len(sizes)])
    addresses = torch.arange(256).as_strided(sizes, strides[: len(sizes)])
    shared = addresses.unique().numel() < addresses.numel()
    cos, sin = tables(sizes[-1])
    if shared:
        with pytest.raises(ValueError, match="must not be expanded"):
            ops.rotary_embedding_(q, None, cos, sin)
    else:
        ops.rotary_embedding_(q, None, cos, sin)


# ---- errors ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(style="neox"), "style must be half, interleaved or interleaved_to_half, got neox"),
        (dict(q=torch.tensor(1.0)), "q must have at least one dimension"),
        (dict(q=torch.ones(3, 2, 8).double()), "q must be float32, bfloat16 or float16, got float64"),
        (dict(q=torch.ones(1).expand(2**20 + 2)), "the last dimension of q must not exceed 1048576, got 1048578"),
        (dict(rotary_dim=3), r"rotary_dim must be even and in \[2, 8\], got 3"),
        (dict(rotary_dim=10), r"rotary_dim must be even and in \[2, 8\], got 10"),
        (dict(rotary_dim=0), "rotary_dim must be even"),
        (dict(k=torch.ones(3, 1, 6)), r"k must have the last dimension of q, 8, got \[3, 1, 6\]"),
        (dict(k=torch.ones(3, 1, 8).bfloat16()), "k must have the dtype of q, float32, got bfloat16"),
        (dict(k=torch.ones(2, 1, 8)), r"cos of shape \[3, 1, 4\] does not broadcast .* of k, \[2, 1, 8\]"),
        (dict(cos=torch.ones(3, 1, 4).long()), "cos must be float32, bfloat16 or float16, got int64"),
        (dict(sin=torch.ones(3, 1, 4).half()), "sin must have the dtype of cos, float32, got float16"),
        (dict(sin=torch.ones(1, 1, 4)), r"sin must have the shape of cos, \[3, 1, 4\], got \[1, 1, 4\]"),
        (dict(rotary_dim=6), r"last dimension of cos must be rotary_dim or half of it, 6 or 3, got \[3, 1, 4\]"),
        (dict(cos=torch.ones(5, 4), sin=torch.ones(5, 4)), r"cos of shape \[5, 4\] does not broadcast"),
        (dict(cos=torch.ones(1, 3, 1, 4), sin=torch.ones(1, 3, 1, 4)), "does not broadcast"),
        (dict(positions=torch.zeros(3, 1).long()), r"cos must be a cache \[rows, columns\], got \[3, 1, 4\]"),
        (
            dict(cos=torch.ones(5, 4), sin=torch.ones(5, 4), positions=torch.zeros(3, 1)),
            "positions must be int32 or int64, got float32",
        ),
        (
            dict(cos=torch.ones(5, 4), sin=torch.ones(5, 4), positions=torch.zeros(3).long()),
            r"positions of shape \[3\] does not broadcast to the leading dimensions of q, \[3, 2, 8\]",
        ),
    ],
)
@pytest.mark.parametrize("op", [ops.rotary_embedding, ops.rotary_embedding_])
@pytest.mark.parametrize("meta", [False, True])
def test_errors(op, change, message, meta):
    arguments = {
        "q": torch.ones(3, 2, 8),
        "k": torch.ones(3, 1, 8),
        "cos": torch.ones(3, 1, 4),
        "sin": torch.ones(3, 1, 4),
        **change,
    }
    if meta:
        arguments = {n: a.to("meta") if isinstance(a, torch.Tensor) else a for n, a in arguments.items()}
    with pytest.raises(ValueError, match=rf"{op.__name__}: .*{message}"):
        op(**arguments)


def test_expanded_meta_destination():
    q = torch.ones(1, 8, device="meta").expand(3, 8)
    with pytest.raises(ValueError, match="q is written and must not be expanded"):
        ops.rotary_embedding_(q, None, torch.ones(4, device="meta"), torch.ones(4, device="meta"))


@pytest.mark.parametrize(("style", "dtype"), list(zip(STYLES, DTYPES, strict=True)))
def test_opcheck(device, style, dtype):
    op, in_place = torch.ops.deepinfer.rotary_embedding.default, torch.ops.deepinfer.rotary_embedding_.default
    fused = torch.randn(2, 5, 96).to(dtype).to(device)
    heads_last = torch.randn(2, 3, 5, 16).to(dtype).to(device)
    cos, sin = (t.to(device) for t in tables(2, 1, 5, 4))
    cache = tuple(t.to(dtype).to(device) for t in tables(9, 8))
    angles = torch.view_as_real(torch.polar(torch.ones(5, 4), torch.rand(5, 4))).to(device)
    positions = torch.arange(5, device=device)
    by_head = lambda t: t.unflatten(-1, (-1, 16)).transpose(1, 2)  # noqa: E731
    for arguments in [
        (heads_last, heads_last[:, :1].clone(), cos, sin, None, style, False, 8),
        (by_head(fused)[:, :3], by_head(fused)[:, 3:4], cos, sin, None, style, True, 8),
        (heads_last, None, angles[..., 0], angles[..., 1], None, style, False, 8),
        (heads_last, None, *cache, positions, style, False, 8),
        (heads_last[..., :8], heads_last[..., 8:], *cache, positions.int(), style, False, None),
        (heads_last[:, :, :0], None, *cache, positions[:0], style, False, 8),
        (heads_last[:, :, :1], heads_last[:, :, 1:2], *cache, positions[:1], style, False, 8),
    ]:
        opcheck(op, arguments)
        opcheck(in_place, arguments)
