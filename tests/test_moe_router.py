import itertools
import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from checking import assert_bit_equal, layouts, opcheck

from torch_deepinfer import ops
from torch_deepinfer.reference import moe as reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SCORES = ["softmax", "sigmoid", "sqrt_softplus"]
DEEPSEEK_V3 = {
    "score": "sigmoid",
    "num_groups": 8,
    "topk_groups": 4,
    "renormalize": True,
    "renorm_eps": 1e-20,
    "scale": 2.5,
}


def spread_out(tokens: int, experts: int, low: float = -6.0, high: float = 6.0) -> torch.Tensor:
    """Rows that are permutations of one even grid: no two scores of a row are closer than rounding can tell."""
    grid = torch.linspace(low, high, experts)
    return torch.stack([grid[torch.randperm(experts)] for _ in range(tokens)])


def check_row_rules(ids: torch.Tensor, experts: int) -> None:
    ids = ids.long().sort(-1).values
    assert (ids >= 0).all() and (ids < experts).all()
    assert (ids[:, 1:] != ids[:, :-1]).all()


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    # exp and the order of sums differ by a few units in the last place of float32, then one rounding.
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=1e-7, equal_nan=True)


def check_against_reference(logits: torch.Tensor, topk: int, **options) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = ops.moe_router(logits, topk, **options)
    options = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    expected_weights, expected_ids = reference.moe_router(logits.cpu(), topk, **options)
    assert_bit_equal(ids, expected_ids)
    close(weights.cpu(), expected_weights)
    check_row_rules(ids, logits.shape[1])
    return weights, ids


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("score_after_topk", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("experts", [1, 2, 8, 15, 16, 17, 60, 128, 257])
def test_matches_reference(device, score, score_after_topk, renormalize, experts):
    logits = spread_out(37, experts).to(device)
    for topk in {1, min(2, experts), min(8, experts), experts}:
        check_against_reference(
            logits, topk, score=score, score_after_topk=score_after_topk, renormalize=renormalize, scale=1.5
        )


@pytest.mark.parametrize("logits_dtype", DTYPES)
@pytest.mark.parametrize("bias_dtype", [None, *DTYPES])
@pytest.mark.parametrize("weights_dtype", [None, *DTYPES])
@pytest.mark.parametrize("ids_dtype", [None, torch.int32, torch.int64])
def test_dtypes(device, logits_dtype, bias_dtype, weights_dtype, ids_dtype):
    logits = spread_out(9, 40).to(device, logits_dtype)
    bias = None if bias_dtype is None else torch.randn(40, device=device).to(bias_dtype)
    weights, ids = check_against_reference(
        logits, 6, bias=bias, score="sigmoid", weights_dtype=weights_dtype, ids_dtype=ids_dtype
    )
    assert weights.dtype == (weights_dtype or torch.float32) and ids.dtype == (ids_dtype or torch.int64)


@pytest.mark.parametrize("group_score", ["top2_sum", "max"])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(
    ("experts", "num_groups", "topk_groups", "topk"),
    [
        (256, 8, 4, 8),
        (256, 8, 8, 8),
        (256, 8, 1, 32),
        (160, 8, 3, 6),
        (72, 12, 5, 6),
        (64, 32, 9, 18),
        (96, 4, 2, 48),
        (126, 7, 2, 3),
    ],
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_groups(device, score, group_score, experts, num_groups, topk_groups, topk, with_bias):
    options = {"score": score, "group_score": group_score, "num_groups": num_groups, "topk_groups": topk_groups}
    bias = 0.1 * torch.randn(experts, device=device) if with_bias else None
    logits = spread_out(21, experts).to(device)
    _, ids = check_against_reference(logits, topk, bias=bias, renormalize=True, renorm_eps=1e-20, scale=2.5, **options)
    groups = ids // (experts // num_groups)
    assert all(row.unique().numel() <= topk_groups for row in groups.cpu())


def deepseek_v3(logits, bias, topk, groups, topk_groups, scale):
    """The selection of DeepSeek-V3 with masks, written independently of the reference; float64."""
    scores = logits.double().sigmoid()
    keys = scores + bias.double()
    best = keys.unflatten(-1, (groups, -1)).topk(2).values.sum(-1).topk(topk_groups).indices
    mask = torch.zeros(*logits.shape[:-1], groups, dtype=torch.bool).scatter(-1, best, True)
    mask = mask.repeat_interleave(logits.shape[-1] // groups, -1)
    ids = keys.masked_fill(~mask, -math.inf).topk(topk).indices
    weights = scores.gather(-1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale, ids


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 300])
def test_deepseek_v3(device, tokens):
    logits, bias = spread_out(tokens, 256), 0.3 * torch.randn(256)
    weights, ids = ops.moe_router(logits.to(device), 8, bias=bias.to(device), **DEEPSEEK_V3)
    expected_weights, expected_ids = deepseek_v3(logits, bias, 8, 8, 4, 2.5)
    assert_bit_equal(ids, expected_ids)
    torch.testing.assert_close(weights.cpu().double(), expected_weights, rtol=1e-5, atol=0)


def test_gpt_oss_scores_the_chosen_logits(device):
    logits = spread_out(33, 32).to(device, torch.bfloat16)
    weights, ids = ops.moe_router(logits, 4, score_after_topk=True, weights_dtype=torch.bfloat16)
    values, expected_ids = logits.float().topk(4)
    assert_bit_equal(ids, expected_ids)
    close(weights.cpu(), values.cpu().softmax(-1).bfloat16())


def test_bias_selects_but_does_not_weigh(device):
    logits = torch.zeros(2, 8, device=device)
    bias = torch.arange(8.0, device=device)
    for after in (False, True):
        weights, ids = ops.moe_router(logits, 3, bias=bias, score="sigmoid", score_after_topk=after)
        assert ids.tolist() == [[7, 6, 5]] * 2 and (weights == 0.5).all()


# Softplus turns into the identity above 20, so that the exponential cannot overflow.
def test_sqrt_softplus_over_its_whole_range(device):
    x = torch.cat([torch.linspace(-110, 30, 1401), torch.tensor([-1e4, -1e-6, 0.0, 1e-6, 20.0, 20.001, 88.0, 1e4])])
    weights, ids = ops.moe_router(x[:, None].to(device), 1, score="sqrt_softplus")
    expected = F.softplus(x.double()).sqrt()
    torch.testing.assert_close(weights[:, 0].cpu().double(), expected, rtol=1e-6, atol=1e-22)
    assert (ids == 0).all()
    ends = torch.tensor([[math.inf], [-math.inf], [math.nan]], device=device)
    weights, _ = ops.moe_router(ends, 1, score="sqrt_softplus")
    assert_bit_equal(weights, torch.tensor([[math.inf], [0.0], [math.nan]]))


@pytest.mark.parametrize("experts", [1, 16, 100, 256, 512, 513, 1000, 4096, 4099, 16384])
def test_every_expert_count_and_full_sort(device, experts):
    logits = torch.randint(-50, 50, (3, experts)).float()  # full of ties
    logits[1] = spread_out(1, experts)
    if device == "npu" and experts == 16384:
        with pytest.raises(ValueError, match="moe_router: the scores of 16384 experts and 1 choices do not fit a core"):
            ops.moe_router(logits.to(device), 1)
        return
    for topk in {1, min(8, experts), min(32, experts), experts}:
        _, ids = ops.moe_router(logits.to(device), topk, score_after_topk=True)
        expected = logits.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
        assert_bit_equal(ids, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(device, dtype):
    logits = spread_out(12, 40).to(dtype)
    bias = torch.randn(40, device=device)
    expected = ops.moe_router(logits.to(device), 4, bias=bias, score="sigmoid")
    for name, view in layouts(logits).items():
        for actual, wanted in zip(
            ops.moe_router(view.to(device), 4, bias=bias, score="sigmoid"), expected, strict=True
        ):
            assert_bit_equal(actual, wanted, name)
    strided_bias = torch.stack([bias, bias], -1)[:, 0]
    assert_bit_equal(ops.moe_router(logits.to(device), 4, bias=strided_bias, score="sigmoid")[1], expected[1])
    expanded = logits[:1].expand(12, 40).to(device)
    assert_bit_equal(ops.moe_router(expanded, 4, bias=bias, score="sigmoid")[0][11], expected[0][0])


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(
    tokens=st.integers(0, 10),
    group_size=st.integers(1, 40),
    num_groups=st.integers(1, 20),
    score=st.sampled_from(SCORES),
    group_score=st.sampled_from(["top2_sum", "max"]),
    score_after_topk=st.booleans(),
    with_bias=st.booleans(),
    data=st.data(),
)
def test_any_shape_with_ties(tokens, group_size, num_groups, score, group_score, score_after_topk, with_bias, data):
    hypothesis.assume(group_size > 1 or num_groups == 1 or group_score == "max")
    topk_groups = data.draw(st.integers(1, num_groups))
    topk = data.draw(st.integers(1, topk_groups * group_size))
    seed = data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    experts = num_groups * group_size
    # Few distinct values: equal logits have equal scores in both, others are far apart. Exact in float32 with the bias.
    logits = torch.randint(-3, 4, (tokens, experts), generator=generator).float()
    bias = torch.randint(0, 2, (experts,), generator=generator).float() * 8 if with_bias else None
    check_against_reference(
        logits,
        topk,
        bias=bias,
        score=score,
        score_after_topk=score_after_topk,
        num_groups=num_groups,
        topk_groups=topk_groups,
        group_score=group_score,
    )


def test_no_tokens(device):
    weights, ids = ops.moe_router(torch.empty(0, 64, device=device), 4, weights_dtype=torch.bfloat16)
    assert weights.shape == ids.shape == (0, 4) and weights.dtype == torch.bfloat16


def test_batch_and_row_order_do_not_matter(device):
    logits = torch.randn(4099, 64, device=device)
    weights, ids = ops.moe_router(logits, 8)
    for rows in (slice(0, 1), slice(4098, 4099), slice(17, 200)):
        alone = ops.moe_router(logits[rows], 8)
        assert_bit_equal(alone[0], weights[rows])
        assert_bit_equal(alone[1], ids[rows])


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("grouped", [False, True])
def test_more_than_2_to_31_logits(grouped):
    tokens, experts = 2**31 // 256 + 5, 256
    logits = torch.empty(tokens, experts, dtype=torch.bfloat16, device="cuda").normal_()
    options = {"score": "sigmoid", "num_groups": 8, "topk_groups": 4} if grouped else {}
    results = ops.moe_router(logits, 8, **options)
    for part in (slice(0, 3), slice(tokens // 2, tokens // 2 + 3), slice(tokens - 3, tokens)):
        for ours, theirs in zip(results, ops.moe_router(logits[part], 8, **options), strict=True):
            assert_bit_equal(ours[part], theirs)


# vllm#39391: rows with NaN, with +inf, all NaN, all -inf.
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("score_after_topk", [False, True])
def test_nan_and_inf_rows(device, score, grouped, score_after_topk):
    logits = spread_out(6, 64)
    healthy = logits.clone()
    logits[0] = math.nan
    logits[1, 9] = math.inf
    logits[2, 5] = math.nan
    logits[3] = -math.inf
    logits[4, 3:] = -math.inf
    options = {"num_groups": 8, "topk_groups": 3} if grouped else {}
    options |= {"score": score, "score_after_topk": score_after_topk}
    weights, ids = check_against_reference(logits.to(device), 6, **options)
    assert ids[0].tolist() == ids[3].tolist() == [0, 1, 2, 3, 4, 5]
    assert weights[0].isnan().all()
    if score != "softmax" or score_after_topk:
        assert ids[2, 0] == 5 and weights[2, 0].isnan()
        assert ids[1, 0] == 9 or (grouped and not score_after_topk)  # a score of 1 may sit in a group that loses
    else:
        assert weights[1].isnan().all() and weights[2].isnan().all() and weights[3].isnan().all()
    for actual, wanted in zip((weights, ids), ops.moe_router(healthy.to(device), 6, **options), strict=True):
        assert_bit_equal(actual[5], wanted[5])


def test_nan_of_either_sign_is_greatest(device):
    logits = torch.zeros(1, 20)
    logits[0, 3], logits[0, 11], logits[0, 17] = math.inf, -math.nan, math.nan
    _, ids = ops.moe_router(logits.to(device), 4, score_after_topk=True)
    assert ids.tolist() == [[11, 17, 3, 0]]
    bias = torch.zeros(20, device=device)
    bias[13] = math.nan
    assert ops.moe_router(logits.to(device), 4, bias=bias, score_after_topk=True)[1].tolist() == [[11, 13, 17, 3]]


def test_zeros_of_either_sign_tie(device):
    logits = torch.tensor([[-0.0, 0.0, -1.0, 0.0, -0.0]], device=device)
    assert ops.moe_router(logits, 4, score_after_topk=True)[1].tolist() == [[0, 1, 3, 4]]


# vllm#13474: with negative keys, a masked expert must not win because its mask is 0.
@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_groups_with_negative_keys(device, dtype):
    logits = torch.randn(5, 16).to(dtype)
    bias = -3.0 + 0.1 * torch.arange(16.0)
    weights, ids = ops.moe_router(
        logits.to(device), 4, bias=bias.to(device), score="sigmoid", num_groups=4, topk_groups=2, renormalize=True
    )
    expected_weights, expected_ids = deepseek_v3(logits, bias, 4, 4, 2, 1.0)
    assert_bit_equal(ids, expected_ids)
    torch.testing.assert_close(weights.cpu().double(), expected_weights, rtol=1e-5, atol=0)


def test_an_expert_at_minus_infinity_still_beats_masked_groups(device):
    logits = torch.full((1, 16), -math.inf)
    logits[0, 8:10] = 1.0
    _, ids = ops.moe_router(logits.to(device), 6, score_after_topk=True, num_groups=4, topk_groups=2, group_score="max")
    assert ids.tolist() == [[8, 9, 0, 1, 2, 3]]


# flashinfer#3803: every chosen sigmoid underflows to 0.
@pytest.mark.parametrize("experts", [16, 1000])
@pytest.mark.parametrize("renorm_eps", [0.0, 0.5])
def test_least_divisor(device, experts, renorm_eps):
    """On either side of it, and NaN."""
    logits = torch.cat([torch.randn(20, experts), torch.full((1, experts), -20.0)]).to(device)
    logits[3, 5] = torch.nan
    options = {"score": "sigmoid", "renormalize": True, "renorm_eps": renorm_eps}
    for least in (0.0, 1e-12, 1.9, 5.0):
        weights, _ = check_against_reference(logits, 2, renorm_min=least, **options)
        assert weights[3].isnan().all() and (
            least == 0 or weights[-1].sum() <= 2 * 2.1e-9 / max(least, renorm_eps, 4e-9)
        )
    assert torch.equal(
        ops.moe_router(logits[:3], 2, renorm_min=1e-30, **options)[0], ops.moe_router(logits[:3], 2, **options)[0]
    )


def test_renormalisation_of_underflowing_scores(device):
    logits, bias = torch.full((2, 16), -200.0, device=device), torch.arange(16.0, device=device)
    options = {"bias": bias, "score": "sigmoid", "renormalize": True}
    weights, ids = ops.moe_router(logits, 8, renorm_eps=1e-20, **options)
    assert ids.tolist() == [[15, 14, 13, 12, 11, 10, 9, 8]] * 2 and (weights == 0).all()
    assert ops.moe_router(logits, 8, **options)[0].isnan().all()  # 0 / 0, as the formula without eps


# FlagGems#5469: the bias is added in float32.
@pytest.mark.parametrize("dtype", DTYPES)
def test_selection_is_in_float32(device, dtype):
    logits = torch.zeros(3, 32, dtype=dtype, device=device)
    bias = 1e-4 * torch.arange(32.0, device=device)
    for score in ("sigmoid", "softmax", "sqrt_softplus"):
        _, ids = ops.moe_router(logits, 4, bias=bias, score=score)
        assert ids.tolist() == [[31, 30, 29, 28]] * 3


# vllm#52679: all logits equal, and a tie across the cut.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("score", SCORES)
def test_ties_go_to_the_lower_index(device, dtype, score):
    logits = torch.zeros(2, 384, dtype=dtype)
    logits[1, [7, 100, 383]] = 1.0
    for _ in range(3):
        _, ids = ops.moe_router(logits.to(device), 8, score=score)
        assert ids.tolist() == [list(range(8)), [7, 100, 383, 0, 1, 2, 3, 4]]


def test_ties_between_groups_go_to_the_lower_index(device):
    for group_score in ("top2_sum", "max"):
        options = {"score": "sigmoid", "num_groups": 16, "topk_groups": 3, "group_score": group_score}
        _, ids = ops.moe_router(torch.zeros(1, 64, device=device), 12, **options)
        assert ids.tolist() == [list(range(12))]


# sglang-jax#1282: the scaling factor does not depend on the renormalisation.
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_scale_with_and_without_renormalisation(device, score, renormalize, after):
    logits = spread_out(3, 8).to(device)
    options = {"score": score, "renormalize": renormalize, "score_after_topk": after}
    plain, ids = ops.moe_router(logits, 2, **options)
    scaled, scaled_ids = ops.moe_router(logits, 2, scale=2.5, **options)
    assert_bit_equal(ids, scaled_ids)
    assert_bit_equal(scaled, plain * 2.5)
    sums_to_one = renormalize or (after and score == "softmax")
    assert sums_to_one == torch.allclose(plain.sum(-1).cpu(), torch.ones(3), rtol=1e-6)


ERRORS = [
    ({"logits": torch.randn(8)}, r"logits must be 2-D, \[tokens, experts\], got shape \[8\]"),
    ({"logits": torch.randn(2, 8).double()}, "logits must be float32, bfloat16 or float16, got float64"),
    ({"logits": torch.randn(2, 0)}, "logits must have 1 to 16384 experts, got 0"),
    ({"logits": torch.randn(2, 16385)}, "logits must have 1 to 16384 experts, got 16385"),
    ({"score": "tanh"}, "score must be softmax, sigmoid or sqrt_softplus, got tanh"),
    ({"group_score": "sum"}, "group_score must be top2_sum or max, got sum"),
    ({"num_groups": 3}, "num_groups must divide the 8 experts, got 3"),
    ({"num_groups": 0}, "num_groups must divide the 8 experts, got 0"),
    ({"num_groups": 4, "topk_groups": 5}, r"topk_groups must lie in \[1, 4\], got 5"),
    ({"num_groups": 4, "topk_groups": 0}, r"topk_groups must lie in \[1, 4\], got 0"),
    ({"num_groups": 8, "topk_groups": 4}, "top2_sum needs groups of at least 2 experts"),
    ({"topk": 0}, r"topk must lie in \[1, 8\], the experts that can be selected, got 0"),
    ({"topk": 9}, r"topk must lie in \[1, 8\], .* got 9"),
    ({"topk": 5, "num_groups": 4, "topk_groups": 2}, r"topk must lie in \[1, 4\], .* got 5"),
    ({"bias": torch.randn(7)}, r"bias must have shape \[8\], got \[7\]"),
    ({"bias": torch.randn(1, 8)}, r"bias must have shape \[8\], got \[1, 8\]"),
    ({"bias": torch.arange(8)}, "bias must be float32, bfloat16 or float16, got int64"),
    ({"renorm_eps": -1.0}, "renorm_eps must not be negative, got -1"),
    ({"renorm_min": -1.0}, "renorm_min must not be negative, got -1"),
    ({"weights_dtype": torch.float64}, "weights_dtype must be float32, bfloat16 or float16, got float64"),
    ({"ids_dtype": torch.int16}, "ids_dtype must be int64 or int32, got int16"),
]


@pytest.mark.parametrize(("options", "message"), ERRORS)
@pytest.mark.parametrize("meta", [False, True])
def test_errors(device, options, message, meta):
    options = {"logits": torch.randn(2, 8), "topk": 2} | options
    where = "meta" if meta else device
    options = {k: v.to(where) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    with pytest.raises(ValueError, match=f"moe_router: .*{message}"):
        ops.moe_router(**options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(device, dtype):
    logits = torch.randn(6, 16, device=device).to(dtype)
    bias = torch.randn(16, device=device)
    column_major = logits.t().contiguous().t()
    for x in (logits, logits[:0], logits[:1], logits[::2], column_major):
        opcheck(torch.ops.deepinfer.moe_router.default, (x, 4))
    for score, after, group_score in itertools.product(SCORES, (False, True), ("top2_sum", "max")):
        options = {"score": score, "score_after_topk": after, "group_score": group_score, "renormalize": True}
        options |= {"bias": bias.to(dtype), "num_groups": 4, "topk_groups": 2, "renorm_eps": 1e-20, "scale": 2.5}
        options |= {"weights_dtype": dtype, "ids_dtype": torch.int32}
        opcheck(torch.ops.deepinfer.moe_router.default, (logits, 4), options)
