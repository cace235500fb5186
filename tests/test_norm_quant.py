"""A norm that is quantised: bit for bit the two ops one after the other on the same device."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from checking import assert_bit_equal, layouts, opcheck
from test_quant_formats import CODES, E2M1, E8M0, SCALES, same

from torch_deepinfer import ops
from torch_deepinfer.reference import norm as reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS = ["cast_mul", "mul_cast", "one_plus", "none"]
EPS = 1e-6


def check(x, residual, weight, eps=EPS, form="cast_mul", group_size=128, **options) -> None:
    normed, total = ops.add_rms_norm(x, residual, weight, eps, form)
    expected = ops.quantize_per_token_group(normed, group_size, **options)
    *actual, actual_total = ops.add_rms_norm_quant(x, residual, weight, eps, form, group_size=group_size, **options)
    assert_bit_equal(actual_total, total)
    alone = ops.rms_norm_quant(total, weight, eps, form, group_size=group_size, **options)
    for tensors in (actual, alone):
        for ours, theirs in zip(tensors, expected, strict=True):
            same(ours, theirs)


def inputs(device: str, *shape: int, dtype=torch.bfloat16, weight_dtype=None) -> tuple[torch.Tensor, ...]:
    x, residual = (torch.randn(*shape, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(shape[-1], device=device) * torch.logspace(-3, 3, shape[-1], device=device)
    return x, residual, weight.to(weight_dtype or dtype)


@pytest.mark.parametrize("layout", ["row", "column"])
@pytest.mark.parametrize("options", SCALES)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("group_size", [128, 64, 32, 16, 6, 2, -1])
@pytest.mark.parametrize("hidden_size", [64, 576, 1030])
def test_equals_the_unfused_ops(device, hidden_size, group_size, code, options, layout):
    check(*inputs(device, 3, 2, hidden_size), group_size=group_size, dtype=code, scale_layout=layout, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("group_size", [128, -1])
def test_forms_and_dtypes(device, group_size, form, dtype, weight_dtype):
    x, residual, weight = inputs(device, 5, 576, dtype=dtype, weight_dtype=weight_dtype)
    check(x, residual, None if form == "none" else weight, form=form, group_size=group_size)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("group_size", [128, -1])
def test_more_than_2_to_31_elements(group_size):
    rows, hidden_size = 2**31 // 4096 + 5, 4096
    x, residual = (torch.empty(rows, hidden_size, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2))
    results = ops.add_rms_norm_quant(x, residual, None, EPS, "none", group_size=group_size)
    assert results[0].numel() > 2**31
    for part in (slice(0, 3), slice(rows // 2, rows // 2 + 3), slice(rows - 3, rows)):
        expected = ops.add_rms_norm_quant(x[part], residual[part], None, EPS, "none", group_size=group_size)
        for ours, theirs in zip(results, expected, strict=True):
            same(ours[part], theirs)


# A row in each of the ways that a kernel lays it out over threads, and one that does not fit registers.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden_size", [8, 130, 2048, 4096, 5120, 7168, 8192, 16384, 40000])
def test_sizes_of_rows(device, hidden_size, dtype):
    for group_size in (128, -1):
        check(*inputs(device, 3, hidden_size, dtype=dtype), group_size=group_size)
    check(*inputs(device, 3, hidden_size, dtype=dtype), group_size=32, scale_dtype=torch.int32, scale_layout="column")


def test_matches_reference(device):
    x, residual, weight = inputs(device, 40, 256)
    for ours, theirs in [
        (ops.rms_norm_quant(x, weight, EPS), reference.rms_norm_quant(x, weight, EPS)),
        (ops.add_rms_norm_quant(x, residual, weight, EPS), reference.add_rms_norm_quant(x, residual, weight, EPS)),
    ]:
        codes, scales = (t[0].float() * t[1].repeat_interleave(128, -1) for t in (ours, theirs))
        torch.testing.assert_close(codes, scales, rtol=0.13, atol=1e-4)  # a code may be the neighbour
        torch.testing.assert_close(ours[1], theirs[1], rtol=2**-6, atol=0)
        assert (ours[0].view(torch.int8) == theirs[0].view(torch.int8)).float().mean() > 0.98


@pytest.mark.parametrize("group_size", [128, 24, -1])
def test_layouts(device, group_size):
    x, residual, weight = inputs(device, 4, 6, 256)
    expected = ops.add_rms_norm_quant(x, residual, weight, EPS, group_size=group_size)
    for name, view in layouts(x.cpu()).items():
        actual = ops.add_rms_norm_quant(view.to(device), residual, weight, EPS, group_size=group_size)
        for ours, theirs in zip(actual, expected, strict=True):
            assert_bit_equal(ours.float(), theirs.float(), name)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    shape=st.lists(st.integers(0, 5), max_size=3),
    hidden_size=st.integers(1, 40),
    group_size=st.sampled_from([-1, 2, 16, 34]),
    code=st.sampled_from(CODES),
    options=st.sampled_from(SCALES),
    layout=st.sampled_from(["row", "column"]),
)
def test_any_shape(shape, hidden_size, group_size, code, options, layout):
    check(*inputs("cpu", *shape, 2 * hidden_size), group_size=group_size, dtype=code, scale_layout=layout, **options)


def test_rows_are_split_over_threads(device):
    check(*inputs(device, 300, 512))


def test_nan_and_infinity_stay_in_their_row(device):
    x, _, weight = inputs(device, 4, 256, dtype=torch.float32)
    x[1, 7], x[2, 200] = torch.nan, torch.inf
    codes, scales = ops.rms_norm_quant(x, weight, EPS)
    assert scales[1].isnan().all() and codes[1].float().isnan().all()
    assert scales[2].isnan().tolist() == [False, True] and (codes[2, :128].float() == 0).all()
    check(x[[0, 3]], torch.zeros_like(x[:2]), weight)


def test_zero_row_without_eps_is_nan(device):
    codes, scales = ops.rms_norm_quant(torch.zeros(2, 130, device=device), None, 0.0, "none")
    assert scales.isnan().all() and codes.float().isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(weight=torch.ones(7)), r"weight must have shape \[64\], got \[7\]"),
        (dict(eps=-1.0), "eps must not be negative, got -1"),
        (dict(weight_form="llama"), "weight_form must be .* got llama"),
        (dict(group_size=0), "group_size must be positive, or -1 for the whole row, got 0"),
        (dict(dtype=torch.uint8), "dtype must be"),
        (dict(scale_dtype=torch.bfloat16), "scale_dtype must be"),
        (dict(scale_layout="tma"), "scale_layout must be row or column, got tma"),
        (dict(dtype=E2M1, group_size=3), "float4_e2m1fn_x2"),
    ],
)
@pytest.mark.parametrize("meta", [False, True])
def test_errors(change, message, meta):
    arguments = {"x": torch.ones(3, 64), "weight": torch.ones(64), "eps": 1e-6, **change}
    if meta:
        arguments = {n: a.to("meta") if isinstance(a, torch.Tensor) else a for n, a in arguments.items()}
    with pytest.raises(ValueError, match=rf"rms_norm_quant: .*{message}"):
        ops.rms_norm_quant(**arguments)
    with pytest.raises(ValueError, match=rf"add_rms_norm_quant: .*{message}"):
        ops.add_rms_norm_quant(residual=arguments["x"], **arguments)
    with pytest.raises(ValueError, match="add_rms_norm_quant: residual must have the shape of x"):
        ops.add_rms_norm_quant(residual=arguments["x"][:1], **arguments)


@pytest.mark.parametrize("layout", ["row", "column"])
@pytest.mark.parametrize("scale_dtype", [torch.float32, E8M0, torch.int32])
def test_opcheck(device, scale_dtype, layout):
    base = torch.randn(3, 5, 8, device=device).bfloat16()
    weight = torch.randn(8, device=device)
    options = {"scale_layout": layout, "scale_dtype": scale_dtype, "group_size": 3}
    for x in (base.transpose(0, 1), base[..., :0, :], base[:, 1:], base[0, 0]):
        opcheck(torch.ops.deepinfer.rms_norm_quant.default, (x, weight, EPS), options)
        opcheck(torch.ops.deepinfer.add_rms_norm_quant.default, (x, x.clone(), weight, EPS), options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_replayed_graph():
    x, residual, weight = inputs("cuda", 70, 7168)
    call = lambda: ops.add_rms_norm_quant(x, residual, weight, EPS)  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = call()
    for _ in range(2):
        x.normal_()
        graph.replay()
        for ours, theirs in zip(actual, call(), strict=True):
            same(ours, theirs)
