"""The heads of latent attention: q and k whose last columns are rotated, put together from their parts."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from checking import assert_bit_equal, layouts, opcheck
from test_rope import DTYPES, STYLES, tables

from torch_deepinfer import ops
from torch_deepinfer.reference import rope as reference

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")


def check(device, *args, **kwargs) -> None:
    """The op against the reference, bit for bit."""
    expected = reference.mla_qk_rope(*args, **kwargs)
    move = lambda a: a.to(device) if isinstance(a, torch.Tensor) else a  # noqa: E731
    actual = ops.mla_qk_rope(*map(move, args), **{name: move(a) for name, a in kwargs.items()})
    for ours, theirs, name in zip(actual, expected, "qk", strict=True):
        assert ours.is_contiguous()
        assert_bit_equal(ours, theirs.contiguous(), name)


def projections(tokens, heads, nope, rope, v, dtype=torch.bfloat16, latent=32):
    """q, the keys' part of kv and the shared key, as slices of what the projections of a model return."""
    q = torch.randn(tokens, heads * (nope + rope)).to(dtype).view(tokens, heads, nope + rope)
    kv = torch.randn(tokens, heads * (nope + v)).to(dtype).view(tokens, heads, nope + v)
    kv_a = torch.randn(tokens, latent + rope).to(dtype)
    return q, kv[..., :nope], kv_a[:, None, latent:]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("table_dtype", DTYPES)
