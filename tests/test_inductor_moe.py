"""Routers, experts and gated activations on small graphs: spellings that must be found, and near misses that must not
change the result. See test_inductor_patterns.py for the norms and rotations."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  (registers its grouped product)
from graphs import swaps, traced
from test_inductor_patterns import DTYPES, LOW, found, run
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from torch_deepinfer import jit
from torch_deepinfer.inductor import settings
from torch_deepinfer.inductor.rewrite import rewrite

TOKENS, EXPERTS, K = 6, 16, 4


def logits_of(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """No two experts of a token are close: which are chosen does not depend on rounding."""
    ranks = torch.stack([torch.randperm(EXPERTS) for _ in range(TOKENS)])
    return (ranks / 4 - 2).to(dtype)


# -- routers -----------------------------------------------------------------------------------------------------------


def softmax_topk(x, bias):
    return torch.topk(torch.softmax(x, -1, dtype=torch.float32), K, dim=-1)


def renormalized(x, bias):
    weights, ids = softmax_topk(x, bias)
    return weights / weights.sum(-1, keepdim=True), ids


def cast_back(x, bias):
    weights, ids = renormalized(x, bias)
    return weights.to(torch.bfloat16), ids


def scaled(x, bias):
    weights, ids = softmax_topk(x, bias)
    return weights * 16.0, ids


def topk_softmax(x, bias):
    weights, ids = torch.topk(x, K, dim=-1)
    return torch.softmax(weights, 1, dtype=x.dtype), ids


def topk_softmax_rounded(x, bias):
    weights, ids = torch.topk(x, K, dim=-1)
    return torch.softmax(weights.float(), -1).to(torch.bfloat16), ids


def sigmoid_bias(x, bias):
    scores = x.float().sigmoid()
    ids = torch.topk(scores + bias, K, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, ids


def sigmoid_without_bias(x, bias):
    weights, ids = torch.topk(x.float().sigmoid(), K, dim=-1)
    return weights / weights.sum(-1, keepdim=True), ids


def limited(x, bias, groups=4, chosen=2, fill=-math.inf, best=2, of=None, alternating=False):
    """DeepSeek V3: only experts of the best groups, ranked by the sum of their two best experts."""
    scores = x.float().sigmoid()
    key = scores + bias
    ranking = (key if of is None else of(key)).view(-1, groups, EXPERTS // groups).topk(best, dim=-1)[0].sum(-1)
    group_ids = torch.topk(ranking, chosen, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(ranking).scatter(1, group_ids, 1)
    if alternating:
        mask = mask.unsqueeze(1).expand(-1, EXPERTS // groups, groups).reshape(-1, EXPERTS)
    else:
        mask = mask.unsqueeze(-1).expand(-1, groups, EXPERTS // groups).reshape(-1, EXPERTS)
    ids = torch.topk(key.masked_fill(~mask.bool(), fill), K, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, ids


def limited_to_one_group(x, bias):
    return limited(x, bias, groups=1, chosen=1)


def limited_by_maximum(x, bias):
    """DeepSeek V2: softmax, groups ranked by their best expert, the others set to zero."""
    scores = torch.softmax(x, -1, dtype=torch.float32)
    ranking = scores.view(-1, 4, EXPERTS // 4).max(-1).values
    group_ids = torch.topk(ranking, 2, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(ranking).scatter(1, group_ids, 1)
    mask = mask.unsqueeze(-1).expand(-1, 4, EXPERTS // 4).reshape(-1, EXPERTS)
    weights, ids = torch.topk(scores.masked_fill(~mask.bool(), 0.0), K, dim=-1, sorted=False)
    return weights * 1.5, ids


def least_sum(x, bias):
    """Ernie 4.5."""
    scores = torch.softmax(x, -1, dtype=torch.float32)
    ids = torch.topk(scores + bias, K, dim=-1)[1]
    weights = scores.gather(-1, ids)
    return weights / torch.clamp(weights.sum(-1, keepdim=True), min=0.7), ids


def root_of_softplus(x, bias):
    """DeepSeek V4."""
    scores = F.softplus(x.float()).sqrt()
    ids = torch.topk(scores + bias, K, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 1.5, ids


ROUTERS = [
    softmax_topk, renormalized, cast_back, scaled, topk_softmax, topk_softmax_rounded, sigmoid_bias,
    sigmoid_without_bias, limited, limited_to_one_group, limited_by_maximum, least_sum,
    root_of_softplus,
]  # fmt: skip


def in_order(router):
    """The choice of an unsorted top-k has no order of its own."""

    def ordered(x, bias):
        weights, ids = router(x, bias)
        ids, order = ids.sort(-1)
        return weights.gather(1, order), ids

    return ordered


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("router", ROUTERS)
def test_spellings_of_the_router(router, dtype):
    x, bias = logits_of(dtype), torch.linspace(0, 0.05, EXPERTS)
    assert found(in_order(router), x, bias) == {"moe_router": 1}


def looked_up(x, bias):
    """DeepSeek V4's first layers: a table says which experts a token asks."""
    scores = F.softplus(x.float()).sqrt()
    table = torch.arange(64).remainder(EXPERTS).view(-1, K)
    ids = table[bias[: x.shape[0]].long()]
    return scores.gather(1, ids), ids


