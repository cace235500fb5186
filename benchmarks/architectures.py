"""The forward pass of transformers models in the shapes of public ones, with few layers and random weights.

Columns: backend="deepinfer", stock torch.compile, and with --eager the uncompiled model. On a GPU every column is
replayed from a CUDA graph, as mode="reduce-overhead" does. Tokens are those of one sequence, without a cache.
"""

from functools import partial
from typing import Any

import torch
import transformers
from harness import Bench

import torch_deepinfer.inductor  # noqa: F401  (the backend, also where the package is not installed)

LAYERS = 8
SMALL_VOCABULARY = {"vocab_size": 4096, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ATTENTION = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
MOE = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts_per_tok": 8}

# Name: (configuration class, what differs from its defaults).
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeConfig", {**ATTENTION, **MOE, "num_experts": 128, "norm_topk_prob": True}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **MOE,
            "intermediate_size": 6144,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "n_routed_experts": 128,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 0,
        },
    ),
    "mixtral": (
        "MixtralConfig",
        {
            **ATTENTION,
            "num_key_value_heads": 8,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 4,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {"num_local_experts": 32, "num_experts_per_tok": 4, "hidden_size": 2880, "intermediate_size": 2880},
    ),
    "llama": ("LlamaConfig", {**ATTENTION, "num_key_value_heads": 8, "hidden_size": 4096, "intermediate_size": 14336}),
    "qwen3": ("Qwen3Config", {**ATTENTION, "num_key_value_heads": 8, "hidden_size": 4096, "intermediate_size": 12288}),
    "gemma3_text": (
        "Gemma3TextConfig",
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_size": 2560,
            "intermediate_size": 10240,
        },
    ),
}
TOKENS = (1, 16, 2048)


def build(name: str, device: str) -> transformers.PreTrainedModel:
    """A bfloat16 model whose weights are drawn where it is to run."""
    config_class, changes = SHAPES[name]
    config = getattr(transformers, config_class)(**{"num_hidden_layers": LAYERS, **SMALL_VOCABULARY, **changes})
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def main() -> None:
    bench = Bench("architectures", __doc__)
    bench.parser.add_argument("--eager", action="store_true", help="time the uncompiled model as well")
    bench.parser.set_defaults(rounds=9)
    device = bench.args.device
    for name in SHAPES:
        cases = [{"model": name, "tokens": tokens} for tokens in TOKENS]
        if not any(bench.wanted(case) for case in cases):
            continue
        model = build(name, device)
        for case in cases:
            ids = torch.randint(3, model.config.vocab_size, (1, case["tokens"]), device=device)
            call = partial(torch.compile, model, dynamic=False)
            columns = {"ours": call(backend="deepinfer"), "stock": call()}
            if bench.args.eager:
                columns["eager"] = model
            bench.row(case, {name: partial(f, input_ids=ids, use_cache=False) for name, f in columns.items()})
        del model
    bench.finish()


if __name__ == "__main__":
    main()
