"""Sparse upcycling: a dense Llama-style model becomes a mixture of experts that computes the same function.

Every feed-forward block is copied into each expert and the router is random (Komatsuzaki et al., 2022,
arXiv 2212.05055). The weights of the chosen experts add up to one and the experts are alike, so whatever the router
says, the result is that of the dense block; but it is reached through routing, dispatch and grouped matrix products.
That makes a small real model a test and a benchmark of the whole path, with text that a person can read.
"""

import torch
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel

# What Mixtral's configuration shares with Llama's.
_SHARED_SETTINGS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
    "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def upcycle(model: PreTrainedModel, num_experts: int = 16, topk: int = 4, seed: int = 0) -> MixtralForCausalLM:
    """A Mixtral model that computes the function of ``model``.

    Args:
        model: of the Llama architecture (Mistral without a sliding window is the same), without biases.
        num_experts: copies of each feed-forward block; each has its own memory, as trained experts would.
        topk: experts that a token visits.
        seed: of the router's weights.

    Returns:
        In evaluation mode and the dtype of ``model``; it shares all other weights with ``model``.

    Raises:
        ValueError: another architecture, biases, or ``topk`` not in ``[1, num_experts]``.
    """
    if not 1 <= topk <= num_experts:
        raise ValueError(f"topk must be in [1, {num_experts}], got {topk}")
    config, weights = model.config, model.state_dict()
    if getattr(config, "sliding_window", None):
        raise ValueError("only models without a sliding window can be upcycled")
    if config.model_type not in ("llama", "mistral"):
        raise ValueError(f"only models of the Llama architecture can be upcycled, not {config.model_type}")
    biases = [name for name in weights if name.endswith(".bias")]
    if biases:
        raise ValueError(f"only models without biases can be upcycled; this one has {biases[0]}")

    upcycled = {name: weight for name, weight in weights.items() if ".mlp." not in name}
    generator = torch.Generator().manual_seed(seed)
    for layer in range(config.num_hidden_layers):
        block = f"model.layers.{layer}.mlp."
        gate, up, down = (weights[f"{block}{name}_proj.weight"] for name in ("gate", "up", "down"))
        upcycled[f"{block}experts.gate_up_proj"] = torch.cat([gate, up]).repeat(num_experts, 1, 1)
        upcycled[f"{block}experts.down_proj"] = down.repeat(num_experts, 1, 1)
        # Normed hidden states have a mean square near one: this spread gives logits of the order of one.
        router = torch.randn(num_experts, config.hidden_size, generator=generator) / config.hidden_size**0.5
        upcycled[f"{block}gate.weight"] = router.to(gate)
    mixtral = MixtralConfig(
        **{name: getattr(config, name) for name in _SHARED_SETTINGS},
        num_local_experts=num_experts,
        num_experts_per_tok=topk,
        sliding_window=None,
    )
    return MixtralForCausalLM.from_pretrained(None, config=mixtral, state_dict=upcycled, dtype=model.dtype)
