"""Experts that all see every token, as Llama 4 spells them: what is found, and near misses."""

import pytest
import torch
import torch.nn.functional as F
from graphs import swaps, traced

TOKENS, EXPERTS, HIDDEN, SIZE = 11, 6, 16, 24
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def dense_experts(x, logits, gate_up, down, k=1, lowest=-torch.inf, act=F.silu, score=torch.sigmoid, total=True):
    values, ids = torch.topk(logits, k, dim=1)
    scores = torch.full_like(logits, lowest).scatter_(1, ids, values)
    scores = score(scores.float()).to(logits.dtype)
    rows = x.repeat(EXPERTS, 1) * scores.transpose(0, 1).reshape(-1, 1)
    gate, up = torch.bmm(rows.view(EXPERTS, -1, HIDDEN), gate_up).chunk(2, dim=-1)
    out = torch.bmm(up * act(gate), down).view(-1, HIDDEN).reshape(EXPERTS, -1, HIDDEN)
    return out.sum(dim=0) if total else out.mean(dim=0)


def inputs(dtype=torch.float32, tokens=TOKENS):
    shapes = ((tokens, HIDDEN), (tokens, EXPERTS), (EXPERTS, HIDDEN, 2 * SIZE), (EXPERTS, SIZE, HIDDEN))
    return [torch.randn(shape).to(dtype) for shape in shapes]


def check(function, *tensors, **options) -> int:
    """How often it was swapped; the results are those of eager."""
    with torch.no_grad():
        run = traced(function, {"deepinfer.patterns": "all"}, **options)
        ours, eager = run(*tensors), function(*tensors)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[eager.dtype]
    torch.testing.assert_close(ours, eager, rtol=tolerance, atol=tolerance)
    assert ours.stride() == eager.stride()
    return swaps(run.report).get("fused_experts", 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", [F.silu, F.gelu])
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_found(dtype, act, tokens):
    assert check(lambda *tensors: dense_experts(*tensors, act=act), *inputs(dtype, tokens)) == 1


def test_dynamic_shapes():
    assert check(dense_experts, *inputs(), dynamic=True) == 0  # the size of an expert is not known
    tensors = inputs()
    for tensor in tensors[:2]:
        torch._dynamo.mark_dynamic(tensor, 0)
    assert check(dense_experts, *tensors) == 1


NEAR_MISSES = {
    "two experts": {"k": 2},
    "the others are not zero": {"lowest": 0.0},
    "another score": {"score": torch.exp},
    "a mean": {"total": False},
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    assert check(lambda *tensors: dense_experts(*tensors, **NEAR_MISSES[name]), *inputs()) == 0


def test_scores_in_use_elsewhere():
    def function(x, logits, gate_up, down):
        values, ids = torch.topk(logits, 1, dim=1)
        scores = torch.full_like(logits, -torch.inf).scatter_(1, ids, values).float().sigmoid()
        rows = x.repeat(EXPERTS, 1) * scores.transpose(0, 1).reshape(-1, 1)
        gate, up = torch.bmm(rows.view(EXPERTS, -1, HIDDEN), gate_up).chunk(2, dim=-1)
        return torch.bmm(up * F.silu(gate), down).sum(dim=0) + scores.sum()

    assert check(function, *inputs()) == 0