@pytest.mark.parametrize(("nope", "rope"), [(128, 64), (64, 32), (16, 16), (7, 6), (0, 64), (1, 2), (24, 80)])
def test_matches_reference(device, style, dtype, table_dtype, nope, rope):
    q, k_nope, k_rope = projections(7, 5, nope, rope, 48, dtype)
    for columns, inverse in ((rope // 2, False), (rope, True)):
        angles = tables(7, 1, columns, dtype=table_dtype)
        check(device, q, k_nope, k_rope, *angles, style=style, inverse=inverse)
        check(device, q, None, k_rope, *angles, style=style, inverse=inverse)


def rotated_halves(x, cos, sin):
    a, b = x[..., ::2], x[..., 1::2]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bit_equal_to_eager(device, dtype):
    """As DeepSeek-V3 writes it, on the same device."""
    q, k_nope, k_rope = (t.to(device) for t in projections(33, 6, 128, 64, 128, dtype))
    cos, sin = (t.to(device) for t in tables(33, 1, 32, dtype=dtype))
    q_nope, q_rope = q.split([128, 64], -1)
    keys = k_nope.new_empty(33, 6, 192)
    keys[..., :128] = k_nope
    keys[..., 128:] = rotated_halves(k_rope, cos, sin)
    actual = ops.mla_qk_rope(q, k_nope, k_rope, cos, sin, style="interleaved_to_half")
    assert_bit_equal(actual[0], torch.cat([q_nope, rotated_halves(q_rope, cos, sin)], -1))
    assert_bit_equal(actual[1], keys)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_unfused_ops(device, style, dtype):
    q, k_nope, k_rope = (t.to(device) for t in projections(9, 4, 32, 64, 16, dtype))
    cos, sin = (t.to(device) for t in tables(9, 1, 32))
    q_rope, rotated = ops.rotary_embedding(q[..., 32:], k_rope, cos, sin, style=style)
    actual = ops.mla_qk_rope(q, k_nope, k_rope, cos, sin, style=style)
    assert_bit_equal(actual[0], torch.cat([q[..., :32], q_rope], -1))
    assert_bit_equal(actual[1], torch.cat([k_nope, rotated.expand(-1, 4, -1)], -1))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_positions(device, index_dtype):
    q, k_nope, k_rope = projections(6, 4, 24, 16, 8, torch.float32)
    positions = torch.tensor([10, 0, 3, 3, 7, 1], dtype=index_dtype)
    angles = tables(11, 8)
    check(device, q, k_nope, k_rope, *angles, positions[:, None], "interleaved")
    heads_first = (t.transpose(0, 1) for t in (q, k_nope, k_rope))
    check(device, *heads_first, *angles, positions, inverse=True)


@pytest.mark.parametrize("bad", [-1, 8])
def test_positions_outside_the_cache(bad):
    q, k_nope, k_rope = projections(2, 3, 8, 16, 8)
    with pytest.raises(ValueError, match=rf"mla_qk_rope: positions must lie in \[0, 8\), got {bad}"):
        ops.mla_qk_rope(q, k_nope, k_rope, *tables(8, 8), torch.tensor([[0], [bad]]))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("style", STYLES)
def test_positions_outside_the_cache_on_a_gpu(style):
    """The rotated elements become NaN, and nothing else does."""
    q, k_nope, k_rope = (t.cuda() for t in projections(3, 2, 24, 16, 8))
    positions = torch.tensor([[3], [-1], [8]], device="cuda")
    angles = (t.cuda() for t in tables(8, 8))
    for ours, nope in zip(ops.mla_qk_rope(q, k_nope, k_rope, *angles, positions, style), (q, k_nope), strict=True):
        assert ours[1:, :, 24:].isnan().all() and not ours[0].isnan().any()
        assert_bit_equal(ours[..., :24], nope[..., :24])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("style", STYLES)
def test_layouts(device, style, dtype):
    """Each tensor in any layout, heads in front of tokens or behind them."""
    q, k_nope, k_rope = torch.randn(3, 6, 4, 96), torch.randn(3, 6, 4, 32), torch.randn(3, 6, 1, 64)
    given = [t.to(dtype) for t in (q, k_nope, k_rope)]
    angles = [t.to(device) for t in tables(3, 6, 1, 32)]
    expected = ops.mla_qk_rope(*(t.to(device) for t in given), *angles, style=style)
    for i in range(3):
        for name, view in layouts(given[i]).items():
            tensors = [(view if i == j else t).to(device) for j, t in enumerate(given)]
            for ours, theirs in zip(ops.mla_qk_rope(*tensors, *angles, style=style), expected, strict=True):
                assert_bit_equal(ours, theirs, name)
            swapped = [t.transpose(1, 2) for t in (*tensors, *angles)]
            for ours, theirs in zip(ops.mla_qk_rope(*swapped, style=style), expected, strict=True):
                assert_bit_equal(ours, theirs.transpose(1, 2).contiguous(), name)


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(data=st.data())
def test_any_shape(data):
    """Leading dimensions of any number and order in memory; k_rope and the tables broadcast along any of them."""
    lead = data.draw(st.lists(st.integers(0, 4), max_size=3))
    rope, nope = 2 * data.draw(st.integers(1, 20)), data.draw(st.integers(0, 33))
    dtype, table_dtype = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(DTYPES))

    def rows(width, shape=lead, kind=dtype):
        dims = data.draw(st.permutations(range(len(shape) + 1)))
        back = [dims.index(d) for d in range(len(dims))]
        cut = data.draw(st.integers(0, 3))
        return torch.randn(*shape, width + cut).to(kind)[..., cut:].permute(dims).contiguous().permute(back)

    q, k_nope = rows(nope + rope), rows(nope) if data.draw(st.booleans()) else None
    shared = lead if k_nope is None else [data.draw(st.sampled_from([1, n])) for n in lead]
    if k_nope is not None:
        shared = shared[data.draw(st.integers(0, len(lead))) :]
    cos, sin = tables(*(data.draw(st.sampled_from([1, n])) for n in lead), rope // 2, dtype=table_dtype)
    style, inverse = data.draw(st.sampled_from(STYLES)), data.draw(st.booleans())
    check("cpu", q, k_nope, rows(rope, shared), cos, sin, None, style, inverse)


def test_q_and_k_of_other_shapes(device):
    """A new query and all keys: only the tables are shared."""
    angles = tables(1, 8)
    check(device, torch.randn(2, 1, 48), torch.randn(5, 3, 7, 32), torch.randn(3, 1, 16), *angles)


def test_wide_rows(device):
    """Wider than a kernel takes in one go."""
    check(device, *projections(3, 2, 1100, 1200, 8), *tables(3, 1, 600), style="interleaved_to_half")


def test_work_is_split_anywhere(device):
    """Enough rows for several threads, whose shares begin inside a block of positions."""
    check(device, *projections(100, 13, 96, 64, 64), *tables(100, 1, 32))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_nothing_to_do(device, shape):
    q, k_nope = torch.randn(*shape, 24, device=device), torch.randn(*shape, 16, device=device)
    k_rope, angles = torch.randn(shape[0], 1, 8, device=device), [t.to(device) for t in tables(shape[0], 1, 4)]
    q_out, k_out = ops.mla_qk_rope(q, k_nope, k_rope, *angles)
    assert q_out.shape == k_out.shape == (*shape, 24)
    q_out, k_out = ops.mla_qk_rope(q, None, k_rope, *angles)
    assert q_out.shape == q.shape
    assert_bit_equal(k_out, ops.rotary_embedding(k_rope, None, *angles)[0])


@pytest.mark.gpu
@pytest.mark.slow
@needs_gpu
@pytest.mark.parametrize("style", STYLES)
def test_more_than_2_to_31_elements(style):
    tokens = 2**31 // (128 * 24) + 5
    q = torch.empty(tokens, 128, 24, dtype=torch.bfloat16, device="cuda").normal_()
    kv = torch.empty(tokens, 128, 32, dtype=torch.bfloat16, device="cuda").normal_()
    k_rope = torch.empty(tokens, 1, 8, dtype=torch.bfloat16, device="cuda").normal_()
    positions = torch.randint(0, 64, (tokens, 1), device="cuda")
    angles = [t.cuda() for t in tables(64, 4, dtype=torch.bfloat16)]
    results = ops.mla_qk_rope(q, kv[..., :16], k_rope, *angles, positions, style)
    assert results[0].numel() > 2**31
    for part in (slice(0, 3), slice(tokens // 2, tokens // 2 + 3), slice(tokens - 3, tokens)):
        alone = ops.mla_qk_rope(q[part], kv[part, :, :16], k_rope[part], *angles, positions[part], style)
        for ours, theirs in zip(results, alone, strict=True):
            assert_bit_equal(ours[part], theirs)


@pytest.mark.gpu
@needs_gpu
def test_replayed_graph():
    q, k_nope, k_rope = (t.cuda() for t in projections(40, 8, 128, 64, 128))
    angles = [t.cuda() for t in tables(50, 32, dtype=torch.bfloat16)]
    positions = torch.randint(0, 50, (40, 1), device="cuda")
    call = lambda: ops.mla_qk_rope(q, k_nope, k_rope, *angles, positions)  # noqa: E731
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
        (dict(q=torch.ones(())), "q must have at least one dimension"),
        (dict(q=torch.ones(3, 2, 12).double()), "q must be float32, bfloat16 or float16, got float64"),
        (dict(q=torch.ones(3, 2, 14)), r"k_nope must be that of q less that of k_rope, 6, got \[3, 2, 4\]"),
        (dict(q=torch.ones(3, 2, 6)), r"the last dimension of k_rope must be even and in \[2, 6\], got \[3, 1, 8\]"),
        (dict(k_rope=torch.ones(3, 1, 7)), r"k_rope must be even and in \[2, 12\], got \[3, 1, 7\]"),
        (dict(k_rope=torch.ones(3, 1, 0)), r"k_rope must be even and in \[2, 12\], got \[3, 1, 0\]"),
        (dict(k_rope=torch.ones(())), "k_rope must have at least one dimension"),
        (dict(k_rope=torch.ones(3, 3, 8)), r"k_rope of shape \[3, 3, 8\] does not broadcast to .* k_nope, \[3, 2, 4\]"),
        (dict(k_rope=torch.ones(3, 1, 8).half()), "k_rope must have the dtype of q, float32, got float16"),
        (dict(k_nope=torch.ones(3, 2, 4).half()), "k_nope must have the dtype of q, float32, got float16"),
        (dict(k_nope=torch.ones(())), r"k_nope must be that of q less that of k_rope, 4, got \[\]"),
        (dict(style="neox"), "style must be half, interleaved or interleaved_to_half, got neox"),
        (dict(cos=torch.ones(3, 1, 3)), r"sin must have the shape of cos, \[3, 1, 3\], got \[3, 1, 4\]"),
        (dict(sin=torch.ones(3, 1, 4).half()), "sin must have the dtype of cos, float32, got float16"),
        (dict(cos=torch.ones(2, 1, 4), sin=torch.ones(2, 1, 4)), r"cos of shape \[2, 1, 4\] does not .* q, \["),
        (dict(k_nope=torch.ones(2, 2, 4), k_rope=torch.ones(2, 1, 8)), "cos of shape .* does not .* k_nope, "),
        (dict(k_nope=None, k_rope=torch.ones(2, 1, 8)), "cos of shape .* does not .* k_rope, "),
        (dict(positions=torch.zeros(3, 1).long()), r"cos must be a cache \[rows, columns\], got \[3, 1, 4\]"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("meta", [False, True])
def test_errors(change, message, meta):
    arguments = {
        "q": torch.ones(3, 2, 12),
        "k_nope": torch.ones(3, 2, 4),
        "k_rope": torch.ones(3, 1, 8),
        "cos": torch.ones(3, 1, 4),
        "sin": torch.ones(3, 1, 4),
        **change,
    }
    if meta:
        arguments = {n: a.to("meta") if isinstance(a, torch.Tensor) else a for n, a in arguments.items()}
    with pytest.raises(ValueError, match=rf"mla_qk_rope: .*{message}"):
        ops.mla_qk_rope(**arguments)


@pytest.mark.parametrize(("style", "dtype"), list(zip(STYLES, DTYPES, strict=True)))
def test_opcheck(device, style, dtype):
    op = torch.ops.deepinfer.mla_qk_rope.default
    q, k_nope, k_rope = (t.to(device) for t in projections(5, 3, 16, 8, 4, dtype))
    angles = [t.to(device) for t in tables(5, 1, 4)]
    opcheck(op, (q, k_nope, k_rope, *angles), {"style": style})
    opcheck(op, (q, None, k_rope, *angles), {"style": style, "inverse": True})
    cache = [t.to(device) for t in tables(9, 8)]
    opcheck(op, (q, k_nope, k_rope, *cache, torch.arange(5, device=device)[:, None], style))
