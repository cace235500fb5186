import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from checking import assert_bit_equal, layouts, opcheck

from torch_deepinfer import ops
from torch_deepinfer.reference import activation as reference

E4M3, E8M0, E2M1 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ACTIVATIONS = [{}, {"limit": 1.5}, {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0}]
FORMATS = [
    {},
    {"group_size": 32, "scale_dtype": torch.int32, "scale_layout": "column"},
    {"group_size": 16, "dtype": E2M1, "scale_dtype": E8M0},
    {"group_size": -1, "dtype": torch.int8},
    {"group_size": 6, "round_scale": True, "scale_layout": "column"},
]

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")


def plain(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8) if t.dtype in (E2M1, E8M0) else t.float() if t.dtype == E4M3 else t


def same(actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype and a.stride() == e.stride()
        assert_bit_equal(plain(a), plain(e))


def chain(*given, row_weights=None, rows_to_slots=None, activation, **quantised):
    """The two ops, with the gather and the zeros of a map between them."""
    if rows_to_slots is not None and row_weights is not None:
        row_weights = row_weights.flatten()[rows_to_slots.clamp(min=0).long()]
    y = ops.silu_and_mul(*given, row_weights=row_weights, **activation)
    if rows_to_slots is not None:
        y.view(-1, y.shape[-1])[rows_to_slots < 0] = 0
    return ops.quantize_per_token_group(y, **quantised)


def inputs(*shape: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = (torch.randn(*shape, device=device) for _ in range(2))
    return (3 * gate).to(dtype), up.to(dtype)


@pytest.mark.parametrize(
    ("dtype", "activation", "quantised"),
    [
        *((dtype, activation, FORMATS[0]) for dtype in DTYPES for activation in ACTIVATIONS),
        *((dtype, {}, quantised) for dtype in DTYPES[:2] for quantised in FORMATS[1:]),
    ],
)
def test_equals_the_two_ops(device, dtype, activation, quantised):
    for shape in [(5, 512), (2, 3, 70), (4200,)]:
        gate, up = inputs(*shape, dtype=dtype, device=device)
        expected = chain(gate, up, activation=activation, **quantised)
        same(ops.silu_and_mul_quant(gate, up, **activation, **quantised), expected)
        halves = torch.cat([gate, up], -1)
        same(ops.silu_and_mul_quant(halves, **activation, **quantised), expected)
        columns = torch.stack([gate, up], -1).flatten(-2)
        same(ops.silu_and_mul_quant(columns[..., ::2], columns[..., 1::2], **activation, **quantised), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_near_the_reference(dtype, activation):
    """The exponentials differ in the last place, and so may a rounding to the storage dtype."""
    gate, up = inputs(16, 256, dtype=dtype, device="cpu")
    slots = torch.tensor([3, -1, 0, 7] * 4, dtype=torch.int32)
    options = {"row_weights": torch.rand(2, 4), "rows_to_slots": slots, **activation}
    actual, expected = (f(gate, up, **options) for f in (ops.silu_and_mul_quant, reference.silu_and_mul_quant))
    torch.testing.assert_close(actual[1], expected[1], rtol=2**-7, atol=0)
    back = [ops.dequantize(*pair, [1, 128], torch.float32) for pair in (actual, expected)]
    assert (back[0] - back[1]).abs().max() <= actual[1].max() * 33
    assert (actual[0].float() != expected[0].float()).float().mean() < 0.05


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantised", FORMATS[:4])
def test_map(device, dtype, weights, quantised):
    """Rows without a slot may hold anything."""
    ids = torch.tensor([[0, 2], [-1, 1], [2, 0], [1, 2], [0, -1]], device=device)
    slots = ops.moe_expert_map(ids, 4, alignment=4)[0]
    gate, up = inputs(len(slots), 160, dtype=dtype, device=device)
    gate[slots < 0] = torch.nan
    row_weights = None if weights is None else torch.rand(5, 2, device=device).to(weights)
    expected = chain(gate, up, row_weights=row_weights, rows_to_slots=slots, activation={}, **quantised)
    same(ops.silu_and_mul_quant(gate, up, row_weights=row_weights, rows_to_slots=slots, **quantised), expected)
    if weights is not None:
        given = {"row_weights": row_weights.flatten(), "rows_to_slots": slots, **quantised}
        same(ops.silu_and_mul_quant(gate, up, **given), expected)
        same(ops.silu_and_mul_quant(torch.cat([gate, up], -1), **given), expected)
    if expected[1].dtype == torch.float32:
        zero = ops.quantize_per_token_group(torch.zeros(1, 160, device=device), **quantised)[1]
        assert (expected[1][slots < 0] == zero).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_weights_and_layouts(device, dtype):
    gate, up = inputs(4, 6, 40, dtype=dtype, device="cpu")
    weights = torch.rand(4, 6, device=device)
    expected = chain(gate.to(device), up.to(device), row_weights=weights, activation={}, group_size=8)
    for (name, left), right in zip(layouts(gate).items(), reversed(layouts(up).values()), strict=True):
        given = left.to(device), right.to(device)
        actual = ops.silu_and_mul_quant(*given, row_weights=weights, group_size=8)
        assert_bit_equal(plain(actual[0]), plain(expected[0]), name)
        assert_bit_equal(actual[1], expected[1], name)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    shape=st.lists(st.integers(0, 5), min_size=0, max_size=3),
    size=st.integers(0, 70),
    group_size=st.sampled_from([-1, 2, 16, 34, 100]),
    dtype=st.sampled_from(DTYPES),
    code=st.sampled_from([E4M3, torch.int8, E2M1]),
    layout=st.sampled_from(["row", "column"]),
)
def test_any_shape(shape, size, group_size, dtype, code, layout):
    gate, up = inputs(*shape, size // 2 * 2, dtype=dtype, device="cpu")
    quantised = {"group_size": group_size, "dtype": code, "scale_layout": layout}
    same(ops.silu_and_mul_quant(gate, up, **quantised), chain(gate, up, activation={}, **quantised))


def test_long_rows(device):
    """Longer than the scratch of a CPU and than the registers of a CUDA block."""
    gate, up = inputs(3, 20_000, dtype=torch.bfloat16, device=device)
    for group_size in (-1, 128, 5000):
        same(
            ops.silu_and_mul_quant(gate, up, group_size=group_size),
            chain(gate, up, activation={}, group_size=group_size),
        )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_inf_poison_their_group_only(device, bad):
    gate, up = inputs(3, 256, dtype=torch.bfloat16, device=device)
    gate[1, 130] = bad
    codes, scales = ops.silu_and_mul_quant(gate, up)
    poisoned = torch.zeros(3, 256, dtype=torch.bool, device=device)
    poisoned[1, 128:] = True
    assert torch.equal(codes.float().isnan(), poisoned) and torch.equal(scales.isnan(), poisoned[:, ::128])


@needs_gpu
@pytest.mark.gpu
def test_what_is_no_slot_poisons_its_row():
    gate, up = inputs(4, 256, dtype=torch.bfloat16, device="cuda")
    weights = torch.rand(3, 2, device="cuda")
    slots = torch.tensor([0, 6, -2, 5], dtype=torch.int32, device="cuda")
    codes, scales = ops.silu_and_mul_quant(gate, up, row_weights=weights, rows_to_slots=slots)
    wrong = torch.tensor([False, True, True, False], device="cuda")
    assert torch.equal(scales.isnan().all(-1), wrong) and torch.equal(codes.float().isnan().all(-1), wrong)


# vllm#53390: offsets of token * 2 * size beyond 2^31.
@needs_gpu
@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_2_to_31_elements():
    size = 1024
    tokens = 2**31 // (2 * size) + 5
    both = torch.empty(tokens, 2 * size, dtype=torch.bfloat16, device="cuda").normal_()
    codes, scales = ops.silu_and_mul_quant(both)
    for part in (slice(0, 3), slice(tokens // 2, tokens // 2 + 3), slice(tokens - 3, tokens)):
        same((codes[part], scales[part]), ops.silu_and_mul_quant(both[part].contiguous()))


@needs_gpu
@pytest.mark.gpu
def test_replayed_graph():
    both = torch.randn(9, 512, device="cuda").bfloat16()
    ops.silu_and_mul_quant(both)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = ops.silu_and_mul_quant(both)
    both.normal_()
    graph.replay()
    same(actual, ops.silu_and_mul_quant(both))


def slots(x: torch.Tensor, *values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).to(x.device)


ERRORS = [
    (lambda x: ops.silu_and_mul_quant(x, x[:1]), r"up must have the shape of gate, \[2, 8\], got \[1, 8\]"),
    (lambda x: ops.silu_and_mul_quant(x[:, 1:]), "last dimension of gate must be even without up, got 7"),
    (lambda x: ops.silu_and_mul_quant(x, limit=-1.0), "limit must not be negative, got -1"),
    (lambda x: ops.silu_and_mul_quant(x, row_weights=x), r"leading shape of gate or shape \[2\], got \[2, 8\]"),
    (
        lambda x: ops.silu_and_mul_quant(x, row_weights=x.long(), rows_to_slots=slots(x, 0, 1)),
        "row_weights must be float32, .* got int64",
    ),
    (lambda x: ops.silu_and_mul_quant(x, rows_to_slots=x[0]), "rows_to_slots must be int32, got float32"),
    (lambda x: ops.silu_and_mul_quant(x, rows_to_slots=slots(x, 0)), r"must have shape \[2\], got \[1\]"),
    (lambda x: ops.silu_and_mul_quant(x, group_size=0), "group_size must be positive, .* got 0"),
    (lambda x: ops.silu_and_mul_quant(x, dtype=torch.half), "dtype must be float8_e4m3fn, .* got float16"),
    (lambda x: ops.silu_and_mul_quant(x, scale_dtype=torch.half), "scale_dtype must be float32, .* got float16"),
    (lambda x: ops.silu_and_mul_quant(x, scale_layout="rows"), "scale_layout must be row or column, got rows"),
    (lambda x: ops.silu_and_mul_quant(x, dtype=E2M1, group_size=3), "group_size must be even .* got 3"),
]


@pytest.mark.parametrize(("call", "message"), ERRORS)
def test_errors(device, call, message):
    texts = []
    for where in (device, "meta"):
        with pytest.raises(ValueError, match=message) as error:
            call(torch.zeros(2, 8, device=where))
        texts.append(str(error.value))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("wrong", [-2, 4])
def test_slot_out_of_range_on_a_cpu(wrong):
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match=rf"rows_to_slots must lie in \[-1, 4\), got {wrong}"):
        ops.silu_and_mul_quant(x, row_weights=torch.ones(2, 2), rows_to_slots=slots(x, 0, wrong))


def test_opcheck(device):
    op = torch.ops.deepinfer.silu_and_mul_quant.default
    gate, up = inputs(3, 5, 8, dtype=torch.bfloat16, device=device)
    for options in ({"group_size": 4, "scale_layout": "column"}, {"scale_dtype": torch.int32, "limit": 2.0}):
        opcheck(op, (gate, up), options)
        opcheck(op, (gate.transpose(0, 1),), options)
        opcheck(op, (gate[0, 0],), options)
        opcheck(op, (gate[..., ::2], gate[..., 1::2]), options)
        opcheck(op, (gate[0],), {"rows_to_slots": slots(gate, 2, -1, 0, 1, 3), "row_weights": up[0, :2, :2], **options})
