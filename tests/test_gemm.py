import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from checking import assert_bit_equal, layouts, opcheck

from torch_deepinfer import ops
from torch_deepinfer.reference import gemm as reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GPT_OSS = {"interleaved": True, "limit": 7.0, "alpha": 1.702, "up_offset": 1.0}


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Norm of the error over the norm of the exact result."""
    return float((actual.double().cpu() - exact.double().cpu()).norm() / exact.double().norm().clamp_min(1e-300))


def rounding(dtype: torch.dtype) -> float:
    """What one rounding to the dtype may cost, in the norm."""
    return {torch.float32: 1e-6, torch.bfloat16: 2.5e-3, torch.float16: 3e-4}[dtype]


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Element by element, for inputs of any shape: sums of values about 1, which may cancel."""
    tolerance = 4 * rounding(actual.dtype)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def offsets_of(sizes: list[int], device: str = "cpu") -> torch.Tensor:
    return torch.tensor(sizes, device=device).cumsum(0).int()


def random_experts(
    tokens: int,
    hidden: int,
    intermediate: int,
    experts: int,
    topk: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[torch.Tensor, ...]:
    """x, gate_up, down, topk_ids, topk_weights."""
    x = torch.randn(tokens, hidden).to(device, dtype)
    gate_up = (torch.randn(experts, 2 * intermediate, hidden) / max(1, hidden) ** 0.5).to(device, dtype)
    down = (torch.randn(experts, hidden, intermediate) / max(1, intermediate) ** 0.5).to(device, dtype)
    ids = torch.rand(tokens, experts).topk(topk).indices.to(device)
    return x, gate_up, down, ids, torch.rand(tokens, topk).softmax(-1).to(device)


def exact_experts(x, gate_up, down, topk_ids, topk_weights, **options) -> torch.Tensor:
    """The reference in float64 throughout, without any rounding."""
    options = {key: value.double() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    out = torch.zeros(x.shape, dtype=torch.float64)
    biases = options.pop("gate_up_bias", None), options.pop("down_bias", None)
    for token in range(x.shape[0]):
        for expert, weight in zip(topk_ids[token].tolist(), topk_weights[token].double().tolist(), strict=True):
            hidden = gate_up[expert].double() @ x[token].double()
            if biases[0] is not None:
                hidden += biases[0][expert]
            gate, up = (hidden[::2], hidden[1::2]) if options.get("interleaved") else hidden.chunk(2)
            if "limit" in options:
                gate, up = gate.clamp(max=options["limit"]), up.clamp(-options["limit"], options["limit"])
            gated = gate * torch.sigmoid(options.get("alpha", 1.0) * gate) * (up + options.get("up_offset", 0.0))
            y = down[expert].double() @ gated
            out[token] += weight * (y if biases[1] is None else y + biases[1][expert])
    return out


# ---- grouped_mm ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 31, 64, 100, 577])
@pytest.mark.parametrize("n", [1, 7, 48, 131])
@pytest.mark.parametrize("with_bias", [False, True])
def test_grouped_mm_against_float64(device, dtype, k, n, with_bias):
    sizes = [1, 0, 5, 2, 19, 3, 300]
    x = torch.randn(sum(sizes), k).to(dtype)
    weight = torch.randn(len(sizes), n, k).to(dtype).transpose(1, 2)
    bias = torch.randn(len(sizes), n).to(dtype) if with_bias else None
    offsets = offsets_of(sizes)
    exact = torch.cat(
        [
            part.double() @ weight[e].double() + (bias[e].double() if with_bias else 0)
            for e, part in enumerate(x.split(sizes))
        ]
    )
    out = ops.grouped_mm(
        x.to(device), weight.to(device), offsets.to(device), bias.to(device) if bias is not None else None
    )
    assert out.dtype == dtype and out.is_contiguous()
    assert relative_error(out, exact) < 2 * rounding(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_mm_layouts(device, dtype):
    x = torch.randn(9, 40).to(dtype)
    weight = torch.randn(3, 24, 40).to(dtype)
    offsets = offsets_of([4, 0, 5], device)
    expected = ops.grouped_mm(x.to(device), weight.transpose(1, 2).to(device), offsets)
    assert relative_error(expected, reference.grouped_mm(x, weight.transpose(1, 2), offsets.cpu())) < rounding(dtype)
    for name, view in layouts(x).items():
        assert_bit_equal(ops.grouped_mm(view.to(device), weight.transpose(1, 2).to(device), offsets), expected, name)
    for name, view in layouts(weight).items():
        view = view.to(device).transpose(1, 2)
        assert_bit_equal(ops.grouped_mm(x.to(device), view, offsets), expected, name)
    bias = torch.randn(3, 24).to(dtype)
    expected = ops.grouped_mm(x.to(device), weight.transpose(1, 2).to(device), offsets, bias.to(device))
    for name, view in layouts(bias).items():
        actual = ops.grouped_mm(x.to(device), weight.transpose(1, 2).to(device), offsets, view.to(device))
        assert_bit_equal(actual, expected, name)
    strided_offsets = torch.stack([offsets, offsets - 9], 1)[:, 0]
    actual = ops.grouped_mm(x.to(device), weight.transpose(1, 2).to(device), strided_offsets, bias.to(device))
    assert_bit_equal(actual, expected)


# BitBLAS#33: weights that are .t() views, slices and stride-0 expansions.
def test_grouped_mm_weight_views(device):
    x, base = torch.randn(3, 64, device=device), torch.randn(64, 8, device=device)
    offsets = offsets_of([3], device)
    for weight in (base, base.t().contiguous().t()):
        assert relative_error(ops.grouped_mm(x, weight[None], offsets), x.cpu() @ base.cpu()) < 1e-6
    wide = torch.randn(8, 96, device=device)
    out = ops.grouped_mm(x, wide[:, 16:80].t()[None], offsets)
    assert relative_error(out, x.cpu() @ wide.cpu()[:, 16:80].t()) < 1e-6
    row = torch.randn(1, 64, device=device)
    out = ops.grouped_mm(x, row.expand(8, 64).t()[None], offsets)
    assert relative_error(out, (x.cpu() @ row.cpu().t()).expand(3, 8)) < 1e-6
    column = torch.randn(64, 1, device=device)[:1].expand(64, 8)  # stride 0 along k as well
    assert relative_error(ops.grouped_mm(x, column[None], offsets), x.cpu() @ column.cpu()) < 1e-5
    shared = base[None].expand(2, 64, 8)
    out = ops.grouped_mm(x, shared, offsets_of([1, 2], device))
    assert relative_error(out, x.cpu() @ base.cpu()) < 1e-6


# grouped_gemm#36, MSLK#158, pytorch#172439, DeepGEMM#20: experts without rows, nothing left uninitialised.
@pytest.mark.parametrize("sizes", [[5, 0, 3], [0, 0, 0], [0, 8, 0], [0, 0, 8], [8, 0, 0]])
def test_grouped_mm_experts_without_rows(device, sizes):
    x = torch.randn(8, 4, device=device)
    weight = torch.randn(3, 4, 2, device=device)
    for expert, size in enumerate(sizes):
        if size == 0:
            weight[expert] = math.nan  # never read
    poison = torch.full((8, 2), math.nan, device=device)
    del poison
    offsets = offsets_of(sizes, device)
    out = ops.grouped_mm(x, weight, offsets).cpu()
    expected = reference.grouped_mm(x.cpu(), weight.cpu(), offsets.cpu())
    torch.testing.assert_close(out, expected)
    assert not out[sum(sizes) :].any()


# DeepGEMM#268: a tile of rows must not reach into the next expert.
@pytest.mark.parametrize("size", [1, 3, 8, 16, 32, 33])
def test_grouped_mm_tile_stays_in_its_expert(device, size):
    x = torch.randn(4 * size, 32, device=device)
    weight = torch.zeros(4, 32, 5, device=device)
    weight[1] = math.inf
    weight[3] = 1
    out = ops.grouped_mm(x, weight, offsets_of([size] * 4, device)).cpu()
    assert not out[:size].any() and not out[2 * size : 3 * size].any()
    torch.testing.assert_close(out[3 * size :], x[3 * size :].sum(1, keepdim=True).expand(size, 5).cpu())


def test_grouped_mm_rows_past_the_last_offset_are_zeros(device):
    x = torch.full((6, 16), math.nan, device=device)
    x[:2] = 1
    out = ops.grouped_mm(x, torch.ones(2, 16, 3, device=device), offsets_of([1, 1], device)).cpu()
    assert (out[:2] == 16).all() and (out[2:] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_stay_in_their_row(device, dtype):
    x = torch.randn(10, 70).to(device, dtype)
    weight = torch.randn(2, 70, 9).to(device, dtype)
    offsets = offsets_of([5, 5], device)
    clean = ops.grouped_mm(x, weight, offsets)
    x[2, 69], x[7, 3] = math.nan, math.inf
    out = ops.grouped_mm(x, weight, offsets)
    assert out[2].isnan().all() and not out[7].isfinite().any()
    rest = [0, 1, 3, 4, 5, 6, 8, 9]
    assert_bit_equal(out[rest], clean[rest])


@pytest.mark.parametrize("shape", [(0, 8, 5, 3), (4, 0, 5, 3), (4, 8, 0, 3), (4, 8, 5, 0)])
def test_grouped_mm_empty(device, shape):
    p, k, n, e = shape
    x, weight = torch.randn(p, k, device=device), torch.randn(e, k, n, device=device)
    bias = torch.randn(e, n, device=device)
    offsets = torch.full((e,), p, dtype=torch.int32, device=device)
    expected = torch.zeros(p, n)
    assert_bit_equal(ops.grouped_mm(x, weight, offsets), expected)
    if k == 0:
        expected = bias[:1].expand(p, n)
    assert_bit_equal(ops.grouped_mm(x, weight, offsets, bias), expected)


# The answer to a token is the same in any batch: sums run along k alone.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [95, 2048])
def test_a_row_does_not_depend_on_the_others(device, dtype, k):
    x = torch.randn(301, k).to(device, dtype)
    weight = torch.randn(1, 50, k).to(device, dtype).transpose(1, 2)
    whole = ops.grouped_mm(x, weight, offsets_of([301], device))
    for rows in (slice(0, 1), slice(5, 7), slice(3, 6), slice(100, 117), slice(298, 301)):
        part = ops.grouped_mm(x[rows], weight, offsets_of([rows.stop - rows.start], device))
        assert_bit_equal(part, whole[rows])


@hypothesis.settings(max_examples=80, deadline=None)
@hypothesis.given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    k=st.integers(1, 150),
    n=st.integers(1, 60),
    tail=st.integers(0, 3),
    dtype=st.sampled_from(DTYPES),
    dense_k=st.booleans(),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_grouped_mm_any_shape(sizes, k, n, tail, dtype, dense_k, with_bias, seed):
    torch.manual_seed(seed)
    x = torch.randn(sum(sizes) + tail, k).to(dtype)
    weight = (torch.randn(len(sizes), n, k) / k**0.5).to(dtype).transpose(1, 2)
    bias = torch.randn(len(sizes), n).to(dtype) if with_bias else None
    offsets = offsets_of(sizes)
    out = ops.grouped_mm(x, weight if dense_k else weight.contiguous(), offsets, bias)
    assert_near(out, reference.grouped_mm(x, weight, offsets, bias))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 3, 4)}, r"x must have shape \[P, K\], got \[2, 3, 4\]"),
        ({"x": torch.zeros(6, 4).double()}, "x must be float32, bfloat16 or float16, got float64"),
        ({"weight": torch.zeros(2, 5, 3)}, r"weight must have shape \[E, 4, N\], got \[2, 5, 3\]"),
        ({"weight": torch.zeros(4, 3)}, "weight must have shape"),
        ({"weight": torch.zeros(2, 4, 3).half()}, "weight must have the dtype of x, float32, got float16"),
        ({"offsets": torch.tensor([2, 6])}, "offsets must be int32, got int64"),
        ({"offsets": offsets_of([2, 2, 2])}, r"offsets must have shape \[2\], got \[3\]"),
        ({"bias": torch.zeros(3)}, r"bias must have shape \[2, 3\], got \[3\]"),
        ({"bias": torch.zeros(2, 3).bfloat16()}, "bias must have the dtype of x"),
    ],
)
@pytest.mark.parametrize("meta", [False, True])
def test_grouped_mm_errors(device, change, message, meta):
    given = {"x": torch.zeros(6, 4), "weight": torch.zeros(2, 4, 3), "offsets": offsets_of([2, 4]), "bias": None}
    given |= change
    with pytest.raises(ValueError, match=message):
        ops.grouped_mm(**{k: v if v is None else v.to("meta" if meta else device) for k, v in given.items()})


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([3, 2], "ascending and not negative, got 2 after 3"),
        ([-1, 2], "ascending and not negative, got -1 after 0"),
        ([2, 7], "must not exceed the 6 rows of x, got 7"),
    ],
)
def test_grouped_mm_bad_offsets(offsets, message):
    with pytest.raises(ValueError, match=message):
        ops.grouped_mm(torch.zeros(6, 4), torch.zeros(2, 4, 3), torch.tensor(offsets, dtype=torch.int32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_mm_opcheck(device, dtype):
    x = torch.randn(6, 8).to(device, dtype)
    weight = torch.randn(3, 8, 5).to(device, dtype)
    bias = torch.randn(3, 5).to(device, dtype)
    offsets, none = offsets_of([1, 3, 2], device), offsets_of([0, 0, 0], device)
    column_major = x.t().contiguous().t()
    for args in (
        (x, weight, offsets),
        (x, weight.transpose(1, 2).contiguous().transpose(1, 2), offsets, bias),
        (column_major, weight, offsets, bias),
        (x[:1], weight, none),
        (x[:0], weight, none, bias),
    ):
        opcheck(torch.ops.deepinfer.grouped_mm.default, args)


# ---- fused_experts ---------------------------------------------------------------------------------------------------


OPTIONS = [
    {},
    {"interleaved": True},
    {"limit": 1.5},
    GPT_OSS,
    {"activation": "gelu"},
    {"activation": "gelu_tanh", "interleaved": True},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("tokens", [1, 23])
def test_fused_experts_matches_reference(device, dtype, with_bias, options, tokens):
    x, gate_up, down, ids, weights = random_experts(tokens, 96, 50, 8, 3, dtype)
    options = dict(options)
    if with_bias:
        options |= {"gate_up_bias": torch.randn(8, 100).to(dtype), "down_bias": torch.randn(8, 96).to(dtype)}
    expected = reference.fused_experts(x, gate_up, down, ids, weights, **options)
    on_device = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    out = ops.fused_experts(*(t.to(device) for t in (x, gate_up, down, ids, weights)), **on_device)
    assert out.dtype == dtype and out.is_contiguous()
    assert relative_error(out, expected) < rounding(dtype)


def unfused(x, gate_up, down, topk_ids, topk_weights, *, gate_up_bias=None, down_bias=None, **options):
    """The chain of separate ops that fused_experts stands for."""
    rows_to_slots, slots_to_rows, offsets, _ = ops.moe_expert_map(topk_ids, gate_up.shape[0])
    rows = ops.moe_permute(x, rows_to_slots, topk_ids.shape[1])
    hidden = ops.grouped_mm(rows, gate_up.transpose(1, 2), offsets[1:], gate_up_bias)
    gate, up = (hidden[:, ::2], hidden[:, 1::2]) if options.pop("interleaved", False) else hidden.chunk(2, -1)
    activation = options.pop("activation", "silu")
    if activation == "silu":
        gated = ops.silu_and_mul(gate, up, **options)
    else:
        gated = ops.gelu_and_mul(gate, up, approximate="tanh" if activation == "gelu_tanh" else "none")
    y = ops.grouped_mm(gated, down.transpose(1, 2), offsets[1:], down_bias)
    return ops.moe_unpermute(y, slots_to_rows, topk_weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 6, 150])
def test_bit_equal_to_the_unfused_chain(device, dtype, with_bias, options, tokens):
    x, gate_up, down, ids, weights = random_experts(tokens, 160, 52, 5, 3, dtype, device)
    ids[torch.rand(ids.shape, device=device) < 0.1] = -1
    x, gate_up = 4 * x, 2 * gate_up  # far enough out for limits and saturated gates
    options = dict(options)
    if with_bias:
        options["gate_up_bias"] = torch.randn(5, 104, device=device).to(dtype)
        options["down_bias"] = torch.randn(5, 160, device=device).to(dtype)
    expected = unfused(x, gate_up, down, ids, weights, **options)
    assert_bit_equal(ops.fused_experts(x, gate_up, down, ids, weights, **options), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, GPT_OSS], ids=str)
def test_fused_experts_against_float64(device, dtype, options):
    inputs = random_experts(6, 200, 72, 5, 2, dtype)
    out = ops.fused_experts(*(t.to(device) for t in inputs), **options)
    assert relative_error(out, exact_experts(*inputs, **options)) < 3 * rounding(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_layouts_of_every_input(device, dtype, tokens):
    inputs = random_experts(tokens, 48, 20, 6, 2, dtype)
    biases = torch.randn(6, 40).to(dtype), torch.randn(6, 48).to(dtype)
    names = ("x", "gate_up", "down", "topk_ids", "topk_weights", "gate_up_bias", "down_bias")
    given = {k: v.to(device) for k, v in zip(names, (*inputs, *biases), strict=True)}
    expected = ops.fused_experts(**given)
    for name in names:
        for layout, view in layouts(given[name].cpu()).items():
            assert_bit_equal(ops.fused_experts(**given | {name: view.to(device)}), expected, f"{name} {layout}")
    assert_bit_equal(ops.fused_experts(**given | {"topk_ids": given["topk_ids"].int()}), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_expert_views(device, dtype):
    x, gate_up, down, ids, weights = random_experts(9, 32, 12, 4, 2, dtype, device)
    expected = ops.fused_experts(x, gate_up[:1].contiguous(), down[:1].contiguous(), ids * 0, weights)
    shared = gate_up[:1].expand(4, 24, 32), down[:1].expand(4, 32, 12)
    assert_bit_equal(ops.fused_experts(x, *shared, ids, weights), expected)
    backwards = gate_up.flip(0), down.flip(0)
    expected = ops.fused_experts(x, gate_up, down, ids, weights)
    assert_bit_equal(ops.fused_experts(x, *backwards, 3 - ids, weights), expected)


def test_fewer_tokens_give_the_same_rows(device):
    x, gate_up, down, ids, weights = random_experts(40, 576, 64, 4, 2, torch.bfloat16, device)
    whole = ops.fused_experts(x, gate_up, down, ids, weights)
    for rows in (slice(0, 1), slice(3, 10), slice(39, 40)):
        assert_bit_equal(ops.fused_experts(x[rows], gate_up, down, ids[rows], weights[rows]), whole[rows])


def test_dropped_slots(device):
    x, gate_up, down, ids, weights = random_experts(8, 40, 16, 4, 3, torch.float32, device)
    ids[2], ids[5, 1] = -1, -1
    weights[2], weights[5, 1] = math.nan, math.inf  # the weight of a dropped slot is not used
    out = ops.fused_experts(x, gate_up, down, ids, weights)
    assert (out[2] == 0).all()
    expected = reference.fused_experts(x.cpu(), gate_up.cpu(), down.cpu(), ids.cpu(), weights.cpu())
    assert relative_error(out, expected) < 1e-6


def test_experts_of_other_ranks(device):
    x, gate_up, down, ids, weights = random_experts(17, 40, 16, 6, 3, torch.float32, device)
    whole = ops.fused_experts(x, gate_up, down, ids, weights)
    parts = [
        ops.fused_experts(x, gate_up[a:b], down[a:b], ids, weights, first_expert=a) for a, b in ((0, 2), (2, 3), (3, 6))
    ]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-6)
    assert (ops.fused_experts(x, gate_up, down, ids, weights, first_expert=6) == 0).all()


def test_experts_without_tokens_are_not_read(device):
    x, gate_up, down, ids, weights = random_experts(5, 40, 16, 6, 2, torch.bfloat16, device)
    ids[:] = torch.tensor([4, 1])
    expected = ops.fused_experts(x, gate_up, down, ids, weights)
    for expert in (0, 2, 3, 5):
        gate_up[expert] = down[expert] = math.nan
    assert_bit_equal(ops.fused_experts(x, gate_up, down, ids, weights), expected)


def test_all_tokens_in_one_expert(device):
    x, gate_up, down, _, _ = random_experts(290, 64, 24, 3, 1, torch.bfloat16)
    ids, weights = torch.ones(290, 1, dtype=torch.int64), torch.ones(290, 1)
    out = ops.fused_experts(*(t.to(device) for t in (x, gate_up, down, ids, weights)))
    assert relative_error(out, reference.fused_experts(x, gate_up, down, ids, weights)) < 2.5e-3


def test_the_same_expert_twice(device):
    x, gate_up, down, ids, weights = random_experts(3, 32, 8, 4, 2, torch.float32, device)
    ids[:, 1] = ids[:, 0]
    weights[:] = 0.5
    expected = ops.fused_experts(x, gate_up, down, ids[:, :1], torch.ones(3, 1, device=device))
    torch.testing.assert_close(ops.fused_experts(x, gate_up, down, ids, weights), expected)


@pytest.mark.parametrize("shape", [(0, 8, 4, 3, 2), (4, 8, 4, 3, 0), (3, 8, 0, 3, 2), (3, 0, 4, 3, 2)])
def test_fused_experts_empty(device, shape):
    inputs = random_experts(*shape, torch.float32, device)
    assert_bit_equal(ops.fused_experts(*inputs), torch.zeros(shape[0], shape[1]))


@pytest.mark.parametrize("weights_dtype", DTYPES)
def test_dtype_of_the_weights(device, weights_dtype):
    x, gate_up, down, ids, weights = random_experts(7, 64, 24, 5, 3, torch.bfloat16, device)
    weights = weights.to(weights_dtype)
    out = ops.fused_experts(x, gate_up, down, ids, weights)
    assert_bit_equal(out, ops.fused_experts(x, gate_up, down, ids, weights.float()))


def test_nan_stays_in_its_token(device):
    x, gate_up, down, ids, weights = random_experts(12, 64, 24, 3, 2, torch.bfloat16, device)
    clean = ops.fused_experts(x, gate_up, down, ids, weights)
    x[4, 63] = math.nan
    out = ops.fused_experts(x, gate_up, down, ids, weights)
    rest = [t for t in range(12) if t != 4]
    assert out[4].isnan().all()
    assert_bit_equal(out[rest], clean[rest])


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    tokens=st.integers(0, 40),
    hidden=st.integers(1, 100),
    intermediate=st.integers(1, 60),
    experts=st.integers(1, 9),
    topk=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    options=st.sampled_from(OPTIONS),
    dropped=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 2**31),
)
def test_fused_experts_any_shape(tokens, hidden, intermediate, experts, topk, dtype, options, dropped, seed):
    torch.manual_seed(seed)
    inputs = random_experts(tokens, hidden, intermediate, experts, min(topk, experts), dtype)
    ids = inputs[3]
    ids[torch.rand(ids.shape) < dropped] = -1
    assert_near(ops.fused_experts(*inputs, **options), reference.fused_experts(*inputs, **options))


