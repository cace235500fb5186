"""What of the quant family all NPUs have: int8 codes with float32 scales. The 950 runs the tests of the family too."""

import pytest
import torch
from checking import assert_bit_equal, layouts

from torch_deepinfer import ops
from torch_deepinfer.reference import quant as reference

pytestmark = [
    pytest.mark.npu,
    pytest.mark.skipif(not (hasattr(torch, "npu") and torch.npu.is_available()), reason="no Ascend NPU here"),
]

NEW = hasattr(torch, "npu") and torch.npu.is_available() and "950" in torch.npu.get_device_name()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPTIONS = [{}, {"round_scale": True}, {"scale_layout": "column"}]


def matches(x: torch.Tensor, group: int, **options) -> None:
    actual = ops.quantize_per_token_group(x.npu(), group, dtype=torch.int8, **options)
    expected = reference.quantize_per_token_group(x, group, dtype=torch.int8, **options)
    for a, e in zip(actual, expected, strict=True):
        assert_bit_equal(a, e)
        assert a.stride() == e.stride() or a.numel() < 2


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [128, 32, 7, 100, 1, -1])
def test_matches_reference(dtype, group, options):
    x = (torch.randn(3, 70, 300) * torch.logspace(-4, 4, 70)[:, None]).to(dtype)
    x[0, :8] = 0
    matches(x, group, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "group"), [(9, 7168, 128), (2, 70001, -1), (3, 40000, 20000), (1, 1, 5)])
def test_rows_of_any_length(dtype, rows, columns, group):
    matches(torch.randn(rows, columns).to(dtype), group)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("group", [20, 32, -1])
def test_nan_and_inf_poison_their_group_only(dtype, bad, group):
    x = torch.randn(4, 96).to(dtype)
    x[1, 39] = bad
    matches(x, group)
    codes, scales = ops.quantize_per_token_group(x.npu(), group, dtype=torch.int8)
    assert scales.cpu().isnan().sum() == 1 and (codes.cpu()[1, 39] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(dtype):
    x = torch.randn(4, 6, 40).to(dtype)
    expected = reference.quantize_per_token(x, dtype=torch.int8)
    for name, view in layouts(x).items():
        actual = ops.quantize_per_token(view.npu(), dtype=torch.int8)
        for a, e in zip(actual, expected, strict=True):
            assert_bit_equal(a, e, name)


def test_ties_and_the_last_bit_of_the_factor():
    halves = torch.arange(-127, 127) + 0.5
    matches(torch.stack([halves, torch.full_like(halves, 127.0)], -1), 2)
    amax = torch.arange(1, 4000, 2).float()
    matches(torch.stack([amax / 2, amax], -1), -1)


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (2, 0, 8)])
def test_empty(shape):
    matches(torch.empty(shape), 4)


@pytest.mark.skipif(NEW, reason="this NPU knows these formats")
def test_other_formats_are_refused():
    x = torch.randn(2, 64).npu()
    with pytest.raises(ValueError, match=r"quantize_per_token_group: on an NPU without float8 .* dtype must be int8"):
        ops.quantize_per_token_group(x)
    with pytest.raises(ValueError, match=r"quantize_per_token: on an NPU without .* scale_dtype must be float32"):
        ops.quantize_per_token(x, dtype=torch.int8, scale_dtype=torch.float8_e8m0fnu)
