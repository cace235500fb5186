"""``experts_implementation="deepinfer"``, and what a report says about experts that no graph holds."""

import pytest
import torch
import transformers
from tiny_models import prefill_inputs, tiny_model

from torch_deepinfer.inductor import experts, explain

pytestmark = pytest.mark.filterwarnings("ignore")

DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture(autouse=True)
def registered() -> None:
    experts.register()


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_logits(family, dtype):
    model = tiny_model(family, dtype)
    model.set_experts_implementation("grouped_mm")
    expected = model(**prefill_inputs()).logits
    model.set_experts_implementation("deepinfer")
    actual = model(**prefill_inputs()).logits
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * expected.abs().max().item())


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the calls of fused_experts."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.deepinfer.fused_experts.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("family", "calls"), [("qwen3_moe", 2), ("gpt_oss", 0)])
def test_what_runs(family, calls):
    """The gate of GPT-OSS is its own, and training is left to torch."""
    model = tiny_model(family, torch.float32)
    model.set_experts_implementation("deepinfer")
    with torch.no_grad(), Calls() as counted:
        model(**prefill_inputs())
    assert counted.count == calls
    with Calls() as counted:
        model(**prefill_inputs()).logits.sum().backward()
    assert counted.count == 0 and all(p.grad is not None for p in model.parameters() if p.requires_grad)


@torch.no_grad()
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_activations(activation):
    model = tiny_model("qwen3_moe", torch.float32)
    layer = model.model.layers[0].mlp.experts
    layer.act_fn = transformers.activations.ACT2FN[activation]
    x, ids, weights = torch.randn(5, 64), torch.rand(5, 8).topk(2).indices, torch.rand(5, 2)
    model.set_experts_implementation("grouped_mm")
    expected = layer(x, ids, weights)
    with Calls() as counted:
        actual = experts.experts_forward(layer, x, ids, weights)
    assert counted.count == (activation != "relu")
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "deepinfer"])
def test_advice(implementation):
    model = tiny_model("qwen3_moe", torch.float32)
    model.set_experts_implementation(implementation)
    report = explain(model, **prefill_inputs())
    assert bool(report.advice) == (implementation == "eager")
    assert ("set_experts_implementation" in str(report)) == (implementation == "eager")
    assert report.ops["fused_experts"] == (0 if implementation == "eager" else 2)
