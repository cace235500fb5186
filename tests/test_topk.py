import math
from collections.abc import Callable

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from checking import assert_bit_equal, layouts, opcheck
from samples import SAMPLES
from torch._subclasses import FakeTensorMode

from torch_deepinfer import ops
from torch_deepinfer.reference import topk as reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
NEGATIVE_NAN = torch.tensor(-4194304, dtype=torch.int32).view(torch.float32).item()


def check(x: torch.Tensor, k: int, *args, **kwargs) -> None:
    """Equal to the reference, and the values the very bits of the elements."""
    expected = reference.topk(x.cpu(), k, *[a if a is None else a.cpu() for a in args], **kwargs)
    values, indices = ops.topk(x, k, *args, **kwargs)
    assert_bit_equal(indices, expected[1], f"indices, k {k}, {tuple(x.shape)} {kwargs}")
    assert_bit_equal(values, expected[0], f"values, k {k}, {tuple(x.shape)} {kwargs}")
    if not args and kwargs.get("return_values", True) and x.numel() > 0 and k <= x.shape[-1]:
        bits = BITS[x.dtype]  # gather of bfloat16 itself may change a NaN
        assert torch.equal(values.view(bits), x.view(bits).gather(-1, indices.long()))


def patterns(
    rows: int, size: int, dtype: torch.dtype, device: str = "cpu", kind: str | None = None
) -> dict[str, torch.Tensor]:
    """Rows of the kinds that break selections, of all or of one."""
    with torch.device(device):
        kinds = _patterns(rows, size, dtype)
        return {name: make() for name, make in kinds.items() if kind in (None, name)}


def _patterns(rows: int, size: int, dtype: torch.dtype) -> dict[str, Callable[[], torch.Tensor]]:
    noise = torch.randn(rows, size)
    tiny = torch.finfo(dtype).smallest_normal
    special = torch.tensor([math.nan, NEGATIVE_NAN, math.inf, -math.inf, 0.0, -0.0, 1.0, tiny / 2, -tiny / 2])
    rough = noise.clone()
    rough[torch.rand(rows, size) < 0.02] = NEGATIVE_NAN
    bits = torch.randint(-(2**31), 2**31, (rows, size)).to(torch.int32).view(torch.float32)
    return {
        "normal": lambda: noise.to(dtype),
        "shifted": lambda: (100 + noise / 100).to(dtype),
        "equal": lambda: torch.full((rows, size), 0.5, dtype=dtype),
        "one bit apart": lambda: (1 + torch.randint(0, 2, (rows, size)) * torch.finfo(dtype).eps).to(dtype),
        "few values": lambda: torch.randint(0, 5, (rows, size)).to(dtype),
        "special": lambda: special[torch.randint(0, len(special), (rows, size))].to(dtype),
        "all -inf": lambda: torch.full((rows, size), -math.inf, dtype=dtype),
        "all NaN": lambda: torch.full((rows, size), math.nan, dtype=dtype),
        "some NaN": lambda: rough.to(dtype),
        "denormals": lambda: (noise * tiny / 4).to(dtype),
        "any bits": lambda: bits.to(dtype),
        "ascending": lambda: torch.arange(size).float().expand(rows, size).to(dtype),
        "descending": lambda: -torch.arange(size).float().expand(rows, size).to(dtype),
    }


KINDS = list(_patterns(1, 1, torch.float32))


@pytest.mark.parametrize("order", [{}, {"sorted": True}, {"sorted_index": True, "index_dtype": torch.int64}])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 17, 600, 5000, 20001])
def test_matches_reference(device, dtype, size, order):
    for i, x in enumerate(patterns(3, size, dtype).values()):
        for k in (1, 512, size):
            if device != "npu" or size < 20000 or (i + k) % 4 == 0:  # the model of an NPU is slow
                check(x.to(device), k, **order)


# Some blocks or threads for each row, and k whose list fits and does not fit in shared memory.
@pytest.mark.parametrize("rows, size", [(1, 150001), (2, 70001), (5, 40000)])
@pytest.mark.parametrize("k", [50, 2133, 4096, 5000])
def test_few_long_rows(device, rows, size, k):
    kinds = list(patterns(rows, size, torch.bfloat16).values())
    for x in kinds[k % 4 :: 4] if device == "npu" else kinds:  # its model is slow
        check(x.to(device), k)
        check(x.float().to(device), k, sorted=True, index_dtype=torch.int64)


def test_many_rows(device):
    rows = 60 if device == "npu" else 600
    for size in (256, 1024, 4096, 9000):
        check(torch.randn(rows, size, device=device).bfloat16(), 512, return_values=False)
        check(torch.randn(rows, size, device=device), 50, sorted=True)


