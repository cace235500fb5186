"""``experts_implementation="deepinfer"`` for transformers: the experts of a model in one op, without a compiler too.

Compiled models don't need it: the backend finds the experts in the graphs of ``"grouped_mm"``, the default of
transformers, and of ``"batched_mm"``. It is for eager runs, and for models that were loaded with ``"eager"``, whose
Python loop over the experts breaks a graph in pieces::

    import torch_deepinfer.inductor  # after transformers: this registers the name

    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="deepinfer")
    model.set_experts_implementation("deepinfer")  # or of a model that is there
"""

import importlib
import sys
from typing import Any

import torch

from torch_deepinfer import ops

NAME = "deepinfer"
# Classes of torch and of transformers, whose names of them differ from version to version.
_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELU": "gelu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}


_moe: Any = None  # the module of transformers, imported ahead: Dynamo does not trace through its lazy packages


def register() -> None:
    """Makes the name known to transformers, if the program has imported it."""
    global _moe
    if "transformers" in sys.modules:
        try:
            _moe = importlib.import_module("transformers.integrations.moe")
        except ImportError:  # before version 5
            return
        _moe.ALL_EXPERTS_FUNCTIONS[NAME] = experts_forward


def experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Takes the place of the forward of a module of experts.

    Args:
        module: the experts, with the parameters and flags that transformers gives it.
        hidden_states: [tokens, hidden_size].
        top_k_index: [tokens, k] ids of experts; ids past the last expert belong to another process and add nothing.
        top_k_weights: [tokens, k].

    What ``fused_experts`` has no form of, a gate of the model's own for instance, runs by grouped products; so does
    training.
    """
    activation = _activation(module)
    if activation is None or (torch.is_grad_enabled() and module.gate_up_proj.requires_grad):
        return _moe.grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    gate_up, down = module.gate_up_proj, module.down_proj
    if module.is_transposed:
        gate_up, down = gate_up.mT, down.mT
    biases = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)
    return ops.fused_experts(
        hidden_states,
        gate_up,
        down,
        top_k_index,
        top_k_weights,
        gate_up_bias=biases[0],
        down_bias=biases[1],
        activation=activation,
    )


def _activation(experts: Any) -> str | None:
    """The name that ``fused_experts`` has for what stands between the products; None if it has none."""
    own_gate = getattr(type(experts), "_apply_gate", None) is not _moe._default_apply_gate
    if own_gate or not experts.has_gate or getattr(experts, "has_post_expert_norm", False):
        return None
    function = experts.act_fn
    if getattr(function, "approximate", "none") != "none":
        return None
    return _ACTIVATIONS.get(type(function).__name__)
