import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from checking import assert_bit_equal, layouts, opcheck
from products import DTYPES, assert_near, relative_error, rounding

from torch_deepinfer import ops
from torch_deepinfer.reference import gemm as reference

GPT_OSS = {"interleaved": True, "limit": 7.0, "alpha": 1.702, "up_offset": 1.0}


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
@pytest.mark.parametrize(("intermediate", "dense_k"), [(52, True), (72, True), (72, False)])
def test_bit_equal_to_the_unfused_chain(device, dtype, with_bias, options, tokens, intermediate, dense_k):
    x, gate_up, down, ids, weights = random_experts(tokens, 160, intermediate, 5, 3, dtype, device)
    if not dense_k:
        gate_up = gate_up.transpose(1, 2).contiguous().transpose(1, 2)
    ids[torch.rand(ids.shape, device=device) < 0.1] = -1
    x, gate_up = 4 * x, 2 * gate_up  # far enough out for limits and saturated gates
    options = dict(options)
    if with_bias:
        options["gate_up_bias"] = torch.randn(5, 2 * intermediate, device=device).to(dtype)
        options["down_bias"] = torch.randn(5, 160, device=device).to(dtype)
    expected = unfused(x, gate_up, down, ids, weights, **options)
    assert_bit_equal(ops.fused_experts(x, gate_up, down, ids, weights, **options), expected)


def shared_expert(x, intermediate: int, kind: str = "dense") -> dict[str, torch.Tensor]:
    """Weights of an expert that sees every token: apart, with the ups in front of the gates, or hardly aligned."""
    hidden = x.shape[1]
    gate, up = (torch.randn(intermediate, hidden, device=x.device) / max(1, hidden) ** 0.5 for _ in range(2))
    down = torch.randn(hidden, intermediate, device=x.device) / max(1, intermediate) ** 0.5
    gate, up, down = (weight.to(x.dtype) for weight in (gate, up, down))
    if kind == "ups first":
        up, gate = torch.stack([up, gate]).unbind()
    if kind == "unaligned":
        gate, up, down = (torch.cat([weight[:, :1], weight], 1)[:, 1:] for weight in (gate, up, down))
    if kind == "strided":
        gate, up, down = (weight.t().contiguous().t() for weight in (gate, up, down))
    return {"shared_gate": gate, "shared_up": up, "shared_down": down}


# 900 tokens fill tiles that are handed out, with 5 or with many experts.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["dense", "ups first", "unaligned", "strided"])
@pytest.mark.parametrize("tokens", [0, 1, 6, 150, 900])
@pytest.mark.parametrize("shared", [72, 136])
def test_shared_expert(device, dtype, kind, tokens, shared):
    x, gate_up, down, ids, weights = random_experts(tokens, 160, 72, 5, 3, dtype, device)
    ids[torch.rand(ids.shape, device=device) < 0.1] = -1
    weights_of = shared_expert(x, shared, kind)
    out = ops.fused_experts(x, gate_up, down, ids, weights, **weights_of)
    expected = reference.fused_experts(x, gate_up, down, ids, weights, **weights_of)
    assert out.dtype == dtype and out.is_contiguous()
    assert relative_error(out, expected) < rounding(dtype)
    if device.startswith("cuda") and dtype != torch.float32 and shared == 72 and kind in ("dense", "ups first"):
        # One of the experts: no k is cut.
        end = torch.tensor([tokens], dtype=torch.int32, device=device)
        gate_up_of = torch.cat([weights_of["shared_gate"], weights_of["shared_up"]])[None]
        gated = ops.silu_and_mul(*ops.grouped_mm(x, gate_up_of.transpose(1, 2), end).chunk(2, -1))
        y = ops.grouped_mm(gated, weights_of["shared_down"].t()[None], end)
        assert_bit_equal(out, ops.fused_experts(x, gate_up, down, ids, weights) + y)


# The shared expert's tiles lie between those of experts that have many rows, few or none.
@pytest.mark.parametrize("options", [{}, {"limit": 1.5}, {"activation": "gelu"}], ids=str)
def test_shared_expert_beside_unequal_ones(device, options):
    x, gate_up, down, _, weights = random_experts(2500, 72, 264, 40, 2, torch.bfloat16, device)
    ids = (torch.rand(2500, 2, device=device) ** 6 * 40).long()
    weights_of = shared_expert(x, 264)
    expected = ops.fused_experts(x, gate_up, down, ids, weights, **options, **weights_of)
    alone = reference.fused_experts(x, gate_up[:0], down[:0], ids, weights, **options, **weights_of)
    routed = ops.fused_experts(x, gate_up, down, ids, weights, **options)
    assert relative_error(expected, routed + alone) < rounding(torch.bfloat16)
    for _ in range(3):
        assert_bit_equal(ops.fused_experts(x, gate_up, down, ids, weights, **options, **weights_of), expected)


# Tiles of very unequal experts are handed out in any order, again and again.
@pytest.mark.parametrize("options", [{}, GPT_OSS], ids=str)
@pytest.mark.parametrize("columns", [8, 264])
def test_unequal_experts(device, options, columns):
    x, gate_up, down, _, weights = random_experts(900, 72, columns, 40, 2, torch.bfloat16, device)
    ids = (torch.rand(900, 2, device=device) ** 6 * 40).long()
    expected = unfused(x, gate_up, down, ids, weights, **options)
    for _ in range(3):
        assert_bit_equal(ops.fused_experts(x, gate_up, down, ids, weights, **options), expected)
        assert_bit_equal(ops.fused_experts(x[:9], gate_up, down, ids[:9], weights[:9], **options), expected[:9])


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


def shared_of(gate, up, down, dtype=torch.float32) -> dict[str, torch.Tensor]:
    names = ("shared_gate", "shared_up", "shared_down")
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in zip(names, (gate, up, down), strict=True)}


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
        ({"shared_gate": torch.zeros(6, 8)}, "shared_gate, shared_up and shared_down go together"),
        (shared_of((6, 7), (6, 7), (8, 6)), r"shared_gate must have shape \[S, 8\], got \[6, 7\]"),
        (shared_of((6, 8), (5, 8), (8, 6)), r"shared_up must have the shape of shared_gate, \[6, 8\], got \[5, 8\]"),
        (shared_of((6, 8), (6, 8), (6, 8)), r"shared_down must have shape \[8, 6\], got \[6, 8\]"),
        (
            shared_of((6, 8), (6, 8), (8, 6), torch.float16),
            "shared_gate must have the dtype of x, float32, got float16",
        ),
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
    opcheck(op, (x, gate_up, down, ids, weights), shared_expert(x, 6))


# No wait for the device: what a captured graph replays, and what it reads is what is there then.
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_fused_experts_in_a_cuda_graph(tokens):
    x, gate_up, down, ids, weights = random_experts(tokens, 128, 64, 8, 2, torch.bfloat16, "cuda")
    ops.fused_experts(x, gate_up, down, ids, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.fused_experts(x, gate_up, down, ids, weights)
    x.copy_(torch.randn_like(x))
    ids.copy_((ids + 3) % 8)
    graph.replay()
    assert_bit_equal(out, ops.fused_experts(x, gate_up, down, ids, weights))
