"""Every decoder family of transformers that the patterns know something of: what is found in a tiny model of it.

``python tests/families.py`` traces them all and writes the table of the installed version of transformers,
tests/families-*.json, and from the newest one docs/families.md; names as arguments refresh only these.
tests/test_families.py compares.
"""

import copy
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from graphs import swaps, traced
from tiny_models import FAMILIES, VOCABULARY, build, decode_inputs, prefill_inputs

HERE = Path(__file__).parent
VERSION = ".".join(transformers.__version__.split(".")[:2])
TABLE, PAGE = HERE / f"families-{VERSION}.json", HERE.parent / "docs" / "families.md"

# Values for what a configuration calls its sizes; those that it knows are set.
SIZES: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "expert_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "num_dense_layers": 1,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 8,
    "sliding_window": 8,
    "query_pre_attn_scalar": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "laurel_rank": 8,
    "num_kv_shared_layers": 0,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 96,
}
_LATENT = {"num_key_value_heads": 4}  # as many as there are heads; its head size is the sum of two others
SPECIAL: dict[str, dict[str, Any]] = {
    "deepseek_v32": _LATENT,
    "gemma4_text": {"enable_moe_block": True, "top_k_experts": 2, "hidden_size_per_layer_input": 0},
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _LATENT,
    "gptj": {"rotary_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 1,
        "layer_types": ["chunked_attention", "full_attention"],
        "attention_chunk_size": 8,
    },
    "minicpm3": _LATENT,
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "youtu": _LATENT,
}
# Others that have something to find, of which the sizes above make a tiny model.
PLAIN = [
    "afmoe",
    "apertus",
    "arcee",
    "aria_text",
    "bailing_hybrid",
    "bamba",
    "bitnet",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "cwm",
    "deepseek_v4",
    "diffllama",
    "doge",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone",
    "exaone4",
    "exaone_moe",
    "falcon_h1",
    "falcon_mamba",
    "flex_olmo",
    "gemma",
    "gemma2",
    "gemma3n_text",
    "glm",
    "glm4",
    "gpt_neox",
    "gptj",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "granitemoeshared",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hy_v3",
    "jamba",
    "jetmoe",
    "kimi_linear",
    "lfm2",
    "mamba",
    "mimo_v2_flash",
    "minimax",
    "ministral",
    "ministral3",
    "modernbert-decoder",
    "moshi",
    "nanochat",
    "nemotron",
    "nemotron_h",
    "olmo",
    "olmo2",
    "olmo3",
    "olmo_hybrid",
    "persimmon",
    "phi",
    "phimoe",
    "qwen2",
    "seed_oss",
    "smollm3",
    "solar_open",
    "stablelm",
    "starcoder2",
    "vaultgemma",
]
NAMES = sorted({*FAMILIES, *SPECIAL, *PLAIN} & {*transformers.CONFIG_MAPPING})
PHASES = ("prefill", "decode")
TORCH = torch.__version__.split("+")[0]


def newest() -> Path:
    """The table of the newest version that there is one of."""
    return max(HERE.glob("families-*.json"), key=lambda path: [int(number) for number in path.stem[9:].split(".")])


def tiny(family: str) -> transformers.PreTrainedModel:
    """A bfloat16 model of two layers."""
    if family in FAMILIES:
        return build(FAMILIES[family][0], FAMILIES[family][1], torch.bfloat16)
    configuration = transformers.CONFIG_MAPPING[family]
    known = configuration()
    sizes = {name: size for name, size in SIZES.items() if hasattr(known, name)} | SPECIAL.get(family, {})
    if "qk_rope_head_dim" in sizes:
        sizes["head_dim"] = sizes["qk_rope_head_dim"]
    return build(configuration.__name__, sizes, torch.bfloat16)


@torch.no_grad()
def found(model: transformers.PreTrainedModel, phase: str) -> dict[str, Any]:
    """``swapped``: pattern to count; ``left``: pattern to reasons and their counts; both only where there are some."""
    run = traced(model, {"deepinfer.patterns": "all"})
    try:
        inputs = prefill_inputs() if phase == "prefill" else decode_inputs(model)
        run(**copy.copy(inputs))
    except (TypeError, ValueError, AttributeError, KeyError, NotImplementedError, RuntimeError) as error:
        return {"error": type(error).__name__}
    report = run.report
    left = {
        name: {reason.split(" (")[0]: count for reason, count in (entry.declined + entry.missed).items()}
        for name, entry in report.patterns.items()
        if entry.declined or entry.missed
    }
    result = {"graphs": report.graphs, "swapped": dict(sorted(swaps(report).items())), "left": left}
    return {key: value for key, value in result.items() if value and (key, value) != ("graphs", 1)}


def entry(family: str) -> dict[str, Any]:
    """What is found in either phase; once if it is the same."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = tiny(family)
        phases = {phase: found(model, phase) for phase in PHASES}
    return {"both": phases["prefill"]} if phases["prefill"] == phases["decode"] else phases


def page(table: dict[str, dict[str, Any]]) -> str:
    """docs/families.md."""
    patterns = sorted(
        {name for phases in table.values() for phase in phases.values() for name in phase.get("swapped", {})}
    )
    lines = [
        "# Model families",
        "",
        'What `backend="deepinfer"` finds in models of transformers, of two layers each, with every pattern on,',
        "and what it leaves alone. Which of these are swapped by default is up to the gates: [compile.md](compile.md).",
        "Where two numbers stand, the first is of a prompt, the second of a decoding step with a static cache.",
        f"Written by `python tests/families.py` with torch {TORCH} and transformers {transformers.__version__}.",
        "",
        f"| family | {' | '.join(f'`{name}`' for name in patterns)} | left alone |",
        f"|---|{'---|' * len(patterns)}---|",
    ]
    for family, phases in table.items():
        given = [phases.get("both", phases.get(phase)) for phase in PHASES]
        cells = [_cell(given, name) for name in patterns]
        lines.append(f"| {family} | {' | '.join(cells)} | {_left(given)} |")
    return "\n".join(lines) + "\n"


def _cell(phases: list[dict[str, Any]], pattern: str) -> str:
    counts = [str(phase.get("swapped", {}).get(pattern, 0)) for phase in phases if "error" not in phase]
    if len(set(counts)) == 1:
        return counts[0] if counts[0] != "0" else ""
    return " / ".join(counts)


def _left(phases: list[dict[str, Any]]) -> str:
    notes: dict[str, None] = {}
    for phase in phases:
        for pattern, why in phase.get("left", {}).items():
            notes |= {f"`{pattern}`: {count} x {reason}": None for reason, count in why.items()}
        if "graphs" in phase:
            notes[f"{phase['graphs']} graphs"] = None
        if "error" in phase:
            notes["no decoding with a static cache"] = None
    return "; ".join(notes)


def main() -> None:
    table = json.loads(TABLE.read_text()) if TABLE.exists() and sys.argv[1:] else {}
    for family in sys.argv[1:] or NAMES:
        table[family] = entry(family)
        print(family, table[family], flush=True)
    table = dict(sorted(table.items()))
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
    if newest() == TABLE:
        PAGE.write_text(page(table))


if __name__ == "__main__":
    main()
