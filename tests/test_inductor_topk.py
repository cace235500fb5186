import pytest
import torch
from graphs import swaps, traced

ALL = {"deepinfer.patterns": "all"}


@torch.no_grad()
def found(function, x: torch.Tensor) -> dict[str, int]:
    """Compiles, compares with eager, and says what was swapped. There must be no equal elements in ``x``."""
    compiled = traced(function, ALL)
    for mine, theirs in zip(compiled(x), function(x), strict=True):
        assert mine.dtype == theirs.dtype and mine.stride() == theirs.stride()
        assert torch.equal(mine, theirs)
    return swaps(compiled.report)


def distinct(*shape: int) -> torch.Tensor:
    return torch.randperm(torch.Size(shape).numel()).float().view(shape)


@pytest.mark.parametrize(
    "spelling",
    [
        lambda x: torch.topk(x, 50),
        lambda x: x.topk(50, dim=-1, sorted=True),
        lambda x: x.topk(7, dim=1),
        lambda x: (x.topk(50).values,),
        lambda x: (x.topk(50)[1] + 1,),
        lambda x: (x * 2).topk(1),
    ],
)
def test_long_rows(spelling):
    assert found(spelling, distinct(3, 20000)) == {"topk": 1}
    assert found(spelling, distinct(3, 40000)[:, ::2]) == {"topk": 1}


def test_one_row():
    assert found(lambda x: x.topk(3), distinct(9000)) == {"topk": 1}


@pytest.mark.parametrize(
    "near_miss",
    [
        lambda x: x.topk(50, largest=False),
        lambda x: x.topk(2, dim=0),
        lambda x: x[:, :5000].topk(50),
        lambda x: x.double().topk(50),
        lambda x: x.int().topk(50),
    ],
)
def test_near_misses(near_miss):
    assert found(near_miss, distinct(3, 20000)) == {}


def test_equal_elements_are_valid_choices():
    x = torch.randint(0, 9, (4, 10000)).float()
    values, indices = traced(lambda x: x.topk(300), ALL)(x)
    assert torch.equal(values, x.topk(300).values) and torch.equal(x.gather(1, indices), values)
    assert all(len(row.unique()) == 300 for row in indices)