def root_of_another_softplus(x, bias):
    return torch.topk(F.softplus(x.float(), beta=2).sqrt(), K, dim=-1)


def attention(x, bias):
    return torch.softmax(x, -1) @ x.t(), x


def sampling(x, bias):
    values, ids = torch.topk(x, K, dim=-1)
    return torch.where(x < values[:, -1:], -math.inf, x).softmax(-1), ids


def smallest(x, bias):
    return torch.topk(torch.softmax(x, -1), K, dim=-1, largest=False)


def over_tokens(x, bias):
    return torch.topk(torch.softmax(x, -1), K, dim=0)


def softmax_over_tokens(x, bias):
    return torch.topk(torch.softmax(x, 0), K, dim=-1)


def batched(x, bias):
    return torch.topk(torch.softmax(x[None], -1), K, dim=-1)


def sum_bounded_from_above(x, bias):
    weights, ids = softmax_topk(x, bias)
    return weights / weights.sum(-1, keepdim=True).clamp_max(0.5), ids


def divided_by_the_maximum(x, bias):
    weights, ids = softmax_topk(x, bias)
    return weights / weights.amax(-1, keepdim=True), ids


def divided_by_all(x, bias):
    probabilities = torch.softmax(x, -1)
    weights, ids = torch.topk(probabilities, K, dim=-1)
    return weights / probabilities.sum(-1, keepdim=True), ids


def weights_with_bias(x, bias):
    weights, ids = torch.topk(x.sigmoid() + bias, K, dim=-1)
    return weights, ids


def gathered_elsewhere(x, bias):
    scores = x.sigmoid()
    ids = torch.topk(scores + bias, K, dim=-1)[1]
    return x.gather(1, ids), ids


def bias_per_token(x, bias):
    scores = x.sigmoid()
    ids = torch.topk(scores + x[:, :1] * 1e-3, K, dim=-1)[1]
    return scores.gather(1, ids), ids


def bias_with_a_factor(x, bias):
    scores = x.sigmoid()
    ids = torch.topk(torch.add(scores, bias, alpha=3.0), K, dim=-1)[1]
    return scores.gather(1, ids), ids


def probabilities_used_elsewhere(x, bias):
    probabilities = torch.softmax(x, -1)
    weights, ids = torch.topk(probabilities, K, dim=-1)
    return weights, ids, probabilities


def scores_in_16_bits(x, bias):
    weights, ids = torch.topk(x.bfloat16().sigmoid(), K, dim=-1)
    return weights.float(), ids


def groups_masked_with_zero(x, bias):
    return limited(x, bias - 2.0, fill=0.0)


def groups_by_three_best(x, bias):
    return limited(x, bias, best=3)


def groups_of_other_scores(x, bias):
    return limited(x, bias, of=torch.neg)


def alternating_groups(x, bias):
    return limited(x, bias, alternating=True)


def softmax_of_the_negative(x, bias):
    values, ids = torch.topk(x, K, dim=-1)
    return torch.softmax(-values, -1), ids


