"""torch.compile(backend="deepinfer") with tensors on an NPU, where Inductor itself generates no code."""

import calls
import pytest
import torch
import torch.nn.functional as F

import torch_deepinfer.inductor as inductor

pytestmark = calls.needs_standin


class Block(torch.nn.Module):
    """A pre-norm feed-forward block as models write it."""

    def __init__(self, size: int = 64, inner: int = 96):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(size) + 0.5)
        self.gate, self.up, self.down = (
            torch.nn.Linear(*shape, bias=False) for shape in ((size, inner), (size, inner), (inner, size))
        )

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.float()
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * hidden.to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x)
        return x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))


PATTERNS = ["rms_norm", "add_rms_norm", "silu_and_mul"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_swapped_ops_run_on_the_npu(dynamic):
    torch._dynamo.reset()
    model = Block().bfloat16().npu()
    compiled = torch.compile(model, backend="deepinfer", dynamic=dynamic, options={"deepinfer.patterns": PATTERNS})
    before = inductor.report()
    with torch.no_grad():
        for rows in (5, 9):
            x = torch.randn(rows, 64).bfloat16().npu()
            calls.close(compiled(x), model(x).cpu(), 2**-6)
    report = inductor.report()
    for name in ("rms_norm", "silu_and_mul"):
        assert report.patterns[name].swapped > getattr(before.patterns.get(name), "swapped", 0)


def test_nothing_is_swapped_that_was_not_measured():
    torch._dynamo.reset()
    model = Block().npu()
    with torch.no_grad():
        x = torch.randn(5, 64).npu()
        calls.close(torch.compile(model, backend="deepinfer")(x), model(x).cpu())
    assert "off on npu: not measured on npu" in inductor.report().patterns["rms_norm"].declined


def test_the_same_matches_as_on_a_cpu():
    """The table of matches does not depend on the device."""
    options = {"deepinfer.patterns": PATTERNS}
    counts = []
    for device in ("cpu", "npu"):
        report = inductor.explain(Block().to(device), torch.randn(5, 64, device=device), options=options)
        counts.append({name: pattern.swapped for name, pattern in report.patterns.items()})
    assert counts[0] == counts[1] and counts[0]["rms_norm"] == counts[0]["silu_and_mul"] == 1
