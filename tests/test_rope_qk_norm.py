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
FORMS = ["cast_mul", "mul_cast", "one_plus", "none"]
EPS = 1e-6


def tables(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of unrelated angles: every column different."""
    angle = torch.rand(shape, device=device) * 2 * math.pi
    return angle.cos().to(dtype), angle.sin().to(dtype)


def weights(head_size: int, form: str, dtype: torch.dtype, device: str) -> tuple:
    return (None, None) if form == "none" else tuple(torch.randn(2, head_size, device=device).to(dtype))


def unfused(q, k, q_weight, k_weight, cos, sin, eps, positions=None, style="half", inverse=False, rotary_dim=None,
            weight_form="cast_mul"):  # fmt: skip
    """The two ops one after the other, on the device of q."""
    q = ops.rms_norm(q, q_weight, eps, weight_form)
    k = None if k is None else ops.rms_norm(k, k_weight, eps, weight_form)
    return ops.rotary_embedding(q, k, cos, sin, positions, style, inverse, rotary_dim)


def check(*args, **kwargs) -> None:
    """Bit for bit the unfused ops, and within their errors the reference."""
    actual = ops.qk_norm_rope(*args, **kwargs)
    assert all(t.is_contiguous() for t in actual)
    expected = unfused(*args, **kwargs)
    assert_bit_equal(actual[0], expected[0], "q")
    assert_bit_equal(actual[1], expected[1], "k")
    for ours, theirs in zip(actual, reference.qk_norm_rope(*args, **kwargs), strict=True):
        tolerance = {torch.float32: 4e-6, torch.bfloat16: 2**-5, torch.float16: 2**-8}[ours.dtype]
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("table_dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_size", "rotary_dim"), [(64, None), (128, 64), (80, 80), (80, 48), (256, None), (72, 50), (18, 16), (3, 2)]
)
def test_equals_the_unfused_ops(device, style, dtype, table_dtype, head_size, rotary_dim):
    q, k = (torch.randn(2, heads, 7, head_size, device=device).to(dtype) for heads in (5, 1))
    for form, columns in zip(FORMS, [2, 1, 2, 1], strict=True):
        scale = weights(head_size, form, dtype, device)
        cos, sin = tables(2, 1, 7, (rotary_dim or head_size) // columns, dtype=table_dtype, device=device)
        kwargs = dict(style=style, rotary_dim=rotary_dim, weight_form=form)
        check(q, k, *scale, cos, sin, EPS, **kwargs)
        check(q, None, scale[0], None, cos, sin, EPS, inverse=True, **kwargs)


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS[:3])
def test_mixed_dtypes(device, form, dtype, weight_dtype):
    q, k = (torch.randn(3, heads, 64, device=device).to(dtype) for heads in (4, 2))
    scale = weights(64, form, weight_dtype, device)
    check(q, k, *scale, *tables(3, 1, 32, device=device), EPS, weight_form=form)
    assert ops.qk_norm_rope(q, None, scale[0], None, *tables(3, 1, 32, dtype=dtype, device=device), EPS,
                            weight_form=form)[1].dtype == ops.rms_norm(q, scale[0], EPS, form).dtype  # fmt: skip


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_positions(device, index_dtype):
    q, k = (torch.randn(6, heads, 40, device=device) for heads in (4, 2))
    scale = weights(40, "cast_mul", torch.float32, device)
    positions = torch.tensor([10, 0, 3, 3, 7, 1], dtype=index_dtype, device=device)
    cos, sin = tables(11, 16, device=device)
    check(q, k, *scale, cos, sin, EPS, positions=positions[:, None], rotary_dim=32)
    heads_first = q.transpose(0, 1), k.transpose(0, 1)
    check(*heads_first, *scale, cos, sin, EPS, positions=positions, style="interleaved", inverse=True, rotary_dim=32)


@pytest.mark.parametrize("bad", [-1, 8])
def test_positions_outside_the_cache(bad):
    q, weight = torch.randn(2, 3, 16), torch.ones(16)
    with pytest.raises(ValueError, match=rf"qk_norm_rope: positions must lie in \[0, 8\), got {bad}"):
        ops.qk_norm_rope(q, None, weight, None, *tables(8, 8), EPS, positions=torch.tensor([[0], [bad]]))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("style", STYLES)
def test_positions_outside_the_cache_on_a_gpu(style):
    """The rotated elements become NaN, and what lies beyond them is normed."""
    q, weight = torch.randn(3, 2, 32, device="cuda"), torch.randn(32, device="cuda")
    positions = torch.tensor([[3], [-1], [8]], device="cuda")
    tables_ = tables(8, 8, device="cuda")
    actual, _ = ops.qk_norm_rope(q, None, weight, None, *tables_, EPS, positions=positions, style=style, rotary_dim=16)
    assert actual[1:, :, :16].isnan().all() and not actual[0].isnan().any()
    assert_bit_equal(actual[:, :, 16:], ops.rms_norm(q, weight, EPS)[:, :, 16:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("style", STYLES)
def test_layouts(device, style, dtype):
    q = torch.randn(3, 4, 6, 64).to(dtype)
    weight = torch.randn(64, device=device).to(dtype)
    cos, sin = tables(4, 6, 32, device=device)
    expected, _ = unfused(q.to(device), None, weight, None, cos, sin, EPS, style=style)
    for name, view in layouts(q).items():
        actual, _ = ops.qk_norm_rope(view.to(device), None, weight, None, cos, sin, EPS, style=style)
        assert_bit_equal(actual, expected, name)
    strided_weight = torch.stack([weight, weight], -1)[:, 0]
    shifted_weight = torch.cat([weight[:1], weight])[1:]
    for other in (strided_weight, shifted_weight):
        actual, _ = ops.qk_norm_rope(q.to(device), None, other, None, cos, sin, EPS, style=style)
        assert_bit_equal(actual, expected)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(data=st.data())
def test_any_shape(data):
    lead = data.draw(st.lists(st.integers(0, 4), max_size=3))
    rotary_dim = 2 * data.draw(st.integers(1, 20))
    head_size = rotary_dim + data.draw(st.integers(0, 17))
    dtype, table_dtype = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(DTYPES))
    form, style = data.draw(st.sampled_from(FORMS)), data.draw(st.sampled_from(STYLES))
    dims = data.draw(st.permutations(range(len(lead) + 1)))
    back = [dims.index(d) for d in range(len(dims))]
    q = torch.randn(*lead, head_size).to(dtype).permute(dims).contiguous().permute(back)
    k = torch.randn_like(q) if data.draw(st.booleans()) else None
    q_weight, k_weight = weights(head_size, form, data.draw(st.sampled_from(DTYPES)), "cpu")
    cos, sin = tables(*(data.draw(st.sampled_from([1, n])) for n in lead), rotary_dim // 2, dtype=table_dtype)
    check(q, k, q_weight, None if k is None else k_weight, cos, sin, EPS, style=style, rotary_dim=rotary_dim,
          weight_form=form)  # fmt: skip


def test_wide_heads(device):
    """Wider than a kernel takes in one go."""
    q = torch.randn(3, 2, 1200, device=device)
    check(q, None, torch.randn(1200, device=device), None, *tables(3, 1, 550, device=device), EPS, rotary_dim=1100)
    check(q[..., :1000], None, torch.randn(1000, device=device), None, *tables(3, 1, 500, device=device), EPS)


def test_work_is_split_anywhere(device):
    """Enough rows for several threads, whose shares begin inside a block of positions."""
    q, k = (torch.randn(1, 100, heads, 64, device=device).transpose(1, 2) for heads in (13, 3))
    check(q, k, *torch.randn(2, 64, device=device), *tables(1, 1, 100, 32, device=device), EPS)


# q and k of different heads are told apart, and so are their weights.
def test_as_attention_calls_it(device):
    def rotate_half(x):
        return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)

    def norm(x, weight):
        hidden = x.float()
        return weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)

    q, k = (torch.randn(2, 33, heads, 128, device=device).bfloat16() for heads in (8, 2))
    q_weight, k_weight = torch.randn(2, 128, device=device).bfloat16()
    cos, sin = (torch.cat([t, t], -1) for t in tables(2, 33, 1, 64, dtype=torch.bfloat16, device=device))
    actual = ops.qk_norm_rope(q, k, q_weight, k_weight, cos, sin, EPS)
    for ours, x, weight in zip(actual, (q, k), (q_weight, k_weight), strict=True):
        normed = norm(x, weight)
        torch.testing.assert_close(ours, normed * cos + rotate_half(normed) * sin, rtol=2**-6, atol=2**-5)


def test_no_token(device):
    weight = torch.ones(8, device=device)
    q, k = ops.qk_norm_rope(torch.randn(2, 0, 3, 8, device=device), torch.randn(2, 0, 1, 8, device=device), weight,
                            weight, *tables(2, 0, 1, 4, device=device), EPS)  # fmt: skip
    assert q.shape == (2, 0, 3, 8) and k.shape == (2, 0, 1, 8)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("style", STYLES)
def test_more_than_2_to_31_elements(style):
    tokens = 2**31 // (32 * 72) + 5
    q = torch.empty(tokens, 32, 72, dtype=torch.bfloat16, device="cuda").normal_()
    k = torch.empty(tokens, 1, 72, dtype=torch.bfloat16, device="cuda").normal_()
    cos, sin = tables(64, 36, dtype=torch.bfloat16, device="cuda")
    positions = torch.randint(0, 64, (tokens, 1), device="cuda")
    options = {"style": style, "weight_form": "none"}
    results = ops.qk_norm_rope(q, k, None, None, cos, sin, EPS, positions=positions, **options)
    assert results[0].numel() > 2**31
    for part in (slice(0, 3), slice(tokens // 2, tokens // 2 + 3), slice(tokens - 3, tokens)):
        alone = ops.qk_norm_rope(q[part], k[part], None, None, cos, sin, EPS, positions=positions[part], **options)
        for ours, theirs in zip(results, alone, strict=True):
            assert_bit_equal(ours[part], theirs)


def test_nan_and_zero_rows_stay_apart(device):
    q = torch.randn(4, 32, device=device)
    q[1, 7], q[2] = math.nan, 0
    actual, _ = ops.qk_norm_rope(q, None, None, None, *tables(4, 16, device=device), EPS, weight_form="none")
    assert actual[1].isnan().all() and (actual[2] == 0).all() and not actual[[0, 3]].isnan().any()


@pytest.mark.gpu
@needs_gpu
def test_replayed_graph():
    q, k = (torch.randn(40, heads, 128, device="cuda").bfloat16() for heads in (8, 2))
    scale = torch.randn(2, 128, device="cuda").bfloat16()
    cos, sin = tables(50, 64, dtype=torch.bfloat16, device="cuda")
    positions = torch.randint(0, 50, (40, 1), device="cuda")
    call = lambda: ops.qk_norm_rope(q, k, *scale, cos, sin, EPS, positions=positions)  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = call()
    for _ in range(2):
        positions.random_(0, 50)
        q.normal_()
        graph.replay()
        for ours, theirs in zip(actual, call(), strict=True):
            assert_bit_equal(ours, theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(weight_form="llama"), "weight_form must be cast_mul, mul_cast, one_plus or none, got llama"),
        (dict(eps=-1.0), "eps must not be negative, got -1"),
        (dict(q_weight=None), "q_weight is required with weight_form cast_mul"),
        (dict(k_weight=None), "k_weight is required with weight_form cast_mul"),
        (dict(weight_form="none"), "q_weight must be None with weight_form none"),
        (dict(weight_form="none", q_weight=None), "k_weight must be None with weight_form none"),
        (dict(k=None), "k_weight must be None without k"),
        (dict(q_weight=torch.ones(7)), r"q_weight must have shape \[8\], got \[7\]"),
        (dict(k_weight=torch.ones(1, 8)), r"k_weight must have shape \[8\], got \[1, 8\]"),
        (dict(q_weight=torch.ones(8).long()), "q_weight must be float32, bfloat16 or float16, got int64"),
        (dict(k_weight=torch.ones(8).half()), "k_weight must have the dtype of q_weight, float32, got float16"),
        (dict(style="neox"), "style must be half, interleaved or interleaved_to_half, got neox"),
        (dict(k=torch.ones(3, 1, 6)), r"k must have the last dimension of q, 8, got \[3, 1, 6\]"),
        (dict(sin=torch.ones(3, 1, 4).half()), "sin must have the dtype of cos, float32, got float16"),
    ],
)
@pytest.mark.parametrize("meta", [False, True])
def test_errors(change, message, meta):
    arguments = {
        "q": torch.ones(3, 2, 8),
        "k": torch.ones(3, 1, 8),
        "q_weight": torch.ones(8),
        "k_weight": torch.ones(8),
        "cos": torch.ones(3, 1, 4),
        "sin": torch.ones(3, 1, 4),
        "eps": 1e-6,
        **change,
    }
    if meta:
        arguments = {n: a.to("meta") if isinstance(a, torch.Tensor) else a for n, a in arguments.items()}
    with pytest.raises(ValueError, match=rf"qk_norm_rope: .*{message}"):
        ops.qk_norm_rope(**arguments)


@pytest.mark.parametrize(("style", "dtype"), list(zip(STYLES, DTYPES, strict=True)))
def test_opcheck(device, style, dtype):
    op = torch.ops.deepinfer.qk_norm_rope.default
    fused = torch.randn(2, 5, 96, device=device).to(dtype).unflatten(-1, (-1, 16)).transpose(1, 2)
    cos, sin = tables(2, 1, 5, 8, device=device)
    weight = torch.randn(16, device=device).to(dtype)
    for q, k in [(fused[:, :4], fused[:, 4:]), (fused, None), (fused[:, :, :1], fused[:, :2, :1])]:
        tables_ = cos[:, :, : q.shape[2]], sin[:, :, : q.shape[2]]
        opcheck(op, (q, k, weight, None if k is None else weight, *tables_, EPS), {"style": style})
    opcheck(op, (fused, fused, None, None, cos, sin, EPS), {"style": style, "weight_form": "none"})
    opcheck(op, (fused, fused, weight.float(), weight.float(), cos, sin, EPS), {"style": style})