NEAR_ROUTERS = [
    looked_up, root_of_another_softplus,
    attention, sampling, smallest, over_tokens, softmax_over_tokens, batched, sum_bounded_from_above,
    divided_by_the_maximum, divided_by_all, weights_with_bias, gathered_elsewhere, bias_per_token, bias_with_a_factor,
    probabilities_used_elsewhere, scores_in_16_bits, groups_masked_with_zero, groups_by_three_best,
    groups_of_other_scores, alternating_groups, softmax_of_the_negative,
]  # fmt: skip


@pytest.mark.parametrize("router", NEAR_ROUTERS)
def test_near_misses_of_the_router(router):
    x, bias = logits_of(), torch.linspace(0, 0.05, EXPERTS)
    assert found(router, x, bias) == {}


def test_what_follows_the_router_is_left_alone():
    def scaled_by_a_tensor(x, bias):
        weights, ids = renormalized(x, bias)
        return weights * bias.sum(), ids

    def scaled_after_the_cast(x, bias):
        weights, ids = cast_back(x, bias)
        return weights * 1.1, ids

    x, bias = logits_of(), torch.linspace(0, 0.05, EXPERTS)
    assert found(scaled_by_a_tensor, x, bias) == {"moe_router": 1}
    assert found(scaled_after_the_cast, x, bias) == {"moe_router": 1}


# -- gated activations -------------------------------------------------------------------------------------------------


def gpt_oss(gate, up, limit=7.0, alpha=1.702):
    gate = gate.clamp(max=limit)
    up = up.clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def deepseek_v4(gate, up, limit=7.0):
    return F.silu(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)