# sglang#31123: lengths that are negative, 0 or beyond the row.
@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_and_offsets(device, dtype):
    x = torch.randn(6, 64, device=device).to(dtype)
    x[:, 40] = math.nan  # beyond some of the lengths
    lengths = torch.tensor([-1, 0, 3, 41, 64, 2**31 - 1], dtype=torch.int32, device=device)
    offsets = torch.tensor([5, 1, 0, -7, 1000, 2**30], dtype=torch.int32, device=device)
    for order in ({}, {"sorted": True}, {"sorted_index": True}):
        for k in (1, 8, 64, 70):
            check(x, k, lengths, **order)
            check(x, k, lengths, offsets, **order, fill_index=2**31 - 1, fill_value=-3.0)
            check(x, k, None, offsets, **order, return_values=False)
    _, indices = ops.topk(x, 8, lengths)
    assert (indices[:2] == -1).all() and (indices[2] >= 0).sum() == 3 and (indices[2, :3] < 3).all()
    long = torch.randn(3, 100000, device=device).to(dtype)
    check(long, 300, torch.tensor([50001, 299, 100000], dtype=torch.int32, device=device), sorted=True)


# Automodel#3035: k larger than the row.
def test_k_beyond_the_row(device):
    x = torch.randn(3, 249, device=device)
    _, indices = ops.topk(x, 2048)
    assert indices.shape == (3, 2048) and (indices[:, 249:] == -1).all()
    assert torch.equal(indices[:, :249].cpu(), torch.arange(249, dtype=torch.int32).expand(3, 249))
    check(x, 6000, sorted=True)
    check(torch.empty(3, 0, device=device), 4)


# pytorch#190781, pytorch#117617: the sign of NaN; pytorch#127196: ties.
@pytest.mark.parametrize("size", [129, 500, 5000])
def test_nan_and_ties(device, size):
    x = torch.arange(float(size), device=device)
    x[3], x[5], x[7], x[9] = math.nan, NEGATIVE_NAN, math.inf, -math.inf
    values, indices = ops.topk(x, 5, sorted=True)
    assert indices.tolist() == [3, 5, 7, size - 1, size - 2] and values[:2].isnan().all()
    tied = torch.tensor([3, 2, 3, 2, 1, 1.0], device=device)
    assert ops.topk(tied, 2, sorted=True)[1].tolist() == [0, 2]
    assert ops.topk(tied, 3, sorted=True)[1].tolist() == [0, 2, 1]
    assert ops.topk(torch.tensor([-0.0, 0.0, -0.0], device=device), 2, sorted=True)[1].tolist() == [0, 1]


def test_page_table(device):
    x = torch.randn(3, 1000, device=device)
    table = torch.randperm(96, device=device)[:48].int().view(3, 16)
    table[1, 4] = -1
    lengths = torch.tensor([1000, 700, 5], dtype=torch.int32, device=device)
    offsets = torch.tensor([0, 7, 100000], dtype=torch.int32, device=device)
    for k in (16, 900):
        expected = reference.topk(x.cpu(), k, lengths.cpu(), offsets.cpu(), page_table=table.cpu(), page_size=64)
        actual = ops.topk(x, k, lengths, offsets, page_table=table, page_size=64)
        assert_bit_equal(actual[1], expected[1])
        assert_bit_equal(actual[0], expected[0])
    assert (actual[1][1, :700] == -1).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(device, dtype):
    x = torch.randn(4, 6, 300).to(dtype)
    expected = reference.topk(x, 20, sorted=True)
    for name, view in layouts(x).items():
        values, indices = ops.topk(view.to(device), 20, sorted=True)
        assert_bit_equal(values, expected[0], name)
        assert_bit_equal(indices, expected[1], name)
    # Rows that start anywhere in 16 bytes.
    storage = torch.randn(5 * 9001, device=device).to(dtype)
    for start in range(9):
        check(storage.as_strided((5, 8990), (9001, 1), start), 100)


def test_rows_are_independent(device):
    x = torch.randint(0, 50, (70, 20000), device=device).bfloat16()
    values, indices = ops.topk(x, 64, sorted=True)
    for row in (0, 33, 69):
        assert_bit_equal(ops.topk(x[row], 64, sorted=True)[1], indices[row])
    assert_bit_equal(ops.topk(x[:8], 64, sorted=True)[0], values[:8])


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    size=st.one_of(st.integers(0, 80), st.integers(1000, 4000)),
    k=st.integers(0, 700),
    levels=st.sampled_from([1, 2, 30, 10**6]),
    dtype=st.sampled_from(DTYPES),
    order=st.sampled_from([{}, {"sorted": True}, {"sorted_index": True}]),
    with_lengths=st.booleans(),
)
def test_any_shape(shape, size, k, levels, dtype, order, with_lengths):
    x = torch.randint(-levels, levels + 1, (*shape, size)).to(dtype)
    lengths = torch.randint(-2, size + 3, tuple(shape)).int() if with_lengths else None
    check(x, k, lengths, **order)


