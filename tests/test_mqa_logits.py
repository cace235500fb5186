import math

import pytest
import torch
from checking import assert_bit_equal, layouts, opcheck
from products import relative_error

from torch_deepinfer import ops
from torch_deepinfer.reference import mqa_logits as reference


def codes(*size: int) -> torch.Tensor:
    return torch.randn(*size).to(torch.float8_e4m3fn)


def tolerance(device: str) -> float:
    return 1e-3 if device == "cuda" else 1e-6  # the matrix unit of a GPU keeps about 13 bits of its sums


def assert_logits(out: torch.Tensor, expected: torch.Tensor, device: str) -> None:
    out = out.cpu()
    seen = expected > -math.inf
    assert (out[~seen] == -math.inf).all()
    assert relative_error(out[seen], expected[seen]) < tolerance(device)


def random_rows(rows: int, tokens: int, heads: int, depth: int = 128) -> tuple[torch.Tensor, ...]:
    """The arguments of mqa_logits, with every kind of range: inside, empty, reversed, all."""
    begins, ends = (torch.randint(0, tokens + 1, (rows,)).int() for _ in range(2))
    begins[::3], ends[::3] = 0, tokens
    return codes(rows, heads, depth), codes(tokens, depth), torch.rand(tokens), torch.randn(rows, heads), begins, ends


