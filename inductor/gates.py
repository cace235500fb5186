"""Which pattern is swapped on which device.

A match is swapped only where the fused op is known to win against what Inductor makes of the unfused chain. The table
holds the measured reason. ``options={"deepinfer.patterns": [...]}`` overrides it.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Gate:
    """``gain`` is what a swap brings against stock ``torch.compile``; ``reason`` says why a pattern is off.

    With ``max_rows`` a pattern is off where it is known to work on more rows, with ``min_rows`` where it is not known
    to work on as many; a dynamic number of rows is not known.
    """

    on: bool
    gain: str = ""
    reason: str = ""
    max_rows: int | None = None
    min_rows: int | None = None


ONE_KERNEL = "Inductor already makes one kernel of it"

GATES: Mapping[tuple[str, str], Gate] = {
    ("fused_experts", "cpu"): Gate(True, gain="1.2x to 3x, alone"),
    ("shared_expert", "cpu"): Gate(False, reason="not measured"),
    ("moe_router", "cpu"): Gate(True, gain="21x at 4096 tokens, alone"),
    ("add_rms_norm", "cpu"): Gate(False, reason=ONE_KERNEL),
    ("rms_norm", "cpu"): Gate(False, reason=ONE_KERNEL),
    ("rotary_embedding", "cpu"): Gate(False, reason="3x alone, but no gain in whole models"),
    ("qk_norm_rope", "cpu"): Gate(False, reason="4x alone at decode, slower at prefill"),
    ("rotary_embedding_cache_", "cpu"): Gate(False, reason="no gain in whole models"),
    ("qk_norm_rope_cache_", "cpu"): Gate(False, reason="no gain in whole models"),
    ("mla_qk_rope", "cpu"): Gate(False, reason="1.2x to 3.2x alone, but no gain in whole models"),
    ("mla_q_rope", "cpu"): Gate(False, reason="2x alone, but no gain in front of attention"),
    ("silu_and_mul", "cpu"): Gate(False, reason=ONE_KERNEL),
    ("gelu_and_mul", "cpu"): Gate(False, reason=ONE_KERNEL),
    ("draw", "cpu"): Gate(True, gain="2.7x to 400x, alone"),
    ("topk", "cpu"): Gate(True, gain="2x to 8x, alone"),
    ("packed_attention", "cpu"): Gate(True, gain="1.2x to 31x, alone"),
    ("maskless_attention", "cpu"): Gate(True, gain="1.0x to 1.5x, alone"),
    ("sink_attention", "cpu"): Gate(True, gain="1.5x to 3.3x, alone"),
    ("widened_gemm", "cpu"): Gate(False, reason="not measured"),
    ("fused_experts", "cuda"): Gate(True, gain="1.2x to 1.9x in a whole model"),
    ("shared_expert", "cuda"): Gate(True, gain="1.0x to 1.5x, alone"),
    ("moe_router", "cuda"): Gate(True, gain="6x to 57x, alone"),
    ("widened_gemm", "cuda"): Gate(True, gain="up to 1.05x in a whole model"),
    ("maskless_attention", "cuda"): Gate(True, gain="1.8x to 3.7x, windows up to 20x, alone"),
    ("decode_attention", "cuda"): Gate(
        True, gain="0.9x to 1.35x against cuDNN on a full cache, 1.3x to 2.2x on a half of one, alone"
    ),
    ("sink_attention", "cuda"): Gate(True, gain="4x to 35x, alone"),
    ("grouped_query_attention", "cuda"): Gate(True, gain="1.4x to 8x at decode, alone"),
    ("packed_attention", "cuda"): Gate(
        True, gain="5x to 6x, alone", reason="too few blocks to fill the device", min_rows=256
    ),
    ("prefill_attention", "cuda"): Gate(True, gain="1.02x to 1.06x in a whole model, on Hopper"),
    ("latent_attention", "cuda"): Gate(True, gain="1.00x to 1.01x in a whole model"),
    ("qk_norm_rope", "cuda"): Gate(True, gain="1.5x to 1.7x, alone"),
    ("rotary_embedding_cache_", "cuda"): Gate(False, reason="1.004x to 1.006x in a whole model"),
    ("qk_norm_rope_cache_", "cuda"): Gate(True, gain="1.006x to 1.02x in a whole model at decode"),
    ("mla_qk_rope", "cuda"): Gate(True, gain="1.3x to 2.3x, alone"),
    ("mla_q_rope", "cuda"): Gate(False, reason="no gain over rotary_embedding in a whole model"),
    ("add_rms_norm", "cuda"): Gate(True, gain="1.01x to 1.04x in a whole model"),
    ("rms_norm", "cuda"): Gate(True, gain="1.01x to 1.04x in a whole model"),
    ("rotary_embedding", "cuda"): Gate(True, gain="1.01x to 1.04x in a whole model"),
    ("silu_and_mul", "cuda"): Gate(True, gain="1.00x to 1.03x in a whole model"),
    ("gelu_and_mul", "cuda"): Gate(True, gain="1.00x to 1.03x in a whole model"),
    ("topk", "cuda"): Gate(True, gain="6x to 11x, alone, on rows of a vocabulary"),
    ("draw", "cuda"): Gate(False, reason="fast with top-k, but top-p alone may take many passes over the row"),
}


def gate(pattern: str, device_type: str) -> Gate:
    """The entry of the table; a pair that is missing is off."""
    return GATES.get((pattern, device_type), Gate(False, reason=f"not measured on {device_type}"))


def gain(pattern: str) -> str:
    """The expected gain of a swap on the devices of the table, as text."""
    known = [f"{entry.gain} on {device}" for (name, device), entry in GATES.items() if name == pattern and entry.gain]
    return ", ".join(known) or "not measured"