def one_case(most_elements: int, device: str) -> None:
    """A case out of the grid of shapes, k, data, lengths, offsets and results, against the reference."""

    def one_of(*values):
        return values[int(torch.randint(len(values), ()))]

    def between(low, high):
        return int(torch.randint(low, high + 1, ()))

    rows = one_of(1, between(1, 20), between(1, 100), 121, 512)
    sizes = [1, between(1, 300), 1602, between(1, 40000), 32768, 123245, 225467, 262144, 418673, 1048576]
    size = one_of(*[size for size in sizes if rows * size <= most_elements])
    k = min(one_of(1, between(1, 4096), 50, 512, 1024, 1231, 2048, 2333, 4096), 2 * size + 3)
    kind = one_of(*KINDS)
    before = one_of(0, 0, between(1, 9))
    x = patterns(rows, size + before, one_of(*DTYPES), device, kind)[kind][:, before:]
    lengths = torch.randint(-1, size + 2, (rows,), device=device).int() if one_of(0, 0, 1) else None
    offsets = torch.randint(-99, 10**6, (rows,), device=device).int() if one_of(0, 0, 1) else None
    order = one_of({}, {}, {"sorted": True}, {"sorted_index": True, "index_dtype": torch.int64})
    expected = reference.topk(x, k, lengths, offsets, **order)
    for actual, wanted in zip(ops.topk(x, k, lengths, offsets, **order), expected, strict=True):
        assert_bit_equal(actual, wanted, f"{tuple(x.shape)} {x.dtype} k {k}, {kind}, {before} before, {order}")


def test_some_cases(device):
    for _ in range(60):
        one_case(1 << 16, device)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_many_cases(device, part):
    torch.manual_seed(1000 + part)
    for _ in range(1000):
        one_case(1 << 18 if device == "cpu" else 1 << 24, device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_devices_agree():
    generator = torch.Generator().manual_seed(1)
    for _ in range(300):
        size = int(2 ** (torch.rand((), generator=generator) * 17))
        rows, k = (int(torch.randint(1, n, (), generator=generator)) for n in (9, 1500))
        for x in patterns(rows, size, DTYPES[rows % 3]).values():
            for actual, expected in zip(ops.topk(x.cuda(), k), ops.topk(x, k), strict=True):
                assert_bit_equal(actual, expected)


def test_opcheck(device):
    def to_device(value):
        return value.to(device) if isinstance(value, torch.Tensor) else value

    args, kwargs = SAMPLES["topk"]()
    opcheck(torch.ops.deepinfer.topk.default, tuple(map(to_device, args)), kwargs)
    table = torch.arange(40, dtype=torch.int32, device=device).view(4, 10)
    opcheck(torch.ops.deepinfer.topk.default, (to_device(args[0]), 3), {"page_table": table, "page_size": 4})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.zeros(2, 8, dtype=torch.float64)}, "x must be float32, bfloat16 or float16, got float64"),
        ({"x": torch.zeros(())}, "x must have at least one dimension"),
        ({"k": -1}, r"k must lie in \[0, 2\^31\), got -1"),
        ({"sorted": True, "sorted_index": True}, "sorted and sorted_index exclude each other"),
        ({"index_dtype": torch.int16}, "index_dtype must be int32 or int64, got int16"),
        ({"lengths": torch.zeros(2, dtype=torch.int64)}, "lengths must be int32, got int64"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, r"lengths must have the shape of x without its last .*\[3\]"),
        ({"offsets": torch.zeros(2, 8, dtype=torch.int32)}, "offsets must have the shape of x without its last"),
        ({"page_table": torch.zeros(2, 8, dtype=torch.int64)}, "page_table must be int32, got int64"),
        ({"page_table": torch.zeros(2, 3, dtype=torch.int32), "page_size": 2}, "page_table must have the leading"),
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
    ],
)
def test_errors(change, message):
    arguments = {"x": torch.zeros(2, 8), "k": 2} | change
    with pytest.raises(ValueError, match=f"topk: {message}"):
        ops.topk(**arguments)
    on_meta = {n: a.to("meta") if isinstance(a, torch.Tensor) else a for n, a in arguments.items()}
    with pytest.raises(ValueError, match=f"topk: {message}"):
        ops.topk(**on_meta)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("shape", [(2**31 // 65536 + 5, 65536), (2, 2**30 + 5)])
def test_more_than_2_to_31_elements(shape):
    x = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
    x[-1, -3:] = torch.tensor([100, 102, 101], dtype=torch.bfloat16)
    values, indices = ops.topk(x, 700)
    assert {shape[1] - 3, shape[1] - 2, shape[1] - 1} <= set(indices[-1].tolist())
    for row in (0, shape[0] - 1):
        for ours, theirs in zip((values, indices), ops.topk(x[row : row + 1].clone(), 700), strict=True):
            assert_bit_equal(ours[row : row + 1], theirs)


def test_too_many_sorted_results_for_a_gpu():
    with FakeTensorMode(), pytest.raises(ValueError, match=r"k must not exceed 2\^30 for sorted results on a GPU"):
        ops.topk(torch.empty(1, 2**31 - 1, device="cuda"), 2**30 + 1, sorted=True)
