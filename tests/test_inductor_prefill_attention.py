"""Attention of many tokens: what goes to our own kernel and what does not, on a GPU that need not be there."""

import pytest
import test_inductor_masks
import test_inductor_mutants
import torch
from graphs import swaps, traced
from test_inductor_attention import repeat
from test_inductor_masks import added
from test_inductor_moe import traced_for_cuda

from torch_deepinfer import jit
from torch_deepinfer.inductor.patterns import attention_prefill

aten = torch.ops.aten
BATCH, HEADS, TOKENS = 2, 4, attention_prefill.LEAST_TOKENS


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(jit, "available", lambda: True)
    monkeypatch.setattr(attention_prefill, "_is_hopper", lambda: True)


def triangle(tokens=TOKENS):
    at = torch.arange(tokens)
    return (at <= at[:, None])[None, None]


def heads(size, count=HEADS, tokens=TOKENS, dtype=torch.bfloat16):
    return torch.randn(BATCH, tokens, count, size).to(dtype)


def merged(out):
    return out.transpose(1, 2).flatten(2)


def swapped(q, k, v, causal=True, mask=None, kernel="cudnn", by_head=False, then=merged, **options):
    """Whether the attention of these is swapped.

    ``mask`` makes one in the graph, ``then`` goes on with the result; ``by_head``: the query is copied before, so that
    the tokens of a head stand side by side.
    """
    op = getattr(aten, f"_scaled_dot_product_{kernel}_attention").default
    count = q.shape[2] // k.shape[2]

    def step(q, k, v):
        q, k, v = (given.transpose(1, 2) for given in (q, k, v))
        q, k, v = q.contiguous() if by_head else q, repeat(k, count), repeat(v, count)
        if kernel == "flash":
            return then(op(q, k, v, 0.0, causal, **options)[0])
        bias = None if mask is None else added(mask(), -torch.inf, q.dtype).expand(BATCH, HEADS, -1, -1)
        return then(op(q, k, v, bias, False, 0.0, causal, **options)[0])

    return traced_for_cuda(step, q, k, v).swapped["prefill_attention"] == 1


@pytest.mark.parametrize("size, of_values", attention_prefill.HEADS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
def test_sizes(size, of_values, dtype, causal):
    assert swapped(heads(size, dtype=dtype), heads(size, dtype=dtype), heads(of_values, dtype=dtype), causal)


@pytest.mark.parametrize("kernel", ["cudnn", "flash", "efficient"])
@pytest.mark.parametrize("shared", [1, 2, 4])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_kernels_of_torch(kernel, shared, scale):
    assert swapped(heads(128), heads(128, shared), heads(128, shared), kernel=kernel, scale=scale)


def test_mask_of_the_model():
    assert swapped(heads(128), heads(128, 2), heads(128, 2), causal=False, mask=triangle)


def test_result_that_is_copied():
    """Of queries with the tokens of a head side by side: the copy with the heads of a token side by side goes too."""
    given = heads(192), heads(192), heads(128)
    assert swapped(*given, by_head=True)
    assert swapped(*given, by_head=True, then=lambda out: out.transpose(1, 2).contiguous() + 1)
    assert not swapped(*given, by_head=True, then=lambda out: out + 1)
    assert not swapped(*given, by_head=True, then=lambda out: (merged(out), out + 1))


OTHERS = {
    "small heads": lambda: swapped(heads(32), heads(32), heads(32)),
    "large heads": lambda: swapped(heads(256), heads(256), heads(256)),
    "other heads of values": lambda: swapped(heads(128), heads(128), heads(64)),
    "few tokens": lambda: swapped(*(heads(128, tokens=TOKENS - 1) for _ in range(3))),
    "causal, fewer keys": lambda: swapped(heads(128), *(heads(128, tokens=TOKENS - 8) for _ in range(2))),
    "window": lambda: swapped(
        *(heads(128) for _ in range(3)), False, lambda: triangle() & ~triangle().transpose(2, 3).roll(-9, 3)
    ),
    "scale of zero": lambda: swapped(*(heads(128) for _ in range(3)), scale=0.0),
}


@pytest.mark.parametrize("name", OTHERS)
def test_near_misses(name):
    assert not OTHERS[name]()


def test_other_devices(monkeypatch):
    monkeypatch.setattr(attention_prefill, "_is_hopper", lambda: False)
    assert not swapped(*(heads(128) for _ in range(3)))


@pytest.fixture
def anywhere(monkeypatch, one_thread):
    """The pattern on a CPU, whose kernel computes the same."""
    monkeypatch.setattr(attention_prefill, "_takes", lambda attention: True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("name", test_inductor_masks.KNOWN)
def test_values(anywhere, name, by_head, dtype):
    def function(q, k, v):
        q = q.contiguous() if by_head else q
        mask = test_inductor_masks.KNOWN[name]()
        return merged(test_inductor_masks.attention(q, k, v, mask if mask.dtype == torch.bool else mask.to(dtype)))

    given = test_inductor_masks.inputs(dtype)
    with torch.no_grad():
        run = traced(function, {"deepinfer.patterns": "all"})
        ours, eager = run(*given), function(*given)
    assert swaps(run.report) == {"prefill_attention": 1}
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, eager, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["attention", "masked attention"])
def test_mutants(anywhere, name):
    test_inductor_mutants.test_mutants_keep_their_values(name)
