"""Experts that copy a matrix for each row, on small graphs: spellings and near misses. See test_inductor_moe.py."""

import functools

import pytest
import torch
import torch.nn.functional as F
from test_inductor_moe import (
    EXPERTS,
    HIDDEN,
    TOKENS,
    WIDTH,
    K,
    close_experts,
    expert_inputs,
    interleaved_gpt_oss,
    logits_of,
    traced_for_cuda,
)
from test_inductor_patterns import DTYPES

from torch_deepinfer import jit


def batched_experts(x, gate_up, down, ids, weights, gate_up_bias=None, down_bias=None, **change):
    """What transformers traces. ``change`` alters one step."""
    tokens, k = ids.shape
    flat_ids = change.get("limit", lambda ids: ids)(ids.reshape(-1))
    down_ids = change.get("down_ids", flat_ids)
    rows = change.get("repeat", lambda x: x.repeat_interleave(k, dim=0))(x)

    def linear(rows, matrix, bias, ids):
        if change.get("transposed"):
            out = torch.bmm(rows.unsqueeze(1), matrix[ids]).squeeze(1)
        else:
            out = torch.bmm(matrix[ids], rows.unsqueeze(-1)).squeeze(-1)
        if bias is not None:
            out.add_(bias[change.get("bias_ids", ids)])
        return out

    hidden = linear(rows, gate_up, gate_up_bias, flat_ids)
    hidden = change.get("gate", lambda h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1])(hidden)
    out = change.get("normalize", lambda y: y)(linear(hidden, down, down_bias, down_ids))
    out = out * change.get("weigh", lambda w: w.reshape(-1))(weights).unsqueeze(-1)
    return out.view(tokens, k, -1).sum(dim=1).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_spellings(dtype, bias):
    assert close_experts(batched_experts, *expert_inputs(dtype, bias=bias)) == 1
    assert close_experts(batched_experts, *expert_inputs(dtype, weights_dtype=dtype, bias=bias)) == 1
    gate = lambda h: F.gelu(h.chunk(2, -1)[0], approximate="tanh") * h.chunk(2, -1)[1]  # noqa: E731
    assert close_experts(functools.partial(batched_experts, gate=gate), *expert_inputs(dtype, bias=bias)) == 1
    form = functools.partial(batched_experts, gate=interleaved_gpt_oss, transposed=True)
    assert close_experts(form, *expert_inputs(dtype, bias=bias, transposed=True)) == 1


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("k", [1, 3])
def test_few_tokens_and_choices(tokens, k):
    x, gate_up, down, ids, weights = expert_inputs(torch.float32)
    assert close_experts(batched_experts, x[:tokens], gate_up, down, ids[:tokens, :k], weights[:tokens, :k]) == 1


@pytest.mark.parametrize("limit", [EXPERTS - 1, EXPERTS - 2])
def test_clamped_ids(limit):
    """As transformers 5.17 guards its index. What a top-k over the experts chose is in range already."""
    form = functools.partial(batched_experts, limit=lambda ids: ids.clamp(0, limit))

    def routed(x, logits, gate_up, down):
        weights, ids = logits.softmax(-1).topk(K, -1)
        return form(x, gate_up, down, ids, weights)

    x, gate_up, down, ids, weights = expert_inputs(torch.float32)
    assert close_experts(routed, x, logits_of(), gate_up, down) == (limit == EXPERTS - 1)
    assert close_experts(form, x, gate_up, down, ids, weights) == 0  # nothing is known about these


NEAR_MISSES = {
    "tokens in another order": {"repeat": lambda x: x.repeat(K, 1)},
    "another matrix of the second product": {"down_ids": torch.arange(TOKENS * K) % EXPERTS},
    "biases of other experts": {"bias_ids": torch.arange(TOKENS * K) % EXPERTS},
    "weights in another order": {"weigh": lambda w: w.t().reshape(-1)},
    "a norm per expert": {"normalize": lambda y: F.layer_norm(y, (HIDDEN,))},
    "no gate": {"gate": lambda h: F.silu(h)[:, :WIDTH].contiguous()},
    "gate and up swapped": {"gate": lambda h: h.chunk(2, -1)[0] * F.silu(h.chunk(2, -1)[1])},
    "relu": {"gate": lambda h: F.relu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1]},
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    arguments = expert_inputs(torch.float32, bias=name.startswith("biases"))
    assert close_experts(functools.partial(batched_experts, **NEAR_MISSES[name]), *arguments) == 0


@pytest.mark.parametrize("transposed", [False, True])
def test_square_matrices(transposed):
    """Nothing but the side of the product says whether they are transposed."""
    assert 2 * WIDTH == HIDDEN
    form = functools.partial(batched_experts, transposed=transposed)
    assert close_experts(form, *expert_inputs(torch.float32, transposed=transposed)) == 1


def test_on_cuda(monkeypatch):
    monkeypatch.setattr(jit, "available", lambda: True)
    done = traced_for_cuda(lambda *arguments: batched_experts(*arguments), *expert_inputs(torch.bfloat16))
    assert done.swapped["fused_experts"] == 1
