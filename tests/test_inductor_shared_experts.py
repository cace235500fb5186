"""A shared expert beside the experts of a router: what is found, and near misses."""

import pytest
import torch
import torch.nn.functional as F
from graphs import swaps, traced
from test_inductor_moe import HIDDEN, WIDTH, expert_inputs, experts, interleaved_gpt_oss
from tiny_models import prefill_inputs, tiny_model

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def shared_inputs(dtype: torch.dtype, width: int = WIDTH) -> list[torch.Tensor]:
    gate, up, down = torch.randn(width, HIDDEN), torch.randn(width, HIDDEN), torch.randn(HIDDEN, width)
    return [(weight / weight.shape[1] ** 0.5).to(dtype) for weight in (gate, up, down)]


def layer(x, gate_up, down, ids, weights, *more, **change):
    """``more``: biases of the experts, then the shared expert. ``change`` alters one step."""
    *biases, gate, up, last = more
    routed = experts(x, gate_up, down, ids, weights, *biases, **change.get("routed", {})).view(1, *x.shape)
    seen = change.get("seen", lambda x: x)(x).view(1, *x.shape)
    activated = change.get("act", F.silu)(F.linear(seen, gate)) * F.linear(seen, up)
    shared = F.linear(activated, last, change.get("bias"))
    return change.get("total", lambda routed, shared: routed + shared)(routed, shared)


def check(function, *tensors, **options) -> dict[str, int]:
    with torch.no_grad():
        run = traced(function, {"deepinfer.patterns": "all"}, **options)
        ours, eager = run(*tensors), function(*tensors)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 6e-3}[eager.dtype]
    torch.testing.assert_close(ours, eager, rtol=tolerance, atol=tolerance)
    assert ours.stride() == eager.stride()
    return swaps(run.report)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared_first", [False, True])
def test_found(dtype, shared_first):
    def function(*tensors):
        return layer(*tensors, total=(lambda a, b: b + a) if shared_first else (lambda a, b: a + b))

    found = check(function, *expert_inputs(dtype), *shared_inputs(dtype))
    assert (found.get("fused_experts"), found.get("shared_expert")) == (1, 1)


def test_two_dimensions():
    found = check(
        lambda *tensors: layer(*tensors).view(-1, HIDDEN), *expert_inputs(torch.float32), *shared_inputs(torch.float32)
    )
    assert found.get("shared_expert") == 1


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamic", [False, True])
def test_model(dynamic):
    model = tiny_model("deepseek_v3", torch.float32)
    run = traced(model, {"deepinfer.patterns": "all"}, dynamic=dynamic)
    expected = model(**prefill_inputs()).logits
    torch.testing.assert_close(
        run(**prefill_inputs()).logits, expected, rtol=0, atol=1e-5 * expected.abs().max().item()
    )
    found = swaps(run.report)
    assert found["shared_expert"] == found["fused_experts"] > 0


NEAR_MISSES = {
    "other tokens": {"seen": lambda x: 2 * x},
    "another activation": {"act": F.gelu},
    "a bias": {"bias": torch.randn(HIDDEN)},
    "a difference": {"total": lambda routed, shared: routed - shared},
    "a sum with a factor": {"total": lambda routed, shared: torch.add(routed, shared, alpha=2)},
    "a product": {"total": lambda routed, shared: routed * shared},
    "the experts alone are used as well": {"total": lambda routed, shared: routed + shared + routed.sum()},
    "the shared expert alone is used as well": {"total": lambda routed, shared: routed + shared + shared.sum()},
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    tensors = [*expert_inputs(torch.float32), *shared_inputs(torch.float32)]
    found = check(lambda *tensors: layer(*tensors, **NEAR_MISSES[name]), *tensors)
    assert (found.get("fused_experts"), found.get("shared_expert")) == (1, None)


def test_another_width():
    found = check(layer, *expert_inputs(torch.float32), *shared_inputs(torch.float32, 2 * WIDTH))
    assert (found.get("fused_experts"), found.get("shared_expert")) == (1, None)


def test_biases_of_the_experts():
    found = check(layer, *expert_inputs(torch.float32, bias=True), *shared_inputs(torch.float32))
    assert (found.get("fused_experts"), found.get("shared_expert")) == (1, None)


def test_clamped_experts():
    """Those of GPT-OSS beside one that is not clamped."""
    found = check(
        lambda *t: layer(*t, routed={"gate": interleaved_gpt_oss}),
        *expert_inputs(torch.float32),
        *shared_inputs(torch.float32),
    )
    assert (found.get("fused_experts"), found.get("shared_expert")) == (1, None)
