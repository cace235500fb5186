import pytest
import torch
from checking import assert_bit_equal
from products import relative_error, rounding

from torch_deepinfer import ops
from torch_deepinfer.reference import gemm_fp8 as reference


def random_layer(
    tokens: int, hidden: int, intermediate: int, experts: int, topk: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, ...]:
    """The positional arguments of fp8_fused_experts."""
    x = torch.randn(tokens, hidden).to(dtype)
    gate_up = torch.randn(experts, 2 * intermediate, hidden) / hidden**0.5
    down = torch.randn(experts, hidden, intermediate) / intermediate**0.5
    (gate_up, gate_up_scale), (down, down_scale) = (ops.quantize_per_block(w, [128, 128]) for w in (gate_up, down))
    ids, weights = torch.rand(tokens, experts).topk(topk).indices, torch.rand(tokens, topk).softmax(-1)
    return tuple(t.to(device) for t in (x, gate_up, down, gate_up_scale, down_scale, ids, weights))


def on_cpu(layer: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(t.cpu() for t in layer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "options", [{}, {"limit": 1.5}, {"alpha": 1.7, "up_offset": 1.0}, {"round_scale": True}], ids=str
)
@pytest.mark.parametrize("shape", [(1, 128, 64, 4, 2), (37, 272, 208, 6, 3), (300, 256, 128, 4, 2)], ids=str)
def test_matches_reference(device, dtype, options, shape):
    layer = random_layer(*shape, dtype, device)
    out = ops.fp8_fused_experts(*layer, **options)
    assert out.dtype == dtype and out.is_contiguous()
    # A sum that falls on the other side of a rounding changes a code, 1/16 of one activation. The matrix unit of a GPU
    # keeps about 13 bits of its sums: there it happens more often.
    tolerance = 2 * rounding(dtype) + (1.5e-2 if device == "cuda" else 5e-3)
    assert relative_error(out, reference.fp8_fused_experts(*on_cpu(layer), **options)) < tolerance


def test_near_the_layer_in_full_precision(device):
    layer = random_layer(50, 384, 256, 5, 2, torch.bfloat16, device)
    x, gate_up, down, gate_up_scale, down_scale, ids, weights = on_cpu(layer)
    wide = (
        ops.dequantize(*pair, [128, 128], dtype=torch.bfloat16)
        for pair in ((gate_up, gate_up_scale), (down, down_scale))
    )
    assert relative_error(ops.fp8_fused_experts(*layer), ops.fused_experts(x, *wide, ids, weights)) < 0.06


def test_dropped_slots_and_experts_of_other_ranks(device):
    x, gate_up, down, gate_up_scale, down_scale, ids, weights = random_layer(40, 256, 128, 6, 3, torch.float32, device)
    ids[2], ids[5, 1] = -1, -1
    whole = ops.fp8_fused_experts(x, gate_up, down, gate_up_scale, down_scale, ids, weights)
    assert not whole[2].any()
    parts = []
    for a, b in ((0, 1), (1, 4), (4, 6)):
        local = gate_up[a:b], down[a:b], gate_up_scale[a:b], down_scale[a:b]
        parts.append(ops.fp8_fused_experts(x, *local, ids, weights, first_expert=a))
    # On a GPU other numbers of experts may mean other tiles, and another code where a sum is near a rounding.
    assert relative_error(sum(parts), whole) < (1e-2 if device == "cuda" else 1e-5)


def test_no_tokens(device):
    layer = random_layer(0, 128, 64, 4, 2, torch.bfloat16, device)
    assert_bit_equal(ops.fp8_fused_experts(*layer), torch.empty(0, 128, dtype=torch.bfloat16))


def test_compiles_whole(device):
    layer = random_layer(9, 128, 64, 4, 2, torch.bfloat16, device)
    compiled = torch.compile(ops.fp8_fused_experts, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (slice(None), slice(5)):
        x, *weights, ids, topk_weights = layer
        given = x[rows], *weights, ids[rows], topk_weights[rows]
        assert_bit_equal(compiled(*given), ops.fp8_fused_experts(*given))


def test_errors_name_the_argument():
    x, gate_up, down, *rest = random_layer(2, 128, 64, 4, 2, torch.bfloat16, "cpu")
    with pytest.raises(ValueError, match=r"down must have shape \[4, 128, 64\], got \[4, 64, 64\]"):
        ops.fp8_fused_experts(x, gate_up, down[:, :64], *rest)
    with pytest.raises(ValueError, match=r"gate_up must have shape \[E, 2 \* I, 100\], got \[4, 128, 128\]"):
        ops.fp8_fused_experts(x[:, :100], gate_up, down, *rest)
    with pytest.raises(ValueError, match="weight must be float8_e4m3fn, got bfloat16"):
        ops.fp8_fused_experts(x, gate_up.bfloat16(), down, *rest)
