"""Attention of one token whose heads share keys: spellings, near misses, and what comes of it in whole graphs."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import swaps, traced
from test_inductor_moe import traced_for_cuda
from torch.fx import Graph

from torch_deepinfer import jit

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BATCH, HEADS, SHARED, POSITIONS, SIZE = 2, 6, 2, 40, 16
FUSED = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default}


def repeat(x: torch.Tensor, count: int) -> torch.Tensor:
    """As transformers repeats keys."""
    if count == 1:
        return x
    batch, heads, positions, size = x.shape
    return x[:, :, None].expand(batch, heads, count, positions, size).reshape(batch, heads * count, positions, size)


def interleave(x: torch.Tensor, count: int) -> torch.Tensor:
    return torch.repeat_interleave(x, count, dim=1)


def attention(q, k, v, mask=None, repeat=repeat, **options):
    count = q.shape[1] // k.shape[1]
    return F.scaled_dot_product_attention(q, repeat(k, count), repeat(v, count), attn_mask=mask, **options)


def inputs(dtype=torch.float32, tokens=1, heads=HEADS, mask_shape=(BATCH, 1, 1, POSITIONS)) -> tuple[torch.Tensor, ...]:
    q = torch.randn(BATCH, tokens, heads, SIZE).to(dtype).transpose(1, 2)
    k, v = (torch.randn(BATCH, SHARED, POSITIONS, SIZE).to(dtype) for _ in range(2))
    visible = torch.rand(mask_shape) < 0.7
    visible[..., 0] = True
    return q, k, v, visible


def check(function, *arguments) -> int:
    """How often it was swapped; the results are those of eager."""
    with torch.no_grad():
        run = traced(function, {"deepinfer.patterns": "all"})
        ours, eager = run(*arguments), function(*arguments)
    tolerance = 1e-5 if eager.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, eager, rtol=tolerance, atol=tolerance)
    strides = [[s for s, size in zip(t.stride(), t.shape, strict=True) if size > 1] for t in (ours, eager)]
    assert strides[0] == strides[1]
    return swaps(run.report).get("packed_attention", 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", [repeat, interleave])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_spellings(dtype, how, scale):
    q, k, v, visible = inputs(dtype)
    added = torch.where(visible, 0.0, -torch.inf).to(dtype)
    for mask in (None, visible, added):
        assert check(lambda q, k, v, m: attention(q, k, v, m, how, scale=scale), q, k, v, mask) == 1
    assert check(lambda q, k, v, m: attention(q, k, v, m.expand(-1, HEADS, -1, -1), how), q, k, v, added) == 1


@pytest.mark.parametrize("mask_shape", [(1, 1, 1, POSITIONS), (BATCH, 1, 1, POSITIONS)])
def test_masks(mask_shape):
    assert check(attention, *inputs(mask_shape=mask_shape)) == 1


def test_one_head_of_keys():
    q, k, v, visible = inputs()
    assert check(attention, q, k[:, :1].contiguous(), v[:, :1].contiguous(), visible) == 1


def test_dynamic_shapes():
    q, k, v, visible = inputs()
    for tensor, dims in ((q, [0]), (k, [0, 2]), (v, [0, 2]), (visible, [0, 3])):
        for dim in dims:
            torch._dynamo.mark_dynamic(tensor, dim)
    assert check(attention, q, k, v, visible) == 1
    sliced = lambda x, count: repeat(x[:, :, :], count)  # noqa: E731
    assert check(lambda q, k, v, m: attention(q, k, v, m, sliced), q, k, v, visible) == 1


def test_cache_that_is_written_and_kept():
    """A static cache: the new key goes into a buffer, which stays in use."""

    def step(q, k, v, visible, new, position):
        k = k.index_copy(2, position, new)
        return attention(q, k, v, visible) + k.sum()

    q, k, v, visible = inputs()
    assert check(step, q, k, v, visible, torch.randn(BATCH, SHARED, 1, SIZE), torch.tensor([5])) == 1


def other_values(q, k, v, m):
    count = HEADS // SHARED
    return F.scaled_dot_product_attention(q, repeat(k, count), repeat(v, count).flip(1), attn_mask=m)


def tiled(q, k, v, m):
    """Heads in another order: head i reads keys i % SHARED."""
    count = HEADS // SHARED
    return F.scaled_dot_product_attention(q, k.repeat(1, count, 1, 1), v.repeat(1, count, 1, 1), attn_mask=m)


NEAR_MISSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "several tokens": (attention, {"tokens": 3, "mask_shape": (BATCH, 1, 3, POSITIONS)}),
    "a mask for each head": (attention, {"mask_shape": (BATCH, HEADS, 1, POSITIONS)}),
    "a head of keys for each head": (attention, {"heads": SHARED}),
    "other values": (other_values, {}),
    "heads in another order": (tiled, {}),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    function, change = NEAR_MISSES[name]
    assert check(function, *inputs(**change)) == 0


def test_causal_attention_of_one_token():
    """It sees the first position only."""
    q, k, v, _ = inputs()
    assert check(lambda q, k, v: attention(q, k, v, is_causal=True), q, k, v) == 0


def test_repeated_keys_in_use_elsewhere():
    q, k, v, visible = inputs()

    def step(q, k, v, visible):
        keys, values = repeat(k, 3), repeat(v, 3)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=visible) + keys.sum()

    assert check(step, q, k, v, visible) == 1


def calls_of(graph: Graph) -> list[Any]:
    return [node for node in graph.nodes if node.target in FUSED]


def test_keys_reach_the_kernel_as_they_are():
    q, k, v, visible = inputs()
    with torch.no_grad():
        run = traced(attention, {"deepinfer.patterns": ["packed_attention"]})
        run(q, k, v, visible)
    [call] = calls_of(run.graphs[0])
    shapes = [tuple(argument.meta["val"].shape) for argument in call.args[:3]]
    keys = (BATCH, SHARED, POSITIONS, SIZE)
    assert shapes == [(BATCH, SHARED, HEADS // SHARED, SIZE), keys, keys]
    assert all(argument.op == "placeholder" for argument in call.args[1:3])


@pytest.mark.parametrize("kernel", ["efficient", "cudnn"])
@pytest.mark.parametrize("masked", [False, True])
def test_kernels_of_cuda(monkeypatch, kernel, masked):
    monkeypatch.setattr(jit, "available", lambda: True)
    op = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention").default

    def step(q, k, v, mask):
        return op(q, repeat(k, HEADS // SHARED), repeat(v, HEADS // SHARED), mask if masked else None, False)[0]

    q, k, v, visible = inputs()  # in 16 bits it goes to our own kernel
    mask = torch.zeros(visible.shape, dtype=q.dtype)
    done = traced_for_cuda(step, q, k, v, mask)
    no_kernel = "the op has no cuda kernel"  # in a build of torch for CPUs
    assert done.swapped["packed_attention"] + done.declined["packed_attention", no_kernel] == 1, done
