"""Permuting and summing rows that carry scales."""

import pytest
import torch
from checking import assert_bit_equal, layouts, opcheck

from torch_deepinfer import ops
from torch_deepinfer.reference import moe as reference

E4M3, E8M0, E2M1 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def plain(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8) if t.dtype in (E8M0, E4M3, E2M1) else t


def dispatch(device: str, experts: int = 4, alignment: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.tensor([[0, 2], [-1, 1], [2, 0], [1, 2], [0, -1]], device=device)
    return ops.moe_expert_map(ids, experts, alignment=alignment)[:2]


@pytest.mark.parametrize("layout", ["row", "column"])
@pytest.mark.parametrize("scale_dtype", [torch.float32, E8M0, torch.int32])
@pytest.mark.parametrize("code", [E4M3, torch.int8, E2M1])
def test_permute(device, code, scale_dtype, layout):
    x = torch.randn(5, 320, device=device)
    for given in ("row", "column"):
        pair = ops.quantize_per_token_group(x, 64, dtype=code, scale_dtype=scale_dtype, scale_layout=given)
        rows_to_slots, slots_to_rows = dispatch(device)
        for inverse in (None, slots_to_rows):
            actual = ops.moe_permute_scaled(*pair, rows_to_slots, 2, inverse, scale_layout=layout)
            cpu = [t.cpu() for t in (*pair, rows_to_slots)]
            for a, e in zip(actual, reference.moe_permute_scaled(*cpu, 2, scale_layout=layout), strict=True):
                assert a.dtype == e.dtype and a.stride() == e.stride()
                assert_bit_equal(plain(a), plain(e))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_more_than_2_to_31_elements():
    tokens, topk = 2**31 // (8 * 4096) + 5, 8
    x = torch.empty(tokens, 4096, dtype=torch.bfloat16, device="cuda").normal_()
    codes, scales = ops.quantize_per_token(x, scale_dtype=E8M0)  # powers of two: sums of equal rows are exact
    scales = scales.float()
    rows_to_slots, slots_to_rows, *_ = ops.moe_expert_map(torch.rand(tokens, 64, device="cuda").topk(topk).indices, 64)
    rows = ops.moe_permute_scaled(codes, scales, rows_to_slots, topk, slots_to_rows)
    last = slice(rows[0].shape[0] - 1000, None)
    chosen = rows_to_slots[last].long() // topk
    assert rows[0].numel() > 2**31
    assert torch.equal(plain(rows[0])[last], plain(codes)[chosen]) and torch.equal(rows[1][last], scales[chosen])
    total = ops.moe_unpermute_scaled(*rows, slots_to_rows)
    part = slice(tokens - 3, tokens)
    alone = ops.moe_unpermute_scaled(codes[part], scales[part], torch.arange(3, device="cuda").int()[:, None])
    assert torch.equal(total[part], alone * topk)


def test_permuted_rows_dequantise_to_the_tokens(device):
    x = torch.randn(5, 256, device=device).bfloat16()
    codes, scales = ops.quantize_per_token_group(x, scale_dtype=torch.int32)
    rows_to_slots, _ = dispatch(device)
    rows = ops.moe_permute_scaled(codes, scales, rows_to_slots, 2, scale_layout="column")
    expected = ops.moe_permute(ops.dequantize(codes, scales, [1, 128]), rows_to_slots, 2)
    assert_bit_equal(ops.dequantize(*rows, [1, 128]), expected)


def test_permute_layouts(device):
    x, scales = torch.randn(6, 40).to(E4M3), torch.rand(6, 5)
    rows_to_slots = torch.tensor([11, -1, 0, 5, 5, 2], dtype=torch.int32, device=device)
    expected = ops.moe_permute_scaled(x.to(device), scales.to(device), rows_to_slots, 2)
    for name, view in layouts(scales).items():
        actual = ops.moe_permute_scaled(x.to(device), view.to(device), rows_to_slots, 2)
        assert_bit_equal(actual[1], expected[1], name)
        assert_bit_equal(plain(actual[0]), plain(expected[0]), name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights_dtype", [None, *DTYPES])
@pytest.mark.parametrize("hidden_size", [1, 70, 512])
def test_unpermute(device, dtype, weights_dtype, hidden_size):
    rows_to_slots, slots_to_rows = dispatch(device)
    y = torch.randn(len(rows_to_slots), hidden_size, device=device)
    codes, scales = ops.quantize_per_token(y)
    weights = None if weights_dtype is None else torch.rand(5, 2, device=device).to(weights_dtype)
    actual = ops.moe_unpermute_scaled(codes, scales, slots_to_rows, weights, dtype=dtype)
    given = [None if t is None else t.cpu() for t in (codes, scales, slots_to_rows, weights)]
    assert_bit_equal(actual, reference.moe_unpermute_scaled(*given, dtype=dtype))
    assert_bit_equal(ops.moe_unpermute_scaled(codes, scales[:, 0], slots_to_rows, weights, dtype=dtype), actual)
    wide = torch.zeros(len(rows_to_slots), hidden_size + 7, device=device).to(E4M3)
    wide[:, 3 : 3 + hidden_size] = codes
    view = wide[:, 3 : 3 + hidden_size]
    assert_bit_equal(ops.moe_unpermute_scaled(view, scales, slots_to_rows, weights, dtype=dtype), actual)


def test_unpermute_factor_is_rounded_before_the_product(device):
    y = torch.full((1000, 16), 1.125, device=device).to(E4M3)
    scale, weight = torch.rand(1000, 1, device=device) + 1, torch.rand(1000, 1, device=device) + 1
    slots = torch.arange(1000, dtype=torch.int32, device=device)[:, None]
    actual = ops.moe_unpermute_scaled(y, scale, slots, weight, dtype=torch.float32)
    assert torch.equal(actual, (weight * scale) * y.float())
    assert not torch.equal(actual, weight * (scale * y.float()))


def test_nothing_to_do(device):
    none = torch.zeros(0, dtype=torch.int32, device=device)
    x, scales = torch.zeros(0, 64, device=device).to(E4M3), torch.zeros(0, 2, device=device)
    rows, row_scales = ops.moe_permute_scaled(x, scales, none, 2, scale_layout="column")
    assert rows.shape == (0, 64) and row_scales.shape == (0, 2)
    out = ops.moe_unpermute_scaled(x, scales[:, :1], none.view(0, 2))
    assert out.shape == (0, 64) and out.dtype == torch.bfloat16
    dropped = torch.full((3, 2), -1, dtype=torch.int32, device=device)
    assert (ops.moe_unpermute_scaled(x, scales[:, :1], dropped) == 0).all()


def zeros(*shape: int, dtype: torch.dtype = torch.float32):
    return lambda where: torch.zeros(shape, dtype=dtype, device=where)


X, S, ROWS, SLOTS = zeros(3, 8, dtype=E4M3), zeros(3, 2), zeros(4, dtype=torch.int32), zeros(3, 2, dtype=torch.int32)
PERMUTE_ERRORS = [
    ((zeros(8), S, ROWS, 2), {}, "x must be 2-D"),
    ((X, zeros(3), ROWS, 2), {}, r"scales must be 2-D, \[tokens, groups\], got shape \[3\]"),
    ((X, zeros(2, 2), ROWS, 2), {}, "scales must have 3 rows, those of x, got 2"),
    ((X, zeros(3, 2, dtype=torch.half), ROWS, 2), {}, "scale_dtype must be float32, .* got float16"),
    ((X, S, ROWS, 2), {"scale_layout": "rows"}, "scale_layout must be row or column, got rows"),
    ((X, S, zeros(4), 2), {}, "rows_to_slots must be int32, got float32"),
    ((X, S, ROWS, 0), {}, "topk must lie in"),
    ((X, S, ROWS, 3, SLOTS), {}, r"slots_to_rows must have shape \[3, 3\], got \[3, 2\]"),
]
UNPERMUTE_ERRORS = [
    ((zeros(3, 8), S, SLOTS), {}, "y must be float8_e4m3fn, got float32"),
    ((X, S, SLOTS), {}, r"row_scales must have shape \[3\] or \[3, 1\], got \[3, 2\]"),
    ((X, zeros(3, dtype=torch.half), SLOTS), {}, "row_scales must be float32, got float16"),
    ((X, zeros(3), ROWS), {}, "slots_to_rows must be 2-D"),
    ((X, zeros(3), SLOTS, zeros(3, 3)), {}, r"shape of slots_to_rows, \[3, 2\], got \[3, 3\]"),
    ((X, zeros(3), SLOTS, zeros(3, 2, dtype=torch.long)), {}, "topk_weights must be float32, .* got int64"),
    ((X, zeros(3), SLOTS), {"dtype": torch.int8}, "dtype must be float32, .* got int8"),
]


@pytest.mark.parametrize(
    ("op", "arguments", "options", "message"),
    [
        *((ops.moe_permute_scaled, *case) for case in PERMUTE_ERRORS),
        *((ops.moe_unpermute_scaled, *case) for case in UNPERMUTE_ERRORS),
    ],
)
def test_errors(device, op, arguments, options, message):
    texts = []
    for where in (device, "meta"):
        given = [a(where) if callable(a) else a for a in arguments]
        with pytest.raises(ValueError, match=message) as error:
            op(*given, **options)
        texts.append(str(error.value))
    assert texts[0] == texts[1]


def test_map_out_of_range_on_a_cpu():
    wrong = torch.tensor([6], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"moe_permute_scaled: rows_to_slots must lie in \[-1, 6\), got 6"):
        ops.moe_permute_scaled(X("cpu"), S("cpu"), wrong, 2)
    with pytest.raises(ValueError, match=r"moe_unpermute_scaled: slots_to_rows must lie in \[-1, 3\), got 6"):
        ops.moe_unpermute_scaled(X("cpu"), torch.zeros(3), wrong[None])


@pytest.mark.parametrize("layout", ["row", "column"])
def test_opcheck(device, layout):
    codes, scales = ops.quantize_per_token_group(torch.randn(5, 64, device=device), 16, scale_dtype=torch.int32)
    rows_to_slots, slots_to_rows = dispatch(device)
    op = torch.ops.deepinfer.moe_permute_scaled.default
    opcheck(op, (codes, scales, rows_to_slots, 2), {"scale_layout": layout})
    opcheck(op, (codes, scales.float(), rows_to_slots, 2, slots_to_rows), {"scale_layout": layout})
    y, row_scales = ops.quantize_per_token(torch.randn(len(rows_to_slots), 64, device=device))
    op = torch.ops.deepinfer.moe_unpermute_scaled.default
    opcheck(op, (y, row_scales, slots_to_rows, torch.rand(5, 2, device=device)))
    opcheck(op, (y, row_scales[:, 0], slots_to_rows), {"dtype": torch.float32})
