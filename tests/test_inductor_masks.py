"""Masks whose values compiling works out, and the attention that then does without them."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import swaps, traced
from test_inductor_attention import repeat
from test_inductor_moe import traced_for_cuda

from torch_deepinfer import jit
from torch_deepinfer.inductor import masks
from torch_deepinfer.inductor.patterns import attention as attention_patterns
from torch_deepinfer.inductor.patterns import attention_grouped, attention_span

BATCH, HEADS, SHARED, TOKENS, SIZE = 2, 6, 2, 24, 16


def positions(device: str = "cpu") -> torch.Tensor:
    return torch.arange(TOKENS, device=device) + 0


def indexed(before: int | None = None, packed: bool = False, device: str = "cpu") -> torch.Tensor:
    """As transformers builds it: positions and documents looked up by index."""
    at = positions(device)[None].expand(BATCH, -1)
    previous = torch.cat([at[:, :1] - 1, at], -1)
    document = (previous.diff(dim=-1) != 1).cumsum(-1)
    if packed:
        document = document + (at >= 10)
    row, query, key = (
        torch.arange(BATCH, device=device)[:, None, None, None],
        positions(device)[:, None],
        positions(device),
    )
    seen = torch.ones((), dtype=torch.bool, device=device) & (at[row, key] <= at[row, query])
    if before is not None:
        seen = seen & (at[row, key] > at[row, query] - before)
    return seen & (document[row, query] == document[row, key])


def triangle() -> torch.Tensor:
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None]


def added(seen: torch.Tensor, lowest: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.where(seen, torch.tensor(0.0, dtype=dtype, device=seen.device), lowest)


def upper(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((TOKENS, TOKENS), -torch.inf, dtype=dtype).triu(1)[None, None]


def attention(q, k, v, mask):
    count = HEADS // SHARED
    return F.scaled_dot_product_attention(q, repeat(k, count), repeat(v, count), attn_mask=mask)


def inputs(dtype: torch.dtype = torch.float32, tokens: int = TOKENS) -> tuple[torch.Tensor, ...]:
    q = torch.randn(BATCH, tokens, HEADS, SIZE).to(dtype).transpose(1, 2)
    k, v = (torch.randn(BATCH, TOKENS, SHARED, SIZE).to(dtype).transpose(1, 2) for _ in range(2))
    return q, k, v


def check(make_mask: Any, *tensors: torch.Tensor, **kwargs: Any) -> tuple[int, list[Any]]:
    """How often the mask went away, and the calls of attention that are left; the results are those of eager."""

    def function(*tensors):
        return attention(*tensors[:3], make_mask(*tensors[3:]))

    with torch.no_grad():
        run = traced(function, {"deepinfer.patterns": "all"}, **kwargs)
        ours, eager = run(*tensors), function(*tensors)
    tolerance = 1e-5 if eager.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, eager, rtol=tolerance, atol=tolerance)
    calls = [node for node in run.graphs[0].nodes if node.target in attention_patterns.CALLS]
    return swaps(run.report).get("maskless_attention", 0), calls


KNOWN = {
    "indexed": indexed,
    "triangle": triangle,
    "added, -inf": lambda: added(triangle(), -torch.inf),
    "added, lowest": lambda: added(indexed(), torch.finfo(torch.float32).min),
    "added, as for cuDNN": lambda: added(triangle(), -65504.0),
    "upper triangle": upper,
    "negated": lambda: torch.where(~triangle(), -torch.inf, 0.0),
    "for every head": lambda: triangle().expand(BATCH, HEADS, -1, -1),
    "window over everything": lambda: indexed(before=TOKENS),
}


@pytest.mark.parametrize("name", KNOWN)
def test_causal(name):
    count, [call] = check(KNOWN[name], *inputs())
    assert count == 1
    assert call.args[4] is True
    assert call.kwargs["attn_mask"] is None if "attn_mask" in call.kwargs else True


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    assert check(lambda: upper(dtype), *inputs(dtype))[0] == 1


def test_everything_is_seen():
    count, [call] = check(lambda: torch.ones(BATCH, 1, 5, TOKENS, dtype=torch.bool), *inputs(tokens=5))
    assert count == 1
    assert call.args[4] is False


OTHERS = {
    "a window": lambda: indexed(before=5),
    "two documents": lambda: indexed(packed=True),
    "the future only": lambda: ~triangle() | torch.eye(TOKENS, dtype=torch.bool),
    "a bias by distance": lambda: (positions() - positions()[:, None]).clamp(max=0).float()[None, None],
    "a finite number": lambda: added(triangle(), -100.0),
    "another mask for a sequence": lambda: torch.cat([triangle(), torch.ones_like(triangle())]),
    "another mask for a head": lambda: torch.cat([triangle()] * 5 + [torch.ones_like(triangle())], 1),
    "a hole": lambda: triangle() & (positions() != 3),
}


@pytest.mark.parametrize("name", OTHERS)
def test_near_misses(name):
    assert check(OTHERS[name], *inputs())[0] == 0


def test_an_input_has_a_say():
    lengths = torch.tensor([TOKENS, 9])
    assert check(lambda n: indexed() & (positions() < n[:, None, None, None]), *inputs(), lengths)[0] == 0


def test_random_mask():
    """Only that it is left alone: no two runs agree."""

    def function(q, k, v):
        return attention(q, k, v, torch.rand(1, 1, TOKENS, TOKENS) < 0.5)

    with torch.no_grad():
        run = traced(function, {"deepinfer.patterns": "all"})
        run(*inputs())
    assert "maskless_attention" not in swaps(run.report)


def test_large_masks_are_left_alone(monkeypatch):
    monkeypatch.setattr(masks, "MOST_ELEMENTS", TOKENS * TOKENS - 1)
    assert check(triangle, *inputs())[0] == 0


def test_dynamic_lengths_are_left_alone():
    def function(q, k, v):
        tokens = q.shape[2]
        at = torch.arange(tokens)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(at <= at[:, None])[None, None])

    with torch.no_grad():
        run = traced(function, {"deepinfer.patterns": "all"}, dynamic=True)
        for tokens in (7, 12):
            q, k, v = (torch.randn(1, 2, tokens, SIZE) for _ in range(3))
            torch.testing.assert_close(run(q, k, v), function(q, k, v))
    assert "maskless_attention" not in swaps(run.report)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("mask", ["triangle", "window", "given", "none"])
def test_on_cuda(monkeypatch, mask, shared):
    """Which kernel of torch is called for what, seen in a graph for a GPU that need not be there."""
    monkeypatch.setattr(jit, "available", lambda: True)
    monkeypatch.setattr(attention_patterns, "_params", lambda *arguments: arguments)
    for kernel in ("cudnn", "flash", "efficient"):
        monkeypatch.setattr(torch.backends.cuda, f"can_use_{kernel}_attention", lambda params: True)
    graphs = []
    rewrite = attention_patterns.in_place_of

    def note(attention, call):
        graphs.append(call)
        return rewrite(attention, call)

    monkeypatch.setattr(attention_grouped, "in_place_of", note)
    monkeypatch.setattr(attention_span, "in_place_of", note)
    count = HEADS // SHARED if shared else 1
    heads = SHARED if shared else HEADS

    def step(q, k, v, given):
        seen = {"triangle": indexed(), "window": indexed(before=5), "given": given, "none": None}[mask]
        if seen is not None and mask != "given":
            seen = added(seen, -torch.inf, torch.bfloat16).expand(BATCH, HEADS, -1, -1)
        op = torch.ops.aten._scaled_dot_product_cudnn_attention.default
        return op(q, repeat(k, count), repeat(v, count), seen, False)[0]

    q = torch.randn(BATCH, TOKENS, HEADS, SIZE).bfloat16().transpose(1, 2)
    k, v = (torch.randn(BATCH, heads, TOKENS, SIZE).bfloat16() for _ in range(2))
    done = traced_for_cuda(step, q, k, v, torch.zeros(BATCH, 1, TOKENS, TOKENS).bfloat16())
    expected = {
        "triangle": {"maskless_attention": 1},
        "window": {"maskless_attention": 1},
        "given": {"grouped_query_attention": 1} if shared else {},
        "none": {"maskless_attention": 1} if shared else {},
    }[mask]
    no_kernel = "the op has no cuda kernel"  # in a build of torch for CPUs
    assert done.swapped + Counter({name: done.declined[name, no_kernel] for name in expected}) == expected, done
    kernel = attention_patterns.FLASH_FORWARD if mask == "window" else attention_patterns.CUDNN
    assert [call.op for call in graphs[:1]] == [kernel] * len(expected)
