import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from checking import assert_bit_equal, layouts, opcheck

from torch_deepinfer import ops
from torch_deepinfer.reference import activation as reference

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALVES = [torch.bfloat16, torch.float16]
GPT_OSS = {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0}
CASES = [("silu_and_mul", options) for options in ({}, {"limit": 1.3}, GPT_OSS, {"alpha": 0.5}, {"up_offset": 0.1})]
CASES += [("gelu_and_mul", {"approximate": name}) for name in ("none", "tanh")]


def exact(name: str, gate: torch.Tensor, up: torch.Tensor, **options) -> torch.Tensor:
    """The op in float64 with its roundings to the storage dtype."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(gate.dtype).double()

    g, u = gate.cpu().double(), up.cpu().double()  # not every device has float64
    if name == "gelu_and_mul":
        tanh_argument = math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)
        tanh = options["approximate"] == "tanh"
        cdf = torch.sigmoid(2 * tanh_argument) if tanh else 0.5 * torch.special.erfc(-g / math.sqrt(2))
        return rounded(rounded(g * cdf) * u).to(gate.dtype)
    if "limit" in options:
        limit = rounded(torch.tensor(options["limit"])).item()
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    alpha, offset = (
        torch.tensor(options.get(key, default)).item() for key, default in (("alpha", 1), ("up_offset", 0))
    )
    if alpha == 1 and offset == 0:
        return rounded(rounded(g * torch.sigmoid(g)) * u).to(gate.dtype)
    return rounded(rounded(u + offset) * rounded(g * rounded(torch.sigmoid(rounded(alpha * g))))).to(gate.dtype)


def assert_within(actual: torch.Tensor, expected: torch.Tensor, units: float) -> None:
    """At most ``units`` of the last place apart; NaN and infinities are the same."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    actual, expected = actual.cpu(), expected.cpu()
    special = ~expected.isfinite()
    assert_bit_equal(actual[special], expected[special])
    actual, wide = actual[~special].double(), expected[~special].double()
    info = torch.finfo(expected.dtype)
    exponent = torch.frexp(wide.abs().clamp(min=info.tiny))[1] - 1
    unit = torch.ldexp(torch.full_like(wide, info.eps), exponent)
    # Below -88.7 the exponential of 1 / (1 + exp(-x)) overflows and the result is 0.
    apart = ((actual - wide).abs() - 3e-37).clamp(min=0) / unit
    assert not (apart > units).any(), f"{apart.max()} units in the last place"


def tolerance(options: dict, dtype: torch.dtype) -> float:
    """Units in the last place. A rounded step may fall to the other side, and the next ones carry that on."""
    if dtype != torch.float32:
        return 2
    # The exponential has the absolute error of its argument: up to 75, after five roundings, for the tanh form.
    return {"tanh": 256, "none": 12}.get(options.get("approximate"), 8)