GATED = {
    "silu": (lambda gate, up: F.silu(gate) * up, "silu_and_mul"),
    "silu, swapped": (lambda gate, up: up * F.silu(gate), "silu_and_mul"),
    "gpt-oss": (gpt_oss, "silu_and_mul"),
    "deepseek-v4": (deepseek_v4, "silu_and_mul"),
    "gelu": (lambda gate, up: F.gelu(gate) * up, "gelu_and_mul"),
    "gelu tanh": (lambda gate, up: F.gelu(gate, approximate="tanh") * up, "gelu_and_mul"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GATED)
def test_spellings_of_gated_activations(name, dtype):
    function, pattern = GATED[name]
    x = (4 * torch.randn(3, 5, 64)).to(dtype)
    exact = pattern == "silu_and_mul"  # for large negative inputs our gelu is closer to the truth than torch's
    assert found(function, *x.chunk(2, -1), exact=exact) == {pattern: 1}
    assert found(lambda x: function(*x.chunk(2, -1)), x, exact=exact) == {pattern: 1}
    assert found(lambda x: function(*x.split(32, dim=-1)), x, exact=exact) == {pattern: 1}
    assert found(lambda x: function(x[..., ::2], x[..., 1::2]), x, exact=exact) == {pattern: 1}


NEAR_GATED = {
    "ungated": lambda a, b: F.silu(a),
    "sum": lambda a, b: F.silu(a) + b,
    "broadcast": lambda a, b: F.silu(a) * b[:1],
    "broadcast gate": lambda a, b: F.silu(a[..., :1]) * b,
    "number": lambda a, b: F.silu(a) * 2.0,
    "swish with a factor": lambda a, b: a * torch.sigmoid(1.5 * a) * b,
    "activation used elsewhere": lambda a, b: (F.silu(a) * b, F.silu(a).sum(-1)),
    "other dtype": lambda a, b: F.silu(a) * b.double(),
    "one plus exp of x": lambda a, b: a / (1 + torch.exp(a)) * b,
    "two plus": lambda a, b: a / (2 + torch.exp(-a)) * b,
    "one-sided clamp": lambda a, b: (b.clamp(max=7.0) + 1) * (a.clamp(max=7.0) * torch.sigmoid(a.clamp(max=7.0))),
    "two limits": lambda a, b: (lambda g: (b.clamp(-5.0, 5.0) + 1) * (g * torch.sigmoid(g * 1.7)))(a.clamp(max=7.0)),
    "sigmoid of the unclamped": lambda a, b: (b.clamp(-7.0, 7.0) + 1) * (a.clamp(max=7.0) * torch.sigmoid(a * 1.7)),
    "relu": lambda a, b: F.relu(a) * b,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NEAR_GATED)
def test_near_misses_of_gated_activations(name, dtype):
    a, b = (4 * torch.randn(2, 6, 32)).to(dtype)
    run(NEAR_GATED[name], a, b)


@pytest.mark.parametrize("limit", [7.0, 3.0])
@pytest.mark.parametrize("alpha", [1.702, 1.0])
def test_every_flag_of_the_clamped_form_arrives(limit, alpha):
    # vllm#50773, pytorch#194976: two values of a flag are two results.
    a, b = (8 * torch.randn(2, 6, 32)).bfloat16()
    assert found(lambda a, b: gpt_oss(a, b, limit, alpha), a, b) == {"silu_and_mul": 1}


# -- experts -----------------------------------------------------------------------------------------------------------


HIDDEN, WIDTH = 32, 16


def grouped_mm(rows, weight, ends):
    if rows.dtype == torch.bfloat16:
        return torch._grouped_mm(rows, weight, offs=ends)
    return torch.ops.transformers.grouped_mm_fallback(rows, weight, ends)


def experts(x, gate_up, down, ids, weights, gate_up_bias=None, down_bias=None, **change):
    """What transformers traces. ``change`` alters one step."""
    k, num_experts = ids.shape[1], gate_up.shape[0]
    sorted_ids, order = torch.sort(ids.reshape(-1), descending=change.get("descending", False))
    rows = x[order // change.get("rows_per_token", k)]
    bins = change.get("bins", num_experts)
    counts = torch.histc(sorted_ids.float(), bins=bins, min=0, max=bins - 1)
    if bins != num_experts:
        counts = counts[:num_experts]
    ends = torch.cumsum(counts, 0, dtype=torch.int32)

    def masked(rows):
        limit = change.get("mask")
        return rows if limit is None else rows.masked_fill((sorted_ids >= limit).unsqueeze(-1), 0.0)

    def linear(rows, matrix, bias):
        if not change.get("transposed"):
            matrix = matrix.transpose(-2, -1)
        out = grouped_mm(rows, matrix, ends)
        return masked(out if bias is None else out + bias[change.get("bias_ids", sorted_ids)])

    hidden = linear(masked(rows), gate_up, gate_up_bias)
    hidden = change.get("gate", lambda h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1])(hidden)
    out = change.get("normalize", lambda y: y)(linear(hidden, down, down_bias))
    out = out * weights.reshape(-1)[change.get("weight_order", order)].unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    return out[inverse].view(x.shape[0], k, -1).sum(1).to(x.dtype)


def expert_inputs(dtype, weights_dtype=torch.float32, bias=False, transposed=False):
    """Weights as [experts, out, in], or as [experts, in, out] if transposed."""
    gate_up, down = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN) / 6, torch.randn(EXPERTS, HIDDEN, WIDTH) / 4
    if transposed:
        gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    ids = logits_of().topk(K, -1)[1]
    arguments = [torch.randn(TOKENS, HIDDEN).to(dtype), gate_up.to(dtype), down.to(dtype), ids]
    arguments.append(torch.rand(TOKENS, K).to(weights_dtype))
    if bias:
        arguments += [torch.randn(EXPERTS, 2 * WIDTH).to(dtype), torch.randn(EXPERTS, HIDDEN).to(dtype)]
    return arguments


def interleaved_gpt_oss(hidden):
    return gpt_oss(hidden[..., ::2], hidden[..., 1::2])


