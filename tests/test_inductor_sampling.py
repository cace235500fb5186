import math

import pytest
import torch
from graphs import swaps, traced

ALL = {"deepinfer.patterns": ["draw"]}


def greatest(x: torch.Tensor, k: int) -> torch.Tensor:
    return x.masked_fill(x < torch.topk(x, k)[0][..., -1, None], -math.inf)


def nucleus(x: torch.Tensor, p: float, least: int = 1, dim: int = -1) -> torch.Tensor:
    """As transformers has it."""
    values, order = torch.sort(x, descending=False, dim=dim)
    removed = values.softmax(dim=dim).cumsum(dim=dim) <= (1 - p)
    removed[..., -least:] = 0
    return x.masked_fill(removed.scatter(1, order, removed), -math.inf)


def drawn(probs: torch.Tensor, keepdim: bool = False) -> torch.Tensor:
    """As gpt-fast has it."""
    return torch.argmax(probs / torch.empty_like(probs).exponential_(1), dim=-1, keepdim=keepdim)


def with_where(x: torch.Tensor, k: int) -> torch.Tensor:
    values, _ = torch.topk(x, k)
    return torch.where(x < values.select(-1, -1).unsqueeze(-1), -float("Inf"), x)


@torch.no_grad()
def found(function, x: torch.Tensor) -> dict[str, int]:
    compiled, expected = traced(function, ALL), function(x)
    result = compiled(x)
    assert result.dtype == expected.dtype and result.shape == expected.shape
    assert ((result >= 0) & (result < x.shape[-1])).all()
    return swaps(compiled.report)


SPELLINGS = {
    "softmax, multinomial": lambda x: torch.multinomial(x.softmax(-1), 1),
    "squeezed": lambda x: torch.multinomial(torch.nn.functional.softmax(x, dim=-1), num_samples=1).squeeze(1),
    "exponential": lambda x: drawn(x.softmax(-1)),
    "kept dimension, int": lambda x: drawn(x.softmax(-1), keepdim=True).to(torch.int),
    "temperature": lambda x: torch.multinomial((x / 0.7).softmax(-1), 1),
    "top-k": lambda x: torch.multinomial(greatest(x, 5).softmax(-1), 1),
    "top-k as a slice": lambda x: drawn(x.masked_fill(x < x.topk(5).values[:, -1:], -math.inf).softmax(-1)),
    "gpt-fast": lambda x: drawn(with_where(x / 0.8, 5).softmax(dim=-1), keepdim=True).to(dtype=torch.int),
    "temperature after top-k": lambda x: drawn((greatest(x, 5) / 0.7).softmax(-1)),
    "top-p": lambda x: torch.multinomial(nucleus(x, 0.8).softmax(-1), 1),
    "transformers": lambda x: torch.multinomial(nucleus(greatest(x / 0.7, 9), 0.8).softmax(-1), 1).squeeze(1),
    "cast": lambda x: torch.multinomial(nucleus(greatest(x.bfloat16().float(), 9), 0.8).softmax(-1), 1),
}


def frequencies(function, row: torch.Tensor, draws: int) -> torch.Tensor:
    ids = function(row.expand(draws, -1)).flatten()
    return torch.bincount(ids, minlength=len(row)).double() / draws


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name):
    assert found(SPELLINGS[name], torch.randn(3, 40)) == {"draw": 1}


# Whole numbers tie: transformers and gpt-fast keep all elements that equal the k-th.
@torch.no_grad()
@pytest.mark.parametrize("name", SPELLINGS)
def test_same_distribution(name):
    torch.manual_seed(5)
    draws, row = 40000, (2 * torch.randn(24)).round()
    ours = frequencies(traced(SPELLINGS[name], ALL), row, draws)
    theirs = frequencies(SPELLINGS[name], row, draws)
    possible = (ours + theirs) > 0
    difference = (ours - theirs)[possible] ** 2 / (ours + theirs)[possible]
    chi_square, freedom = draws * difference.sum().item(), int(possible.sum()) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 8, f"{chi_square} of {freedom}"


@pytest.mark.parametrize(
    "near_miss",
    [
        lambda x: torch.multinomial(x.softmax(-1), 2),
        lambda x: torch.multinomial(x.abs(), 1),
        lambda x: torch.multinomial(x.double().softmax(-1), 1),
        lambda x: torch.multinomial(x.softmax(0), 1),
        lambda x: (x.softmax(-1) / x.exp()).argmax(-1),
        lambda x: (x.softmax(-1) / torch.empty_like(x).exponential_(2)).argmax(-1),
        lambda x: (x.softmax(-1) / torch.empty_like(x).exponential_(1)).argmin(-1),
        lambda x: (x.softmax(-1) / torch.empty_like(x).exponential_(1)).argmax(0),
        lambda x: (x.softmax(-1) * torch.empty_like(x).exponential_(1)).argmax(-1),
        lambda x: (x.softmax(-1) / torch.rand_like(x)).argmax(-1),
    ],
)
def test_near_misses(near_miss):
    with torch.no_grad():
        compiled = traced(near_miss, ALL)
        compiled(torch.randn(40, 40))
    assert swaps(compiled.report) == {}


# What the op does not express stays in front of it.
@torch.no_grad()
@pytest.mark.parametrize(
    "function, possible",
    [
        (lambda x: greatest(nucleus(x, 0.5), 3), None),
        (lambda x: nucleus(x, 0.3, least=3), 3),
        (lambda x: x.masked_fill(x <= x.topk(4).values[:, -1:], -math.inf), 3),
        (lambda x: x.masked_fill(x < x.topk(3, largest=False).values[:, -1:], -math.inf), None),
        (lambda x: nucleus(x, 0.5) / 2.0, None),
    ],
)
def test_other_filters(function, possible):
    row = torch.randn(30)
    compiled = traced(lambda x: drawn(function(x).softmax(-1)), ALL)
    ours = frequencies(compiled, row, 20000)
    assert swaps(compiled.report) == {"draw": 1}
    probs = function(row[None]).softmax(-1)[0].double()
    assert (ours[probs == 0] == 0).all()
    assert (ours - probs).abs().max() < 0.02
    if possible is not None:
        assert int((ours > 0).sum()) <= possible


def test_of_transformers():
    transformers = pytest.importorskip("transformers")
    processors = transformers.LogitsProcessorList(
        [
            transformers.TemperatureLogitsWarper(0.6),
            transformers.TopKLogitsWarper(top_k=20),
            transformers.TopPLogitsWarper(top_p=0.95),
        ]
    )

    def step(logits: torch.Tensor) -> torch.Tensor:
        scores = processors(None, logits.to(torch.float32))
        return torch.multinomial(torch.nn.functional.softmax(scores, dim=-1), num_samples=1).squeeze(1)

    with torch.no_grad():
        compiled = traced(step, ALL)
        ids = compiled(torch.randn(4, 300).bfloat16())
    assert ids.shape == (4,) and swaps(compiled.report) == {"draw": 1}


def test_generator():
    """The draws follow torch's seed."""
    x = torch.zeros(64, 1000)
    with torch.no_grad():
        compiled = traced(SPELLINGS["softmax, multinomial"], ALL)
        results = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            results.append(compiled(x))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
