import pytest
import torch
from checking import assert_bit_equal, layouts, opcheck
from products import DTYPES, relative_error, rounding

from torch_deepinfer import ops
from torch_deepinfer.reference import gemm as reference

SHAPES = [(1, 1, 1, 1), (3, 5, 24, 40), (4, 16, 128, 512), (2, 130, 200, 72), (5, 300, 64, 136), (1, 33, 576, 64)]


def random_batch(shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    batch, m, n, k = shape
    return torch.randn(batch, m, k).to(dtype), torch.randn(batch, k, n).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("widened", [False, True])
@pytest.mark.parametrize("rows_first", [False, True])
def test_bmm(device, dtype, shape, widened, rows_first):
    a, b = random_batch(shape, dtype)
    options = {"out_dtype": torch.float32 if widened else None, "rows_first": rows_first}
    out = ops.bmm(a.to(device), b.to(device), **options)
    expected = reference.bmm(a, b, **options)
    assert out.dtype == expected.dtype and out.shape == expected.shape and out.is_contiguous()
    exact = a.double() @ b.double()
    assert relative_error(out, exact.transpose(0, 1) if rows_first else exact) < 2 * rounding(out.dtype)


@pytest.mark.parametrize("tokens", [1, 4, 70])
def test_absorbed_mla(device, tokens):
    heads, rank, width = 6, 512, 128
    x = torch.randn(tokens, heads, rank + 64).bfloat16()[:, :, :rank]
    weight = torch.randn(heads, width, rank).bfloat16()
    out = ops.bmm(x.to(device).transpose(0, 1), weight.to(device).transpose(1, 2), rows_first=True)
    assert relative_error(out, torch.einsum("bhr,hdr->bhd", x.double(), weight.double())) < 2 * rounding(out.dtype)
    back = ops.bmm(out.transpose(0, 1), weight.to(device), rows_first=True)
    exact = torch.einsum("bhd,hdr->bhr", out.double().cpu(), weight.double())
    assert relative_error(back, exact) < 2 * rounding(out.dtype)


def test_each_matrix_is_a_product_of_its_own(device):
    a, b = (t.to(device) for t in random_batch((4, 40, 72, 96), torch.bfloat16))
    whole = ops.bmm(a, b)
    for _ in range(20):
        assert_bit_equal(ops.bmm(a, b), whole)
    assert_bit_equal(ops.bmm(a[2:3], b[2:3]), whole[2:3])
    assert_bit_equal(ops.bmm(a, b, rows_first=True), whole.transpose(0, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [3, 140])
def test_layouts(device, dtype, rows):
    a, b = random_batch((3, rows, 48, 80), dtype)
    exact = a.double() @ b.double()
    for name, view in layouts(a).items():
        assert relative_error(ops.bmm(view.to(device), b.to(device)), exact) < 2 * rounding(dtype), name
    for name, view in layouts(b).items():
        assert relative_error(ops.bmm(a.to(device), view.to(device)), exact) < 2 * rounding(dtype), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [3, 140])
def test_result_in_any_layout(device, dtype, rows):
    a, b = (t.to(device) for t in random_batch((3, rows, 48, 80), dtype))
    expected = ops.bmm(a, b)
    for name, out in layouts(torch.zeros(expected.shape).to(dtype)).items():
        storage = torch.full((out.untyped_storage().nbytes() // out.element_size(),), 99.0).to(device, dtype)
        view = storage.as_strided(out.shape, out.stride(), out.storage_offset())
        before = storage.clone()
        ops.bmm_(view, a, b)
        assert_bit_equal(view, expected, name)
        view.fill_(1)
        before.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(1)
        assert_bit_equal(storage, before, name)


@pytest.mark.parametrize("shape", [(0, 3, 4, 5), (3, 0, 4, 5), (3, 4, 0, 5), (3, 4, 5, 0)], ids=str)
def test_empty(device, shape):
    a, b = (t.to(device) for t in random_batch(shape, torch.bfloat16))
    assert_bit_equal(ops.bmm(a, b), torch.zeros(shape[:3], dtype=torch.bfloat16))


def test_opcheck(device):
    a, b = (t.to(device) for t in random_batch((2, 5, 16, 24), torch.bfloat16))
    opcheck(torch.ops.deepinfer.bmm.default, (a, b), {"rows_first": True})
    opcheck(torch.ops.deepinfer.bmm_.default, (torch.empty(2, 5, 16, device=device), a, b))


ERRORS = [
    ({"a": torch.zeros(3, 4)}, r"a must have shape \[B, M, K\], got \[3, 4\]"),
    ({"b": torch.zeros(2, 5, 6)}, r"b must have shape \[3, 5, N\], got \[2, 5, 6\]"),
    ({"b": torch.zeros(3, 5, 6).half()}, "b must have the dtype of a, float32, got float16"),
    ({"out_dtype": torch.bfloat16}, "the dtype of the result must be float32 or that of a, float32, got bfloat16"),
]


@pytest.mark.parametrize(("change", "message"), ERRORS, ids=[message[:20] for _, message in ERRORS])
def test_errors(change, message):
    given = {"a": torch.zeros(3, 4, 5), "b": torch.zeros(3, 5, 6)} | change
    with pytest.raises(ValueError, match=message):
        ops.bmm(**given)
    meta = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    with pytest.raises(ValueError, match=message):
        ops.bmm(**meta)


def test_nothing_is_written_on_errors():
    a, b, out = torch.zeros(2, 3, 4), torch.zeros(2, 4, 5), torch.full((2, 3, 5), 7.0)
    with pytest.raises(ValueError, match=r"out must have shape \[2, 3, 5\], got \[2, 3, 4\]"):
        ops.bmm_(out[:, :, :4], a, b)
    with pytest.raises(ValueError, match="out is written and must not share memory with a or b"):
        ops.bmm_(a[:, :, :3].transpose(1, 2), a[:, :, :3].transpose(1, 2), torch.zeros(2, 3, 3))
    assert (out == 7).all()