SHAPES = [(1, 1, 64), (2, 128, 32), (5, 300, 64), (9, 129, 32), (33, 1000, 64), (3, 5000, 32)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mqa_logits(device, shape):
    given = random_rows(*shape)
    out = ops.mqa_logits(*(t.to(device) for t in given))
    assert out.dtype == torch.float32 and out.is_contiguous()
    assert_logits(out, reference.mqa_logits(*given), device)


@pytest.mark.parametrize("heads", [1, 8, 24, 64])
@pytest.mark.parametrize("depth", [32, 64, 128])
def test_other_sizes(device, heads, depth):
    given = random_rows(7, 150, heads, depth)
    assert_logits(ops.mqa_logits(*(t.to(device) for t in given)), reference.mqa_logits(*given), device)


def test_causal_rows_are_the_same_alone(device):
    q, k, k_scale, weights, _, _ = (t.to(device) for t in random_rows(40, 700, 64))
    begins, ends = torch.zeros(40).int().to(device), torch.arange(661, 701).int().to(device)
    whole = ops.mqa_logits(q, k, k_scale, weights, begins, ends)
    for _ in range(20):
        assert_bit_equal(ops.mqa_logits(q, k, k_scale, weights, begins, ends), whole)
    for rows in (slice(0, 1), slice(3, 17)):
        part = ops.mqa_logits(q[rows], k, k_scale, weights[rows], begins[rows], ends[rows])
        assert_bit_equal(part, whole[rows])


def test_nan_stays_with_its_token(device):
    given = random_rows(6, 200, 64)
    given[1].view(torch.uint8)[77, 5] = 0x7F
    q, k, k_scale, weights, begins, ends = (t.to(device) for t in given)
    out = ops.mqa_logits(q, k, k_scale, weights, torch.zeros_like(begins), torch.full_like(ends, 200))
    assert out[:, 77].isnan().all() and out.isnan().sum() == 6


def test_layouts(device):
    given = [t.to(device) for t in random_rows(6, 130, 64)]
    expected = ops.mqa_logits(*given)
    for i in range(4):
        flat = given[i].dim() == 1
        as_bytes = given[i].view(torch.uint8) if i < 2 else given[i]  # torch cannot fill float8 views
        for name, view in layouts(as_bytes[None] if flat else as_bytes).items():
            changed = list(given)
            changed[i] = (view[0] if flat else view).view(given[i].dtype)
            assert_bit_equal(ops.mqa_logits(*changed), expected, f"{i} {name}")


@pytest.mark.parametrize("shape", [(0, 5), (4, 0)], ids=str)
def test_empty(device, shape):
    given = random_rows(*shape, 64)
    assert ops.mqa_logits(*(t.to(device) for t in given)).shape == shape


# ---- pages -----------------------------------------------------------------------------------------------------------


def random_pages(
    batch: int, following: int, heads: int, page_size: int, longest: int, depth: int = 128
) -> tuple[torch.Tensor, ...]:
    """q, cache, weights, lengths, page_table: pages in any order, unused ones full of NaN, unused entries absurd."""
    per_row = -(-longest // page_size)
    pages = batch * per_row + 3
    cache = torch.full((pages, page_size * (depth + 4)), 0x7F, dtype=torch.uint8)
    lengths = torch.randint(0, longest + 1, (batch, 1)) + torch.arange(1 - following, 1)
    lengths = lengths.clamp(0, longest).int()
    lengths[0] = longest
    order = torch.randperm(pages)[: batch * per_row].view(batch, per_row)
    table = torch.full((batch, per_row + 1), 2147480000).int()
    for b in range(batch):
        for i in range(-(-int(lengths[b].max()) // page_size)):
            page = int(order[b, i])
            table[b, i] = page
            cache[page, : page_size * depth] = codes(page_size * depth).view(torch.uint8)
            cache[page, page_size * depth :] = torch.rand(page_size).view(torch.uint8)
    q, weights = codes(batch, following, heads, depth), torch.randn(batch * following, heads)
    return q, cache.view(pages, page_size, depth + 4), weights, lengths, table


@pytest.mark.parametrize("following", [1, 2, 3, 4])
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_paged_mqa_logits(device, following, heads, page_size):
    given = random_pages(5, following, heads, page_size, 333)
    out = ops.paged_mqa_logits(*(t.to(device) for t in given), 333)
    assert_logits(out, reference.paged_mqa_logits(*given, 333), device)


@pytest.mark.parametrize("page_size", [1, 24, 96])
def test_other_pages(device, page_size):
    given = random_pages(3, 2, 64, page_size, 200)
    assert_logits(
        ops.paged_mqa_logits(*(t.to(device) for t in given), 200), reference.paged_mqa_logits(*given, 200), device
    )


def test_pages_hold_what_mqa_logits_reads(device):
    q, cache, weights, lengths, table = random_pages(1, 2, 64, 64, 500)
    pages = cache.reshape(cache.shape[0], -1)[table[0, :8].long()]
    k = pages[:, : 64 * 128].reshape(-1, 128)[:500].view(torch.float8_e4m3fn)
    k_scale = pages[:, 64 * 128 :].contiguous().view(torch.float32).reshape(-1)[:500]
    given = (q[0], k, k_scale, weights, torch.zeros(2).int(), lengths[0])
    expected = ops.mqa_logits(*(t.to(device) for t in given))
    out = ops.paged_mqa_logits(*(t.to(device) for t in (q, cache, weights, lengths, table)), 500)
    assert_bit_equal(out, expected)


def test_bad_pages_and_lengths():
    q, cache, weights, lengths, table = random_pages(2, 1, 64, 64, 200)
    table[0, 1] = cache.shape[0]
    with pytest.raises(ValueError, match=rf"page_table must lie in \[0, {cache.shape[0]}\), got {cache.shape[0]}"):
        ops.paged_mqa_logits(q, cache, weights, lengths, table, 200)
    with pytest.raises(ValueError, match=r"lengths must lie in \[0, 150\], got 200"):
        ops.paged_mqa_logits(q, cache, weights, lengths, table, 150)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_bad_pages_on_a_gpu_poison_their_tokens():
    given = random_pages(2, 2, 64, 64, 300)
    expected = reference.paged_mqa_logits(*given, 300)
    given[4][0, 1], given[4][0, 3] = -1, given[1].shape[0]
    out = ops.paged_mqa_logits(*(t.cuda() for t in given), 300).cpu()
    bad = torch.zeros(300, dtype=torch.bool)
    bad[64:128] = bad[192:256] = True
    seen = expected[:2] > -math.inf
    assert out[:2][seen & bad].isnan().all() and not out[:2][seen & ~bad].isnan().any()
    assert relative_error(out[2:][expected[2:] > -math.inf], expected[2:][expected[2:] > -math.inf]) < 1e-3


def test_opcheck(device):
    opcheck(torch.ops.deepinfer.mqa_logits.default, tuple(t.to(device) for t in random_rows(5, 40, 32)))
    pages = tuple(t.to(device) for t in random_pages(3, 2, 32, 16, 50))
    opcheck(torch.ops.deepinfer.paged_mqa_logits.default, (*pages, 50))


ERRORS = [
    ({"q": torch.zeros(2, 64, 96).to(torch.float8_e4m3fn)}, "D must be 32, 64 or 128, got 96"),
    ({"q": torch.zeros(2, 64, 128)}, "q must be float8_e4m3fn, got float32"),
    ({"k": codes(10, 64)}, r"k must have shape \[10, 128\], got \[10, 64\]"),
    ({"k_scale": torch.rand(9)}, r"k_scale must have shape \[10\], got \[9\]"),
    ({"weights": torch.rand(2, 32)}, r"weights must have shape \[2, 64\], got \[2, 32\]"),
    ({"begins": torch.zeros(2)}, "begins must be int32, got float32"),
]


@pytest.mark.parametrize(("change", "message"), ERRORS, ids=[message[:20] for _, message in ERRORS])
def test_errors(change, message):
    names = ("q", "k", "k_scale", "weights", "begins", "ends")
    given = dict(zip(names, random_rows(2, 10, 64), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        ops.mqa_logits(**given)
    with pytest.raises(ValueError, match=message):
        ops.mqa_logits(**{k: v.to("meta") for k, v in given.items()})
