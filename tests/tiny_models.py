"""Transformers models with random weights, small enough to trace in seconds, of families that the patterns cover."""

import copy
from typing import Any

import torch
import transformers

VOCABULARY = 128

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
_QWEN_MOE = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}

# family: (configuration class, what differs from _COMMON)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {}),
    "phi3": ("Phi3Config", {"num_key_value_heads": 4}),
    "gemma3_text": ("Gemma3TextConfig", {"query_pre_attn_scalar": 16, "sliding_window": 8}),
    "qwen3": ("Qwen3Config", {}),
    "qwen2_moe": ("Qwen2MoeConfig", {**_QWEN_MOE, "shared_expert_intermediate_size": 48}),
    "qwen3_moe": ("Qwen3MoeConfig", {**_QWEN_MOE, "norm_topk_prob": True}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "olmoe": ("OlmoeConfig", {"num_experts": 8, "num_experts_per_tok": 2}),
    "deepseek_v2": ("DeepseekV2Config", {**_MLA, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3Config", {**_MLA, "routed_scaling_factor": 2.5}),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "use_qk_norm": True,
        },
    ),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "minimax_m2": ("MiniMaxM2Config", {"num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 16}),
}


def tiny_model(family: str, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """A model in eval mode whose parameters are random, norms and biases included."""
    return build(*FAMILIES[family], dtype)


def build(configuration: str, changes: dict[str, Any], dtype: torch.dtype) -> transformers.PreTrainedModel:
    """As :func:`tiny_model`, of any configuration class."""
    config = getattr(transformers, configuration)(**copy.deepcopy(_COMMON | changes))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def prompt(batch: int = 2, length: int = 16) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def prefill_inputs(batch: int = 2, length: int = 16) -> dict[str, Any]:
    return {"input_ids": prompt(batch, length), "use_cache": False}


def decode_inputs(model: transformers.PreTrainedModel, batch: int = 2) -> dict[str, Any]:
    """One more token after a prompt, with the static cache that compiled decoding uses."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    tokens = prompt(batch, 9)
    with torch.no_grad():
        model(input_ids=tokens[:, :8], past_key_values=cache, use_cache=True)
    return {"input_ids": tokens[:, 8:], "past_key_values": cache, "use_cache": True}