def close_experts(function, *arguments):
    """The number of swaps; sums are taken in another order than eager takes them, so within rounding."""
    with torch.no_grad():
        compiled = traced(function, {"deepinfer.patterns": ["fused_experts"]})
        ours, eager = compiled(*arguments), function(*arguments)
    tolerance = 2e-2 if ours.dtype in LOW else 1e-5
    torch.testing.assert_close(ours, eager, rtol=tolerance, atol=tolerance)
    return swaps(compiled.report).get("fused_experts", 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_spellings_of_the_experts(dtype):
    assert close_experts(experts, *expert_inputs(dtype)) == 1
    if dtype != torch.float32:
        assert close_experts(experts, *expert_inputs(dtype, weights_dtype=dtype)) == 1
    assert close_experts(functools.partial(experts, mask=EXPERTS), *expert_inputs(dtype)) == 1
    for activation in (F.gelu, functools.partial(F.gelu, approximate="tanh")):
        gate = lambda h, act=activation: act(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1]  # noqa: E731
        assert close_experts(functools.partial(experts, gate=gate), *expert_inputs(dtype)) == 1
    form = functools.partial(experts, gate=interleaved_gpt_oss, transposed=True)
    assert close_experts(form, *expert_inputs(dtype, bias=True, transposed=True)) == 1


def test_experts_that_live_elsewhere():
    """Ids past the end: no rows for them, and zeros where a row was left undefined."""
    x, gate_up, down, ids, weights = expert_inputs(torch.bfloat16)
    here = (x, gate_up[:8].contiguous(), down[:8].contiguous(), ids, weights)
    assert close_experts(functools.partial(experts, mask=8), *here) == 1


NEAR_EXPERTS = {
    "descending": {"descending": True},
    "other rows": {"rows_per_token": K + 1},
    "other groups": {"bins": EXPERTS + 1},
    "mask of another expert": {"mask": EXPERTS - 1},
    "weights not in the order of the rows": {"weight_order": torch.arange(TOKENS * K)},
    "biases not in the order of the rows": {"bias_ids": torch.arange(TOKENS * K) % EXPERTS},
    "a norm per expert": {"normalize": lambda y: F.layer_norm(y, (HIDDEN,))},
    "no gate": {"gate": lambda h: F.silu(h)[:, :WIDTH].contiguous()},
    "gate and up swapped": {"gate": lambda h: h.chunk(2, -1)[0] * F.silu(h.chunk(2, -1)[1])},
    "relu": {"gate": lambda h: F.relu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1]},
}


@pytest.mark.parametrize("name", NEAR_EXPERTS)
def test_near_misses_of_the_experts(name):
    arguments = expert_inputs(torch.float32, bias=name.startswith("biases"))
    assert close_experts(functools.partial(experts, **NEAR_EXPERTS[name]), *arguments) == 0


def test_value_in_the_middle_of_the_experts_is_used():
    def hooked(x, gate_up, down, ids, weights):
        kept = []
        out = experts(x, gate_up, down, ids, weights, normalize=lambda y: kept.append(y) or y)
        return out + kept[0].sum() * 1e-6

    assert close_experts(hooked, *expert_inputs(torch.float32)) == 0


# -- what a GPU traces -------------------------------------------------------------------------------------------------


def traced_for_cuda(function, *arguments):
    """Rewrites the graph for tensors on a GPU, which need not be there."""
    with FakeTensorMode() as mode:
        functional = torch.func.functionalize(function)
        module = make_fx(functional, decomposition_table=select_decomp_table())(*map(mode.from_tensor, arguments))
        for node in module.graph.nodes:
            if "device" in node.kwargs:
                node.update_kwarg("device", torch.device("cuda:0"))
            if node.target is torch.ops.aten.histc.default:
                node.args[0].update_arg(1, torch.int32)  # a GPU counts integers
        on_gpu = [torch.zeros(argument.shape, dtype=argument.dtype, device="cuda:0") for argument in arguments]
        FakeTensorProp(module, mode).propagate_dont_convert_inputs(*on_gpu)
    return rewrite(module.graph, settings.parse({"deepinfer.patterns": "all"}, {})[0])


def test_router_on_cuda(monkeypatch):
    assert traced_for_cuda(lambda x: limited(x, torch.zeros_like(x[0])), logits_of()).swapped["moe_router"] == int(
        jit.available()
    )
    monkeypatch.setattr(jit, "available", lambda: True)
    done = traced_for_cuda(lambda x: limited(x, torch.zeros_like(x[0])), logits_of())
    assert done.swapped == {"moe_router": 1}


def test_experts_on_cuda(monkeypatch):
    monkeypatch.setattr(jit, "available", lambda: True)
    done = traced_for_cuda(lambda *arguments: experts(*arguments), *expert_inputs(torch.bfloat16))
    assert done.swapped["fused_experts"] + done.declined["fused_experts", "the op has no cuda kernel"] == 1