def _experts(**change):
    x, gate_up, down, ids, weights = random_experts(4, 8, 6, 3, 2)
    given = {"x": x, "gate_up": gate_up, "down": down, "topk_ids": ids, "topk_weights": weights}
    return given | change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(8)}, r"x must have shape \[T, H\], got \[8\]"),
        ({"x": torch.zeros(4, 8).long()}, "x must be float32, bfloat16 or float16, got int64"),
        ({"gate_up": torch.zeros(3, 11, 8)}, r"gate_up must have shape \[E, 2 \* I, 8\], got \[3, 11, 8\]"),
        ({"gate_up": torch.zeros(3, 12, 7)}, "gate_up must have shape"),
        ({"gate_up": torch.zeros(3, 12, 8).half()}, "gate_up must have the dtype of x, float32, got float16"),
        ({"down": torch.zeros(3, 6, 8)}, r"down must have shape \[3, 8, 6\], got \[3, 6, 8\]"),
        ({"down": torch.zeros(3, 8, 6).bfloat16()}, "down must have the dtype of x"),
        ({"topk_ids": torch.zeros(4, 2)}, "topk_ids must be int32 or int64, got float32"),
        ({"topk_ids": torch.zeros(3, 2).long()}, r"topk_ids must have shape \[4, k\], got \[3, 2\]"),
        ({"topk_weights": torch.zeros(4, 3)}, r"topk_weights must have the shape of topk_ids, \[4, 2\], got \[4, 3\]"),
        ({"topk_weights": torch.zeros(4, 2).double()}, "topk_weights must be float32, bfloat16 or float16"),
        ({"gate_up_bias": torch.zeros(3, 6)}, r"gate_up_bias must have shape \[3, 12\], got \[3, 6\]"),
        ({"down_bias": torch.zeros(3, 8).half()}, "down_bias must have the dtype of x"),
        ({"activation": "relu"}, "activation must be silu, gelu or gelu_tanh, got relu"),
        ({"activation": "gelu", "limit": 7.0}, "need activation silu, got gelu"),
        ({"limit": -1.0}, "limit must be positive, got -1"),
        ({"first_expert": -1}, "first_expert must not be negative, got -1"),
    ],
)
@pytest.mark.parametrize("meta", [False, True])
def test_fused_experts_errors(device, change, message, meta):
    where = "meta" if meta else device
    given = {k: v.to(where) if isinstance(v, torch.Tensor) else v for k, v in _experts(**change).items()}
    with pytest.raises(ValueError, match=message):
        ops.fused_experts(**given)


def test_id_below_minus_one():
    ids = torch.tensor([[0, 1], [2, 0], [-2, 1], [0, 1]])
    with pytest.raises(ValueError, match="topk_ids must not be below -1, got -2"):
        ops.fused_experts(**_experts(topk_ids=ids))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_experts_opcheck(device, dtype):
    x, gate_up, down, ids, weights = random_experts(5, 8, 6, 3, 2, dtype, device)
    column_major = x.t().contiguous().t()
    bias = {"gate_up_bias": torch.randn(3, 12).to(device, dtype), "down_bias": torch.randn(3, 8).to(device, dtype)}
    op = torch.ops.deepinfer.fused_experts.default
    opcheck(op, (x, gate_up, down, ids, weights))
    opcheck(op, (column_major, gate_up.transpose(1, 2).contiguous().transpose(1, 2), down, ids.int(), weights), bias)
    opcheck(op, (x[:1], gate_up, down, ids[:1], weights[:1]), {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0})
    opcheck(op, (x[:0], gate_up, down, ids[:0], weights[:0]), {"activation": "gelu"})
    opcheck(op, (x[::2], gate_up[1:], down[1:], ids[::2], weights[::2]), {"first_expert": 1, "interleaved": True})
