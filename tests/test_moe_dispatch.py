import itertools

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from checking import assert_bit_equal, layouts, opcheck

from torch_deepinfer import ops
from torch_deepinfer.reference import moe as reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_ids(tokens: int, topk: int, experts: int, dropped: float = 0.0) -> torch.Tensor:
    """Distinct experts in a row, some of them -1."""
    ids = torch.rand(tokens, experts).argsort(-1)[:, :topk]
    return torch.where(torch.rand(tokens, topk) < dropped, -1, ids)


def expert_map(ids: torch.Tensor, num_experts: int, **options) -> list[torch.Tensor]:
    """The op's result on the CPU, equal to the reference."""
    actual = ops.moe_expert_map(ids, num_experts, **options)
    for name, a, b in zip(
        ("rows_to_slots", "slots_to_rows", "expert_offsets", "expert_counts"),
        actual,
        reference.moe_expert_map(ids.cpu(), num_experts, **options),
        strict=True,
    ):
        assert_bit_equal(a, b, name)
    return [a.cpu() for a in actual]


# ---- moe_expert_map


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("alignment", [1, 4, 7, 128])
@pytest.mark.parametrize(
    ("tokens", "topk", "experts"), [(1, 8, 128), (5, 2, 3), (64, 4, 60), (300, 8, 256), (5000, 8, 64), (3, 1, 5000)]
)
def test_map(device, dtype, alignment, tokens, topk, experts):
    for dropped in (0.0, 0.3):
        ids = random_ids(tokens, topk, experts, dropped).to(device, dtype)
        expert_map(ids, experts, alignment=alignment)
        if experts > 3:
            expert_map(ids, experts, alignment=alignment, first_expert=2)
            expert_map(ids, experts, alignment=alignment, first_expert=1, num_local_experts=experts // 3)


def test_map_of_many_slots_keeps_their_order(device):
    ids = torch.randint(-1, 5, (40_000, 3))
    rows_to_slots, _, offsets, counts = expert_map(ids.to(device), 5)
    assert counts.tolist() == [(ids == e).sum() for e in range(5)]
    for e in range(5):
        assert torch.equal(rows_to_slots[offsets[e] : offsets[e + 1]], (ids.flatten() == e).nonzero()[:, 0].int())


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(
    tokens=st.integers(0, 12),
    topk=st.integers(0, 5),
    experts=st.integers(1, 20),
    alignment=st.integers(1, 9),
    data=st.data(),
)
def test_any_map(tokens, topk, experts, alignment, data):
    first = data.draw(st.integers(0, experts - 1))
    local = data.draw(st.none() | st.integers(1, experts - first))
    ids = data.draw(st.lists(st.integers(-1, experts - 1), min_size=tokens * topk, max_size=tokens * topk))
    ids = torch.tensor(ids, dtype=torch.int64).view(tokens, topk)
    options = {"alignment": alignment, "first_expert": first, "num_local_experts": local}
    rows_to_slots, slots_to_rows, offsets, counts = expert_map(ids, experts, **options)
    assert (offsets % alignment == 0).all() and (rows_to_slots[offsets[-1] :] == -1).all()
    kept = slots_to_rows.flatten() >= 0
    assert torch.equal(rows_to_slots[slots_to_rows.flatten()[kept].long()].long(), kept.nonzero()[:, 0])
    assert kept.sum() == counts.sum() == (rows_to_slots >= 0).sum()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_map_layouts(device, dtype):
    ids = random_ids(9, 4, 16, 0.2).to(dtype)
    expected = ops.moe_expert_map(ids.to(device), 16, alignment=4)
    for name, view in layouts(ids).items():
        if name in ("offset slice", "stride 2"):
            assert (view == ids).all() and not view.is_contiguous()
        for a, b in zip(ops.moe_expert_map(view.to(device), 16, alignment=4), expected, strict=True):
            assert_bit_equal(a, b, name)


# vllm-xpu-kernels#571: -1 has no row; a batch of nothing but -1 takes no rows.
def test_map_without_experts(device):
    ids = torch.tensor([[0, -1], [2, 0], [-1, -1], [2, 1]], device=device)
    rows_to_slots, slots_to_rows, offsets, counts = expert_map(ids, 3, alignment=4)
    assert rows_to_slots.tolist() == [0, 3, -1, -1, 7, -1, -1, -1, 2, 6, -1, -1, -1, -1, -1, -1]
    assert slots_to_rows.tolist() == [[0, -1], [8, 1], [-1, -1], [9, 4]]
    assert offsets.tolist() == [0, 4, 8, 12] and counts.tolist() == [2, 1, 2]
    rows_to_slots, slots_to_rows, offsets, counts = expert_map(torch.full((4, 2), -1, device=device), 3, alignment=4)
    assert (rows_to_slots == -1).all() and (slots_to_rows == -1).all()
    assert offsets.tolist() == [0, 0, 0, 0] and counts.tolist() == [0, 0, 0]


# vllm-xpu-kernels#453: several tokens of one expert keep all their rows.
@pytest.mark.parametrize("tokens", [1, 4, 16, 17])
def test_map_of_one_expert(device, tokens):
    rows_to_slots, slots_to_rows, offsets, _ = expert_map(
        torch.zeros(tokens, 1, dtype=torch.int64, device=device), 1, alignment=16
    )
    used = -(-tokens // 16) * 16
    assert rows_to_slots.tolist()[:used] == list(range(tokens)) + [-1] * (used - tokens)
    assert slots_to_rows.flatten().tolist() == list(range(tokens)) and offsets.tolist() == [0, used]


# aiter#2478: under expert parallelism the rows of other ranks' experts take no space.
def test_map_of_local_experts(device):
    ids = torch.tensor([[2, 7], [4, 2], [0, 1], [3, 6]], device=device)
    rows_to_slots, slots_to_rows, offsets, counts = expert_map(ids, 8, alignment=4, first_expert=2, num_local_experts=3)
    assert counts.tolist() == [2, 1, 1] and offsets.tolist() == [0, 4, 8, 12]
    assert rows_to_slots.tolist() == [0, 3, -1, -1, 6, -1, -1, -1, 2, -1, -1, -1, -1, -1, -1, -1]
    assert slots_to_rows.tolist() == [[0, -1], [8, 1], [-1, -1], [4, -1]]


@pytest.mark.parametrize("experts", [5_000, 100_000])
def test_map_of_very_many_experts(device, experts):
    ids = random_ids(50, 3, experts, 0.1).to(device)
    if device != "cpu" and experts == 100_000:
        with pytest.raises(ValueError, match=r"moe_expert_map: at most \d+ local experts on this .PU, got 100000"):
            ops.moe_expert_map(ids, experts)
    else:
        expert_map(ids, experts)


@pytest.mark.parametrize("shape", [(0, 2), (0, 0), (3, 0)])
def test_map_of_no_slots(device, shape):
    rows_to_slots, slots_to_rows, offsets, counts = expert_map(torch.empty(shape, dtype=torch.int64, device=device), 4)
    assert rows_to_slots.shape == (0,) and slots_to_rows.shape == shape
    assert offsets.tolist() == [0] * 5 and counts.tolist() == [0] * 4
    assert (expert_map(torch.empty(shape, dtype=torch.int64, device=device), 4, alignment=8)[0] == -1).all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("bad", [-2, 8, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("tokens", [3, 20_000])
def test_ids_out_of_range(dtype, bad, tokens):
    ids = torch.zeros(tokens, 2, dtype=dtype)
    ids[tokens - 1, 1] = bad
    before = ids.clone()
    with pytest.raises(ValueError, match=rf"topk_ids must lie in \[-1, 8\), got {bad}"):
        ops.moe_expert_map(ids, 8, first_expert=2, num_local_experts=2)
    assert_bit_equal(ids, before)


def test_ids_beyond_int32():
    with pytest.raises(ValueError, match=r"got 4294967296"):
        ops.moe_expert_map(torch.tensor([[2**32]]), 8)


# ---- moe_permute


@pytest.mark.parametrize(
    "dtype", [*DTYPES, torch.float64, torch.float8_e4m3fn, torch.int8, torch.bool, torch.int64, torch.complex64]
)
@pytest.mark.parametrize("hidden_size", [1, 7, 64, 1000])
@pytest.mark.parametrize("tokens", [33, 300])
def test_permute(device, dtype, hidden_size, tokens):
    topk = 4
    ids = random_ids(tokens, topk, 12, 0.1).to(device)
    x = (10 * torch.randn(tokens, hidden_size, device=device)).to(dtype)
    for alignment, with_inverse in itertools.product((1, 16), (False, True)):
        rows_to_slots, slots_to_rows, *_ = ops.moe_expert_map(ids, 12, alignment=alignment)
        actual = ops.moe_permute(x, rows_to_slots, topk, slots_to_rows if with_inverse else None)
        if dtype == torch.float8_e4m3fn:  # compare the bits
            actual, x_bits = actual.view(torch.uint8), x.view(torch.uint8)
            assert_bit_equal(actual, reference.moe_permute(x_bits, rows_to_slots, topk))
        else:
            assert_bit_equal(actual, reference.moe_permute(x, rows_to_slots, topk))


def test_permute_layouts(device):
    x = torch.randn(10, 24)
    rows_to_slots = torch.randperm(30).int().to(device)
    rows_to_slots[::5] = -1
    expected = x.to(device)[rows_to_slots.clamp(min=0) // 3] * (rows_to_slots >= 0)[:, None]
    for name, view in layouts(x).items():
        assert_bit_equal(ops.moe_permute(view.to(device), rows_to_slots, 3), expected, name)
    strided_map = torch.stack([rows_to_slots, rows_to_slots], -1)[:, 0]
    assert_bit_equal(ops.moe_permute(x.to(device), strided_map, 3), expected)


def test_permute_layouts_by_token(device):
    x = torch.randn(500, 24)
    rows_to_slots, slots_to_rows, *_ = ops.moe_expert_map(random_ids(500, 3, 8, 0.1).to(device), 8, alignment=4)
    expected = x.to(device)[rows_to_slots.clamp(min=0) // 3] * (rows_to_slots >= 0)[:, None]
    for name, view in layouts(x).items():
        assert_bit_equal(ops.moe_permute(view.to(device), rows_to_slots, 3, slots_to_rows), expected, name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("with_inverse", [False, True])
def test_indices_out_of_range_poison_their_rows_on_a_gpu(with_inverse):
    ids = torch.tensor([[0, 7], [9, 1], [-2, 2], [-1, 3]], device="cuda")
    rows_to_slots, slots_to_rows, offsets, counts = ops.moe_expert_map(ids, 8)
    assert counts.tolist() == [1, 1, 1, 1, 0, 0, 0, 1] and offsets[-1] == 5
    assert slots_to_rows[1, 0] == slots_to_rows[2, 0] == -2 and slots_to_rows[3, 0] == -1
    x = torch.randn(4, 24, device="cuda")
    permuted = ops.moe_permute(x, rows_to_slots, 2, slots_to_rows if with_inverse else None)
    assert_bit_equal(permuted[:5], x[[0, 1, 2, 3, 0]])
    assert (permuted[5:] == 0).all()
    out = ops.moe_unpermute(permuted, slots_to_rows)
    assert out[1:3].isnan().all()
    assert_bit_equal(out[[0, 3]], torch.stack([x[0] + x[0], x[3]]))
    many = slots_to_rows.repeat(400, 1)  # enough for the kernel whose blocks stay
    out = ops.moe_unpermute(permuted, many).view(400, 4, 24)
    assert out[:, 1:3].isnan().all() and not out[:, [0, 3]].isnan().any()
    rows_to_slots[1] = 8
    permuted = ops.moe_permute(x, rows_to_slots, 2)
    assert permuted[1].isnan().all() and not permuted[[0, 2, 3, 4]].isnan().any()


# TransformerEngine#2876: without a count of rows, every kept slot gets one, in expert order.
def test_permute_in_expert_order(device):
    ids = torch.tensor([[0, 2], [3, -1], [0, 1]], device=device)
    rows_to_slots, *_ = ops.moe_expert_map(ids, 4)
    x = torch.arange(3.0, device=device)[:, None] + 1
    assert ops.moe_permute(x, rows_to_slots, 2).flatten().tolist() == [1, 3, 3, 1, 2, 0]


def test_permute_is_bounded_by_the_map(device):
    x = torch.arange(3.0, device=device)[:, None] + 1
    short_map = torch.tensor([0, 4], dtype=torch.int32, device=device)
    assert ops.moe_permute(x, short_map, 2).flatten().tolist() == [1, 3]
    assert ops.moe_permute(x[:0], short_map[:0], 2).shape == (0, 1)
    assert ops.moe_permute(x[:, :0], short_map, 2).shape == (2, 0)


# ---- moe_unpermute


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights_dtype", [None, *DTYPES])
@pytest.mark.parametrize("hidden_size", [1, 16, 50, 64, 1000])
def test_unpermute(device, dtype, weights_dtype, hidden_size):
    tokens, topk = 33, 6
    _, slots_to_rows, *_ = ops.moe_expert_map(random_ids(tokens, topk, 12, 0.2).to(device), 12, alignment=4)
    y = torch.randn(300, hidden_size, device=device).to(dtype)
    weights = None if weights_dtype is None else torch.rand(tokens, topk, device=device).to(weights_dtype)
    actual = ops.moe_unpermute(y, slots_to_rows, weights)
    # Same order and no fused multiply-add: equal to the last bit.
    assert_bit_equal(actual, reference.moe_unpermute(y, slots_to_rows, weights))


@pytest.mark.parametrize("dtype", DTYPES)
def test_unpermute_layouts(device, dtype):
    y, weights = torch.randn(30, 40).to(dtype), torch.rand(10, 3)
    slots_to_rows = torch.randperm(30).int().view(10, 3)
    slots_to_rows[2, 1] = -1
    expected = reference.moe_unpermute(y, slots_to_rows, weights)
    for name, view in layouts(y).items():
        assert_bit_equal(
            ops.moe_unpermute(view.to(device), slots_to_rows.to(device), weights.to(device)), expected, name
        )
    for name, view in layouts(weights).items():
        assert_bit_equal(ops.moe_unpermute(y.to(device), slots_to_rows.to(device), view.to(device)), expected, name)
    for name, view in layouts(slots_to_rows).items():
        assert_bit_equal(ops.moe_unpermute(y.to(device), view.to(device), weights.to(device)), expected, name)


@pytest.mark.parametrize("hidden_size", [8, 24, 520, 2048, 2056, 4600])
@pytest.mark.parametrize("topk", [1, 3, 8, 16])
def test_unpermute_of_many_tokens(device, topk, hidden_size):
    # More than a GPU has room for at once.
    tokens = 1100
    y = torch.randn(999, hidden_size, device=device).bfloat16()
    slots_to_rows = torch.randint(-300, 999, (tokens, topk), device=device).int().clamp_(min=-1)
    weights = torch.rand(tokens, topk, device=device)
    expected = reference.moe_unpermute(y, slots_to_rows, weights)
    assert_bit_equal(ops.moe_unpermute(y, slots_to_rows, weights), expected)
    assert_bit_equal(ops.moe_unpermute(y, slots_to_rows), reference.moe_unpermute(y, slots_to_rows))


def test_unpermute_sums_in_float32(device):
    # In bfloat16, 256 + 1 is 256: the eight ones would be lost.
    y = torch.ones(9, 16, device=device).bfloat16()
    y[0] = 256
    slots_to_rows = torch.arange(9, dtype=torch.int32, device=device)[None]
    assert (ops.moe_unpermute(y, slots_to_rows) == 264).all()


def test_unpermute_skips_dropped_slots(device):
    y = torch.full((2, 70), float("nan"), device=device)
    y[1] = 3
    slots_to_rows = torch.tensor([[-1, 1, -1], [-1, -1, -1]], dtype=torch.int32, device=device)
    weights = torch.tensor([[float("nan"), 2.0, float("inf")]] * 2, device=device)
    out = ops.moe_unpermute(y, slots_to_rows, weights)
    assert (out[0] == 6).all() and (out[1] == 0).all()
    assert (ops.moe_unpermute(y[:0], torch.full_like(slots_to_rows, -1), weights) == 0).all()
    assert (ops.moe_unpermute(y, slots_to_rows[:, :0]) == 0).all()
    assert ops.moe_unpermute(y, slots_to_rows[:0], weights[:0]).shape == (0, 70)


def test_round_trip(device):
    x = torch.randn(50, 64, device=device).bfloat16()
    rows_to_slots, slots_to_rows, *_ = ops.moe_expert_map(random_ids(50, 4, 16).to(device), 16, alignment=8)
    back = ops.moe_unpermute(
        ops.moe_permute(x, rows_to_slots, 4), slots_to_rows, torch.full((50, 4), 0.25, device=device)
    )
    assert_bit_equal(back, x)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_more_than_2_to_31_elements():
    tokens, topk, hidden_size = 2**31 // (8 * 4096) + 5, 8, 4096
    x = torch.empty(tokens, hidden_size, dtype=torch.bfloat16, device="cuda").normal_()
    rows_to_slots, slots_to_rows, *_ = ops.moe_expert_map(torch.rand(tokens, 64, device="cuda").topk(topk).indices, 64)
    y = ops.moe_permute(x, rows_to_slots, topk, slots_to_rows)
    assert y.numel() > 2**31 and torch.equal(y, ops.moe_permute(x, rows_to_slots, topk))
    last = slice(len(y) - 1000, None)
    assert torch.equal(y[last], x[rows_to_slots[last].long() // topk])
    assert torch.equal(ops.moe_unpermute(y, slots_to_rows), x * topk)  # eight equal addends: no rounding


# ---- gradients


# TransformerEngine#1336: gradients of the tokens and of the weights.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropped", [0.0, 0.4])
@pytest.mark.parametrize("alignment", [1, 4])
def test_gradients(device, dtype, dropped, alignment):
    tokens, topk, experts = 5, 3, 6
    ids = random_ids(tokens, topk, experts, dropped)
    x, weights = torch.randn(tokens, 8).to(dtype), torch.rand(tokens, topk)

    exact_x, exact_weights = x.double().requires_grad_(), weights.double().requires_grad_()
    order = ids.flatten().argsort(stable=True)
    order = order[ids.flatten()[order] >= 0]
    rows = exact_x.index_select(0, order // topk) * exact_weights.flatten()[order][:, None]
    exact = torch.zeros(tokens, 8).double().index_add(0, order // topk, rows)
    exact.square().sum().backward()

    x, weights = x.to(device).requires_grad_(), weights.to(device).requires_grad_()
    rows_to_slots, slots_to_rows, *_ = ops.moe_expert_map(ids.to(device), experts, alignment=alignment)
    out = ops.moe_unpermute(ops.moe_permute(x, rows_to_slots, topk), slots_to_rows, weights)
    out.float().square().sum().backward()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-6}[dtype]
    assert x.grad.dtype == dtype and weights.grad.dtype == torch.float32
    for actual, expected in ((out, exact), (x.grad, exact_x.grad), (weights.grad, exact_weights.grad)):
        torch.testing.assert_close(actual.detach().cpu().double(), expected, rtol=tolerance, atol=tolerance)


def test_gradient_of_many_slots_is_not_summed_in_bfloat16(device):
    x = torch.zeros(1, 4, device=device).bfloat16().requires_grad_()
    rows = torch.arange(257, dtype=torch.int32, device=device)
    grad = torch.ones(257, 4, device=device).bfloat16()
    grad[0] = 256
    ops.moe_permute(x, rows, 257).backward(grad)
    assert (x.grad == 512).all()


def test_gradient_without_weights(device):
    y = torch.randn(4, 8, device=device, requires_grad=True)
    slots_to_rows = torch.tensor([[3, -1], [0, 2]], dtype=torch.int32, device=device)
    grad = torch.randn(2, 8, device=device)
    ops.moe_unpermute(y, slots_to_rows).backward(grad)
    assert_bit_equal(y.grad, torch.stack([grad[1], torch.zeros_like(grad[0]), grad[1], grad[0]]))


# Megatron-LM#3626: a rank without tokens stays in the graph.
def test_gradients_without_tokens(device):
    x = torch.empty(0, 16, device=device, requires_grad=True)
    weights = torch.empty(0, 2, device=device, requires_grad=True)
    ids = torch.empty(0, 2, dtype=torch.int64, device=device)
    for alignment in (1, 4):
        x.grad = weights.grad = None
        rows_to_slots, slots_to_rows, _, counts = ops.moe_expert_map(ids, 4, alignment=alignment)
        rows = ops.moe_permute(x, rows_to_slots, 2)
        out = ops.moe_unpermute(rows, slots_to_rows, weights)
        assert counts.tolist() == [0] * 4 and rows.shape == (rows_to_slots.shape[0], 16) and out.shape == (0, 16)
        assert rows.requires_grad and out.requires_grad
        out.sum().backward()
        assert x.grad.shape == (0, 16) and weights.grad.shape == (0, 2)


def test_gradients_under_compile(device):
    ids = random_ids(7, 2, 4, 0.2).to(device)
    rows_to_slots, slots_to_rows, *_ = ops.moe_expert_map(ids, 4)
    inputs = torch.randn(7, 16, device=device), torch.rand(7, 2, device=device)

    def loss(x, weights):
        return ops.moe_unpermute(ops.moe_permute(x, rows_to_slots, 2), slots_to_rows, weights).square().sum()

    grads = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)):
        leaves = [t.clone().requires_grad_() for t in inputs]
        function(*leaves).backward()
        grads.append([t.grad for t in leaves])
    for eager, compiled in zip(*grads, strict=True):
        assert_bit_equal(compiled, eager)


# ---- errors and opcheck

IDS = torch.zeros(4, 2, dtype=torch.int64)
MAP_ERRORS = [
    ((IDS[0], 8), {}, r"topk_ids must be 2-D, \[tokens, topk\], got shape \[2\]"),
    ((IDS.float(), 8), {}, "topk_ids must be int64 or int32, got float32"),
    ((IDS.to(torch.int16), 8), {}, "topk_ids must be int64 or int32, got int16"),
    ((IDS, 0), {}, r"num_experts must lie in \[1, 2147483647\], got 0"),
    ((IDS, 8), {"alignment": 0}, r"alignment must lie in \[1, 2147483647\], got 0"),
    ((IDS, 8), {"first_expert": 8}, r"first_expert must lie in \[0, 8\), got 8"),
    ((IDS, 8), {"first_expert": -1}, r"first_expert must lie in \[0, 8\), got -1"),
    ((IDS, 8), {"num_local_experts": 0}, r"num_local_experts must lie in \[1, 8\], got 0"),
    ((IDS, 8), {"first_expert": 3, "num_local_experts": 6}, r"num_local_experts must lie in \[1, 5\], got 6"),
    ((IDS, 4), {"alignment": 2**30}, "8 slots with alignment 1073741824 exceed the 2147483647 rows of an int32 map"),
]


@pytest.mark.parametrize(("arguments", "options", "message"), MAP_ERRORS)
@pytest.mark.parametrize("meta", [False, True])
def test_map_errors(device, arguments, options, message, meta):
    ids, experts = arguments
    with pytest.raises(ValueError, match=f"moe_expert_map: {message}"):
        ops.moe_expert_map(ids.to("meta" if meta else device), experts, **options)


X, ROWS = torch.randn(4, 6), torch.zeros(8, dtype=torch.int32)
PERMUTE_ERRORS = [
    ((X[0], ROWS, 2), r"x must be 2-D, \[tokens, hidden_size\], got shape \[6\]"),
    ((X, ROWS[None], 2), r"rows_to_slots must be 1-D, got shape \[1, 8\]"),
    ((X, ROWS.long(), 2), "rows_to_slots must be int32, got int64"),
    ((X, ROWS, 2, torch.zeros(4, 3, dtype=torch.int32)), r"slots_to_rows must have shape \[4, 2\], got \[4, 3\]"),
    ((X, ROWS, 2, torch.zeros(4, 2)), "slots_to_rows must be int32, got float32"),
    ((X, ROWS, 0), r"topk must lie in \[1, 2147483647\], got 0"),
]


@pytest.mark.parametrize(("arguments", "message"), PERMUTE_ERRORS)
@pytest.mark.parametrize("meta", [False, True])
def test_permute_errors(device, arguments, message, meta):
    where = "meta" if meta else device
    with pytest.raises(ValueError, match=f"moe_permute: {message}"):
        ops.moe_permute(*(a.to(where) if isinstance(a, torch.Tensor) else a for a in arguments))


@pytest.mark.parametrize("bad", [-2, 8])
def test_permute_map_out_of_range(bad):
    with pytest.raises(ValueError, match=rf"rows_to_slots must lie in \[-1, 8\), got {bad}"):
        ops.moe_permute(X, torch.tensor([0, 7, bad], dtype=torch.int32), 2)
    with pytest.raises(ValueError, match=r"rows_to_slots must lie in \[-1, 0\), got 0"):
        ops.moe_permute(X[:0], ROWS, 2)


SLOTS = torch.zeros(4, 2, dtype=torch.int32)
UNPERMUTE_ERRORS = [
    ((X[0], SLOTS), r"y must be 2-D, \[rows, hidden_size\], got shape \[6\]"),
    ((X.double(), SLOTS), "y must be float32, bfloat16 or float16, got float64"),
    ((X, SLOTS[0]), r"slots_to_rows must be 2-D, \[tokens, topk\], got shape \[2\]"),
    ((X, SLOTS.long()), "slots_to_rows must be int32, got int64"),
    ((X, SLOTS, torch.rand(4, 3)), r"topk_weights must have the shape of slots_to_rows, \[4, 2\], got \[4, 3\]"),
    ((X, SLOTS, torch.rand(4, 2).double()), "topk_weights must be float32, bfloat16 or float16, got float64"),
]


@pytest.mark.parametrize(("arguments", "message"), UNPERMUTE_ERRORS)
@pytest.mark.parametrize("meta", [False, True])
def test_unpermute_errors(device, arguments, message, meta):
    where = "meta" if meta else device
    with pytest.raises(ValueError, match=f"moe_unpermute: {message}"):
        ops.moe_unpermute(*(a.to(where) for a in arguments))


@pytest.mark.parametrize("bad", [-2, 4])
def test_unpermute_map_out_of_range(bad):
    slots_to_rows = torch.tensor([[0, bad]], dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"slots_to_rows must lie in \[-1, 4\), got {bad}"):
        ops.moe_unpermute(X, slots_to_rows)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_opcheck_map(device, dtype):
    ids = random_ids(6, 4, 8, 0.2).to(device, dtype)
    for x in (ids, ids[:0], ids[:1], ids[::2], ids[:, 1:], ids.t().contiguous().t()):
        opcheck(torch.ops.deepinfer.moe_expert_map.default, (x, 8))
    options = {"alignment": 4, "first_expert": 2, "num_local_experts": 3}
    opcheck(torch.ops.deepinfer.moe_expert_map.default, (ids, 8), options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_permute(device, dtype, requires_grad):
    x = torch.randn(6, 16, device=device).to(dtype)
    rows_to_slots, slots_to_rows, *_ = ops.moe_expert_map(random_ids(6, 2, 5, 0.1).to(device), 5)
    for view in (x, x[:, 3:], x.t().contiguous().t(), x.repeat(2, 1)[::2]):
        view = view.detach().requires_grad_(requires_grad)
        opcheck(torch.ops.deepinfer.moe_permute.default, (view, rows_to_slots, 2))
        opcheck(torch.ops.deepinfer.moe_permute.default, (view, rows_to_slots, 2, slots_to_rows))
    empty = x[:0].detach().requires_grad_(requires_grad)
    opcheck(torch.ops.deepinfer.moe_permute.default, (empty, rows_to_slots[:0], 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_unpermute(device, dtype, requires_grad):
    y, weights = torch.randn(12, 16, device=device).to(dtype), torch.rand(6, 2, device=device)
    slots_to_rows = torch.randperm(12).int().view(6, 2).to(device)
    slots_to_rows[3, 1] = -1
    for view in (y, y[:, 3:], y.t().contiguous().t()):
        view = view.detach().requires_grad_(requires_grad)
        opcheck(torch.ops.deepinfer.moe_unpermute.default, (view, slots_to_rows))
        given = weights.detach().requires_grad_(requires_grad)
        opcheck(torch.ops.deepinfer.moe_unpermute.default, (view, slots_to_rows, given))
    y, weights = y.detach().requires_grad_(requires_grad), weights[:1].detach().requires_grad_(requires_grad)
    opcheck(torch.ops.deepinfer.moe_unpermute.default, (y, slots_to_rows[:1], weights))
    opcheck(torch.ops.deepinfer.moe_unpermute.default, (y, slots_to_rows[:0], weights[:0]))