def inputs(*shape: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = (torch.randn(*shape, device=device) for _ in range(2))
    return (3 * gate).to(dtype), up.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("size", [1, 15, 16, 768, 1031])
def test_values(device, dtype, name, options, size):
    gate, up = inputs(3, 5, size, dtype=dtype, device=device)
    op = getattr(ops, name)
    actual = op(gate, up, **options)
    assert actual.is_contiguous()
    assert_within(actual, exact(name, gate, up, **options), tolerance(options, dtype))
    expected = getattr(reference, name)(gate, up, **options)
    # torch's own gelu is off by 1e-6 before its rounding.
    slack = 4e-6 if name == "gelu_and_mul" else 1e-30
    units = 8 if dtype == torch.float32 else 2
    torch.testing.assert_close(actual, expected, rtol=units * torch.finfo(dtype).eps, atol=slack)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("size", [1, 40, 259])
def test_halves_and_interleaved_columns(device, dtype, name, options, size):
    gate, up = inputs(4, size, dtype=dtype, device=device)
    op = getattr(ops, name)
    expected = op(gate, up, **options)
    assert_bit_equal(op(torch.cat([gate, up], -1), **options), expected)
    columns = torch.stack([gate, up], -1).flatten(-2)
    assert_bit_equal(op(columns[..., ::2], columns[..., 1::2], **options), expected)
    assert_bit_equal(op(columns[..., 1::2], columns[..., ::2], **options), op(up, gate, **options))
    # Strides of two that are not one tensor's columns.
    other = torch.stack([up, gate], -1).flatten(-2)
    assert_bit_equal(op(columns[..., ::2], other[..., ::2], **options), expected)
    assert_bit_equal(op(columns[..., ::2], columns[[0, 0, 0, 0]][..., 1::2], **options)[0], expected[0])
    assert_bit_equal(op(columns[:3, ::2], columns[1:, 1::2], **options), op(gate[:3], up[1:], **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul"])
def test_layouts(device, dtype, name):
    gate, up = (torch.randn(4, 6, 40).to(dtype) for _ in range(2))
    weights = torch.rand(4, 6, device=device)
    op = getattr(ops, name)
    expected = op(gate.to(device), up.to(device), row_weights=weights)
    both = torch.cat([gate, up], -1)
    for (layout, gate_view), up_view in zip(layouts(gate).items(), reversed(layouts(up).values()), strict=True):
        assert_bit_equal(op(gate_view.to(device), up_view.to(device), row_weights=weights), expected, layout)
    for layout, view in layouts(both).items():
        assert_bit_equal(op(view.to(device), row_weights=weights), expected, layout)
        columns = torch.stack([gate, up], -1).flatten(-2)
        view = layouts(columns)[layout].to(device)
        assert_bit_equal(op(view[..., ::2], view[..., 1::2], row_weights=weights), expected, layout)
    expanded = gate[:1, :1].expand(4, 6, 40).to(device)
    assert_bit_equal(op(expanded, up.to(device)), op(expanded.contiguous(), up.to(device)))


@hypothesis.settings(max_examples=80, deadline=None)
@hypothesis.given(
    shape=st.lists(st.integers(0, 5), min_size=0, max_size=4),
    size=st.integers(0, 70),
    case=st.sampled_from(CASES),
    dtype=st.sampled_from(DTYPES),
    order=st.randoms(use_true_random=False),
    split=st.booleans(),
)
def test_any_shape_and_permutation(shape, size, case, dtype, order, split):
    name, options = case
    gate, up = inputs(*shape, size, dtype=dtype, device="cpu")

    def permuted(x: torch.Tensor) -> torch.Tensor:
        dims = list(range(x.dim()))
        order.shuffle(dims)
        return x.permute(dims).contiguous().permute([dims.index(d) for d in range(x.dim())])

    given = (permuted(torch.cat([gate, up], -1)),) if split else (permuted(gate), permuted(up))
    assert_bit_equal(getattr(ops, name)(*given, **options), getattr(ops, name)(gate, up, **options))
    expected = exact(name, gate, up, **options)
    assert_within(getattr(ops, name)(*given, **options), expected, tolerance(options, dtype))


def test_more_dimensions_than_strides(device):
    x = torch.randn(*[2] * 12, device=device).permute([*range(10, -1, -1), 11])
    assert_bit_equal(ops.silu_and_mul(x), ops.silu_and_mul(x.contiguous()))
    gate, up = x[..., ::2].expand(*[2] * 12), x[..., 1::2].expand(*[2] * 12)
    assert_bit_equal(ops.silu_and_mul(gate, up), ops.silu_and_mul(gate.contiguous(), up.contiguous()))
    columns = torch.randn(*[2] * 11, 8, device=device).permute([*range(10, -1, -1), 11])
    gate, up = columns[..., ::2], columns[..., 1::2]
    assert_bit_equal(ops.silu_and_mul(gate, up), ops.silu_and_mul(gate.contiguous(), up.contiguous()))


# vllm#53390: offsets of token * 2 * size beyond 2^31.
@needs_gpu
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("interleaved", [False, True])
def test_more_than_2_to_31_elements(interleaved):
    size = 1024
    tokens = 2**31 // (2 * size) + 5
    both = torch.empty(tokens, 2 * size, dtype=torch.bfloat16, device="cuda").normal_()
    given = (both[:, ::2], both[:, 1::2]) if interleaved else (both,)
    out = ops.silu_and_mul(*given)
    for part in (slice(0, 3), slice(tokens // 2, tokens // 2 + 3), slice(tokens - 3, tokens)):
        assert_bit_equal(out[part], ops.silu_and_mul(*(x[part].contiguous() for x in given)))


@needs_gpu
@pytest.mark.gpu
def test_replayed_graph():
    both, weights = torch.randn(9, 2 * 40, device="cuda").bfloat16(), torch.rand(9, device="cuda").bfloat16()
    ops.silu_and_mul(both, row_weights=weights, **GPT_OSS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.silu_and_mul(both, row_weights=weights, **GPT_OSS)
    for _ in range(2):
        both.normal_()
        weights.uniform_()
        graph.replay()
        assert_bit_equal(out, ops.silu_and_mul(both, row_weights=weights, **GPT_OSS))


@pytest.mark.parametrize("dtype", HALVES)
def test_every_16_bit_gate(device, dtype):
    gate = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).to(device)
    gate = gate[gate.isfinite()]
    one = torch.ones_like(gate)
    silu = ops.silu_and_mul(gate, one)
    assert_within(silu, exact("silu_and_mul", gate, one), 1)
    assert (silu == F.silu(gate)).float().mean() > 0.999
    for approximate in ("none", "tanh"):
        expected = exact("gelu_and_mul", gate, one, approximate=approximate)
        assert_within(ops.gelu_and_mul(gate, one, approximate=approximate), expected, 1)


# Comfy-Org/comfy-kitchen#124: float32 where the chain of separate ops rounds gives other quantised rows.
@pytest.mark.parametrize("dtype", HALVES)
def test_rounds_as_the_separate_ops(device, dtype):
    gate, up = (torch.randn(64, 256, device=device).to(dtype) for _ in range(2))
    chain, actual = F.silu(gate) * up, ops.silu_and_mul(gate, up)
    unrounded = (F.silu(gate.float()) * up.float()).to(dtype)
    assert (unrounded != chain).float().mean() > 0.1
    assert (actual != chain).float().mean() < 1e-3
    scales, expected = (ops.quantize_per_token_group(y, -1, dtype=torch.int8)[1] for y in (actual, chain))
    assert (scales != expected).float().mean() < 0.05
    assert (ops.quantize_per_token_group(unrounded, -1, dtype=torch.int8)[1] != expected).float().mean() > 0.05


@pytest.mark.parametrize("dtype", HALVES)
def test_gpt_oss_rounds_every_step(device, dtype):
    gate, up = inputs(64, 256, dtype=dtype, device=device)
    g, u = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    chain = (u + 1) * (g * torch.sigmoid(g * 1.702))
    assert (ops.silu_and_mul(gate, up, **GPT_OSS) != chain).float().mean() < 1e-3


@pytest.mark.parametrize("weights_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_row_weights(device, dtype, weights_dtype, name, options):
    gate, up = inputs(3, 5, 70, dtype=dtype, device=device)
    weights = torch.rand(3, 5, device=device).to(weights_dtype)
    op = getattr(ops, name)
    expected = (op(gate, up, **options).float() * weights.float()[..., None]).to(dtype)
    strided = torch.stack([weights, weights], -1)[..., 0]
    for given in (weights, weights.flatten(), strided, weights.T.contiguous().T):
        assert_bit_equal(op(gate, up, row_weights=given, **options), expected)
    for given in (weights[0, 0], weights[0, :1]):
        assert_bit_equal(op(gate[0, 0], up[0, 0], row_weights=given, **options), expected[0, 0])


# vllm#57984, sglang#31935: the limit on its own and together with alpha; the gate is bounded above only.
@pytest.mark.parametrize("dtype", DTYPES)
def test_limit(device, dtype):
    gate = torch.tensor([[20.0, -20.0, 3.0]], dtype=dtype, device=device)
    up = torch.tensor([[30.0, -30.0, 1.0]], dtype=dtype, device=device)
    clamped, free = ops.silu_and_mul(gate, up, limit=7.0), ops.silu_and_mul(gate, up)
    low, high = torch.full_like(gate, -7.0), torch.full_like(gate, 7.0)
    assert_bit_equal(clamped, ops.silu_and_mul(gate.minimum(high), up.minimum(high).maximum(low)))
    assert clamped[0, 0] <= 49 < 590 < free[0, 0] and clamped[0, 2] == free[0, 2]
    assert_bit_equal(ops.silu_and_mul(gate, up, limit=math.inf), free)
    assert_within(ops.silu_and_mul(gate, up, **GPT_OSS), exact("silu_and_mul", gate, up, **GPT_OSS), 2)
    # 7.1 is no value of the 16-bit types: the clamp gives what they can hold.
    assert ops.silu_and_mul(gate, torch.ones_like(up), limit=7.1)[0, 0] == F.silu(gate.clamp(max=7.1))[0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_nan_and_inf(device, dtype, name, options):
    nan, inf = math.nan, math.inf
    gate = torch.tensor([nan, 1.0, inf, 1.0, -1.0, -inf, 0.0, -0.0], dtype=dtype, device=device).repeat(4)
    up = torch.tensor([1.0, nan, 2.0, inf, inf, 1.0, inf, 1.0], dtype=dtype, device=device).repeat(4)
    actual = getattr(ops, name)(gate, up, **options)
    assert actual[:2].isnan().all() and actual[-1] == 0
    if "limit" in options:
        assert actual[2:5].isfinite().all() and actual[6] == 0
    else:
        assert actual[2:5].tolist() == [inf, inf, -inf] and actual[6].isnan()
    # -inf times an activation of 0; sigmoid(-inf) is 0 as well.
    assert actual[5].isnan()
    assert_bit_equal(actual[:8], actual[24:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_denormals(device, dtype):
    tiny = torch.finfo(dtype).smallest_normal
    gate = torch.tensor([tiny / 4, -tiny / 2, 1.5 * tiny, tiny], device=device).to(dtype)
    for name, options in (("silu_and_mul", {}), ("gelu_and_mul", {"approximate": "none"})):
        actual = getattr(ops, name)(gate, torch.ones_like(gate), **options)
        assert (actual.abs() > 0).all()
        torch.testing.assert_close(actual, gate / 2, rtol=0, atol=tiny * torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, u: ops.silu_and_mul(x, u[:1]), r"up must have the shape of gate, \[2, 8\], got \[1, 8\]"),
        (lambda x, u: ops.silu_and_mul(x, u.half()), "up must have the dtype of gate, float32, got float16"),
        (lambda x, u: ops.silu_and_mul(x.int()), "gate must be float32, bfloat16 or float16, got int32"),
        (lambda x, u: ops.silu_and_mul(x[:, 1:]), "last dimension of gate must be even without up, got 7"),
        (lambda x, u: ops.silu_and_mul(x[0, 0]), "gate must have at least one dimension"),
        (lambda x, u: ops.silu_and_mul(x, u, limit=-1.0), "limit must not be negative, got -1"),
        (lambda x, u: ops.silu_and_mul(x, u, limit=math.nan), "limit must not be negative, got nan"),
        (
            lambda x, u: ops.silu_and_mul(x, u, row_weights=u[:, :1]),
            r"row_weights must have the leading shape of gate or shape \[2\], got \[2, 1\]",
        ),
        (lambda x, u: ops.gelu_and_mul(x, u, row_weights=u[0]), r"shape \[2\], got \[8\]"),
        (lambda x, u: ops.gelu_and_mul(x, u, row_weights=u[:, 0].long()), "row_weights must be float32, .* got int64"),
        (lambda x, u: ops.gelu_and_mul(x, u, approximate="erf"), "approximate must be none or tanh, got erf"),
    ],
)
def test_errors(device, call, message):
    texts = []
    for where in (device, "meta"):
        with pytest.raises(ValueError, match=message) as error:
            call(torch.zeros(2, 8, device=where), torch.zeros(2, 8, device=where))
        texts.append(str(error.value))
    assert texts[0].removesuffix(".0") == texts[1].removesuffix(".0")


@pytest.mark.parametrize(("name", "options"), CASES)
def test_opcheck(device, name, options):
    silu, gelu = torch.ops.deepinfer.silu_and_mul.default, torch.ops.deepinfer.gelu_and_mul.default
    op = silu if name == "silu_and_mul" else gelu
    base = torch.randn(3, 5, 8, device=device).bfloat16()
    column_major = base.transpose(0, 2).contiguous().transpose(0, 2)
    for x in (base.transpose(0, 1), base[..., :0, :], base[:, :1], base[:, 1:, 2:], column_major, base[0, 0]):
        weights = torch.rand(x.shape[:-1], device=device)
        opcheck(op, (x,), {"row_weights": weights, **options})
        opcheck(op, (x, x.clone()), options)
    opcheck(op, (base[..., ::2], base[..., 1::2]), options)
