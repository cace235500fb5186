"""What a compiled model goes through in the hands of users: generate, packages, regions, autocast, inference mode."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import prompt, tiny_model
from torch._dynamo.utils import counters

from torch_deepinfer.inductor import inductor_configs, report

pytestmark = pytest.mark.filterwarnings("ignore")

PATTERNS = {"deepinfer.patterns": ["fused_experts", "moe_router", "qk_norm_rope", "add_rms_norm"]}


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """No compiled graph from before, and none left behind."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Logits(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-4 if expected.dtype == torch.float32 else 5e-2
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * expected.abs().max().item())


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_package_in_a_fresh_process(tmp_path, where, dtype):
    model = Logits(tiny_model("qwen3_moe", dtype)).to(where)
    ids = prompt().to(where)
    exported = torch.export.export(model, (ids,), strict=False)
    package = torch._inductor.aoti_compile_and_package(
        exported, package_path=str(tmp_path / "model.pt2"), inductor_configs=inductor_configs(PATTERNS)
    )
    assert report().ops == {"fused_experts": 2, "moe_router": 2, "qk_norm_rope": 2, "add_rms_norm": 4}
    torch.save(ids, tmp_path / "ids.pt")
    worker = Path(__file__).with_name("aot_worker.py")
    subprocess.run([sys.executable, worker, package, tmp_path / "ids.pt", tmp_path / "logits.pt"], check=True)
    close(torch.load(tmp_path / "logits.pt"), model(ids))


@pytest.mark.parametrize("batch", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_generate_with_a_static_cache(batch):
    model = tiny_model("qwen3_moe", torch.float32)
    config = transformers.CompileConfig(backend="deepinfer", fullgraph=True, dynamic=False, mode="default")
    config._compile_all_devices = True  # transformers compiles on accelerators by itself
    ids = prompt(batch, 5)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, **options)
    actual = model.generate(ids, **options, cache_implementation="static", compile_config=config)
    assert torch.equal(actual, expected)
    assert report().graphs >= 1 and report().patterns["fused_experts"].swapped == 2 * report().graphs


@pytest.mark.slow
def test_prompts_of_many_lengths_compile_a_bounded_number_of_times():
    model = Logits(tiny_model("qwen3_moe", torch.float32))
    compiled = torch.compile(model, backend="deepinfer", fullgraph=True)
    with torch.no_grad():
        for length in (9, 12, 7, 31, 16, 23):
            ids = prompt(1, length)
            close(compiled(ids), model(ids))
    assert report().graphs == 2  # the first length, and any other


@torch.no_grad()
def test_regions():
    """Every layer by itself: one graph serves all layers that are alike."""
    model = tiny_model("qwen3_moe", torch.float32)
    ids = prompt()
    expected = model(input_ids=ids, use_cache=False).logits
    for layer in model.model.layers:
        layer.compile(backend="deepinfer", fullgraph=True)
    close(model(input_ids=ids, use_cache=False).logits, expected)
    assert report().patterns["fused_experts"].swapped == report().graphs >= 1


@pytest.mark.slow
def test_autocast():
    model = Logits(tiny_model("llama", torch.float32))
    compiled = torch.compile(model, backend="deepinfer", options={"deepinfer.patterns": "all"})
    ids = prompt()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        actual, expected = compiled(ids), model(ids)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=0, atol=5e-2 * expected.abs().max().item())


def test_inference_mode():
    model = Logits(tiny_model("qwen3_moe", torch.float32))
    compiled = torch.compile(model, backend="deepinfer")
    ids = prompt()
    with torch.inference_mode():
        close(compiled(ids), model(ids))
    assert report().patterns["fused_experts"].swapped == 2


@pytest.mark.slow
def test_training_then_inference_of_one_model():
    model = Logits(tiny_model("qwen3_moe", torch.float32))
    compiled = torch.compile(model, backend="deepinfer")
    ids = prompt()
    compiled(ids).sum().backward()
    assert not report().ops and all(p.grad is not None for p in model.parameters())
    with torch.no_grad():
        close(compiled(ids), model(ids))
    assert report().ops["fused_experts"] == 2


@pytest.mark.slow
def test_max_autotune():
    model = Logits(tiny_model("qwen3_moe", torch.float32))
    compiled = torch.compile(model, backend="deepinfer", mode="max-autotune-no-cudagraphs")
    ids = prompt()
    with torch.no_grad():
        close(compiled(ids), model(ids))
    assert report().patterns["fused_experts"].swapped == 2
