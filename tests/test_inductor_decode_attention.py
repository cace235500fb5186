"""Attention of few tokens: what goes to our own kernel and with which mask, on a GPU that need not be there."""

import pytest
import torch
from graphs import swaps, traced
from test_inductor_attention import repeat
from test_inductor_moe import traced_for_cuda

from torch_deepinfer import jit
from torch_deepinfer.inductor import rewrite
from torch_deepinfer.inductor.patterns import attention_decode
from torch_deepinfer.inductor.patterns.attention_decode import MOST_SHARED_KEYS, MOST_TOKENS

aten = torch.ops.aten
BATCH, HEADS, POSITIONS = 2, 8, 100


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    monkeypatch.setattr(jit, "available", lambda: True)
    monkeypatch.setattr(attention_decode, "_has_fast_kernel", lambda: True)


@pytest.fixture
def matches(monkeypatch):
    """What is swapped in."""
    found, swap = [], rewrite._swap
    monkeypatch.setattr(rewrite, "_swap", lambda graph, match: found.append(match) or swap(graph, match))
    return found


def inputs(tokens=1, shared=HEADS, size=64, of_values=64, dtype=torch.bfloat16, heads=HEADS, positions=POSITIONS):
    q = torch.randn(BATCH, tokens, heads, size).to(dtype)
    return q, *(torch.randn(BATCH, shared, positions, of).to(dtype) for of in (size, of_values))


def visible(*sizes: int) -> torch.Tensor:
    return torch.rand(sizes) < 0.7


def as_added(mask, dtype, lowest=-torch.inf):
    zero, hidden = torch.zeros((), dtype=dtype), torch.full((), lowest, dtype=dtype)
    return torch.where(mask, zero, hidden)


def padded(mask):
    """As torch aligns a mask for the memory-efficient kernel."""
    columns = mask.shape[-1]
    return torch.nn.functional.pad(mask, (0, 16 - columns % 16))[..., :columns]


def swapped(q, k, v, mask=None, spell=None, kernel="cudnn", causal=False, dropout=0.0):
    """How often attention is swapped; ``spell`` makes what is added to the scores of ``mask``."""
    op = getattr(aten, f"_scaled_dot_product_{kernel}_attention").default

    def step(q, k, v, mask):
        q, count = q.transpose(1, 2), q.shape[2] // k.shape[1]
        bias = mask if spell is None else spell(mask)
        return op(q, repeat(k, count), repeat(v, count), bias, False, dropout, causal)[0].transpose(1, 2).flatten(2)

    if mask is None:
        return traced_for_cuda(lambda q, k, v: step(q, k, v, None), q, k, v).swapped["decode_attention"]
    return traced_for_cuda(step, q, k, v, mask).swapped["decode_attention"]


SPELLINGS = {
    "as torch has it for cuDNN": lambda m: as_added(m.expand(BATCH, -1, -1, -1), torch.bfloat16, -65536.0),
    "expanded": lambda m: as_added(m, torch.bfloat16).expand(BATCH, HEADS, 1, POSITIONS),
    "aligned": lambda m: padded(as_added(m, torch.bfloat16)).expand(BATCH, HEADS, 1, POSITIONS),
    "the least number": lambda m: as_added(m, torch.bfloat16, torch.finfo(torch.bfloat16).min),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("kernel", ["cudnn", "efficient"])
@pytest.mark.parametrize("shared", [1, 2, HEADS])
def test_the_mask_as_it_was_made(matches, spelling, kernel, shared):
    assert swapped(*inputs(shared=shared), visible(BATCH, 1, 1, POSITIONS), SPELLINGS[spelling], kernel) == 1
    (match,) = matches
    assert [given.op for given in match.args[1:3]] == ["placeholder"] * 2  # keys and values as they are
    assert match.args[3].meta["val"].dtype == torch.bool
    assert match.args[3].meta["val"].numel() == BATCH * POSITIONS


def test_a_mask_that_is_added(matches):
    bias = torch.randn(BATCH, 1, 1, POSITIONS).bfloat16()
    assert swapped(*inputs(), bias, lambda m: padded(m).expand(-1, HEADS, -1, -1)) == 1
    assert swapped(*inputs(), visible(BATCH, 1, 1, POSITIONS), lambda m: as_added(m, torch.bfloat16, -100.0)) == 1
    assert [match.args[3].op for match in matches] == ["placeholder", "call_function"]


def test_padding_that_stays(matches):
    """In front, or cut off elsewhere: other columns than before."""
    for spell in (
        lambda m: torch.nn.functional.pad(m, (4, 0))[..., :POSITIONS],
        lambda m: torch.nn.functional.pad(m, (0, 4))[..., 4:],
    ):
        assert swapped(*inputs(), torch.randn(BATCH, HEADS, 1, POSITIONS).bfloat16(), spell) == 1
    assert all(match.args[3].op == "call_function" for match in matches)


@pytest.mark.parametrize("tokens", [1, 2, MOST_TOKENS])
def test_tokens(tokens):
    mask = torch.zeros(BATCH, 1, tokens, POSITIONS).bfloat16()
    assert swapped(*inputs(tokens, 2), mask, lambda m: m.expand(-1, HEADS, -1, -1)) == 1
    assert swapped(*inputs(tokens)) == swapped(*inputs(tokens), causal=True) == 1


def test_heads_of_latent_attention():
    assert swapped(*inputs(size=192, of_values=128), visible(1, 1, 1, POSITIONS), lambda m: as_added(m, torch.bfloat16))


def test_what_is_left_alone():
    assert not swapped(*inputs(MOST_TOKENS + 1))
    assert not swapped(*inputs(dtype=torch.float32), kernel="efficient")
    assert not swapped(*inputs(5, shared=1, heads=16))  # of 80 queries that share keys
    assert not swapped(*inputs(), dropout=0.1)
    assert not swapped(*inputs(size=60, of_values=60))  # sizes that the op does not take


def test_many_keys():
    most = MOST_SHARED_KEYS // BATCH // 2
    assert swapped(*inputs(shared=2, positions=most, size=8, of_values=8))
    assert not swapped(*inputs(shared=2, positions=most + 1, size=8, of_values=8))
    assert swapped(*inputs(positions=most, size=8, of_values=8))


def test_not_on_a_cpu():
    q, k, v = inputs()
    with torch.no_grad():
        run = traced(torch.nn.functional.scaled_dot_product_attention, {"deepinfer.patterns": "all"})
        run(q.transpose(1, 2), k, v)
    assert "decode_attention" not in swaps(run.report)
