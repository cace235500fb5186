"""torch.compile(backend="deepinfer") with tensors on an NPU, where Inductor itself generates no code."""

import calls
import pytest
import torch
import torch.nn.functional as F
from checking import assert_bit_equal

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


class Head(torch.nn.Module):
    """The greatest logits of each token."""

    def __init__(self, size: int = 32, words: int = 8200):
        super().__init__()
        self.words = torch.nn.Linear(size, words, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.topk(self.words(x), 20))


PATTERNS = ["rms_norm", "add_rms_norm", "silu_and_mul", "topk"]


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


@pytest.mark.parametrize("dynamic", [False, True])
def test_topk_runs_on_the_npu(dynamic):
    torch._dynamo.reset()
    model = Head().npu()
    compiled = torch.compile(model, backend="deepinfer", dynamic=dynamic, options={"deepinfer.patterns": PATTERNS})
    before = getattr(inductor.report().patterns.get("topk"), "swapped", 0)
    with torch.no_grad():
        for rows in (3, 6):
            x = torch.randn(rows, 32).npu()
            for actual, expected in zip(compiled(x), model(x), strict=True):
                assert_bit_equal(actual, expected)
    assert inductor.report().patterns["topk"].swapped > before


def test_nothing_is_swapped_that_was_not_measured():
    torch._dynamo.reset()
    model = Block().npu()
    with torch.no_grad():
        x = torch.randn(5, 64).npu()
        calls.close(torch.compile(model, backend="deepinfer")(x), model(x).cpu())
        head, x = Head().npu(), torch.randn(3, 32).npu()
        assert_bit_equal(torch.compile(head, backend="deepinfer")(x)[1], head(x)[1])
    for name in ("rms_norm", "topk"):
        assert "off on npu: not measured on npu" in inductor.report().patterns[name].declined


def test_the_same_matches_as_on_a_cpu():
    """The table of matches does not depend on the device. Plain products are torch's own on every device."""
    for model, size, expected in (
        (Block(), 64, {"rms_norm": 1, "silu_and_mul": 1}),
        (Head(), 32, {"topk": 1}),
    ):
        for device in ("cpu", "npu"):
            x = torch.randn(5, size, device=device)
            report = inductor.explain(model.to(device), x, options={"deepinfer.patterns": PATTERNS})
            assert {name: pattern.swapped for name, pattern in report.patterns.items() if pattern.swapped} == expected
