"""The forward pass of transformers models in the shapes of public ones, with few layers and random weights.

Columns: backend="deepinfer", stock torch.compile, with --autotune both in mode="max-autotune", and with --eager the
uncompiled model. On a GPU every column is replayed from a CUDA graph, as mode="reduce-overhead" does. Tokens are those
of one sequence, without a cache. On a GPU the models are compiled side by side, a process each, and then timed (and
before that tuned) one at a time.
"""

import contextlib
import multiprocessing
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from device_times import captured
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
PATIENCE = 1800  # seconds for all models to be compiled


def build(name: str, device: str) -> transformers.PreTrainedModel:
    """A bfloat16 model whose weights are drawn where it is to run."""
    config_class, changes = SHAPES[name]
    config = getattr(transformers, config_class)(**{"num_hidden_layers": LAYERS, **SMALL_VOCABULARY, **changes})
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


TUNED = {"mode": "max-autotune-no-cudagraphs"}
COLUMNS: dict[str, dict[str, str] | None] = {
    "ours": {"backend": "deepinfer"},
    "stock": {},
    "tuned": {"backend": "deepinfer", **TUNED},
    "stock tuned": TUNED,
    "eager": None,
}


def columns(bench: Bench) -> dict[str, dict[str, str] | None]:
    left_out = set() if bench.args.eager else {"eager"}
    if not bench.args.autotune:
        left_out |= {"tuned", "stock tuned"}
    return {name: options for name, options in COLUMNS.items() if name not in left_out}


Row = tuple[dict[str, Any], dict[str, Callable[[], Any]]]


def compiled(name: str, bench: Bench, tuning: contextlib.AbstractContextManager[Any]) -> list[Row]:
    """The columns of every case of a model; on a GPU called and captured before, the tuned ones in ``tuning``."""
    device = bench.args.device
    torch._dynamo.config.recompile_limit = 64  # every column and number of tokens compiles anew
    cases = [case for tokens in TOKENS if bench.wanted(case := {"model": name, "tokens": tokens})]
    if not cases:
        return []
    model = build(name, device)
    rows = []
    for case in cases:
        ids = torch.randint(3, model.config.vocab_size, (1, case["tokens"]), device=device)
        functions: dict[str, Any] = {}
        for column, options in columns(bench).items():
            run = model if options is None else torch.compile(model, dynamic=False, **options)
            call = partial(run, input_ids=ids, use_cache=False)
            if device == "cuda":
                with torch.no_grad(), tuning if "tuned" in column else contextlib.nullcontext():
                    call = captured(call)
            functions[column] = call
        rows.append((case, functions))
    return rows


def worker(name: str, everybody: Any, turn: Any, results: Any) -> None:
    """Compiles a model, waits until all are compiled, and times it when nobody else is timed."""
    bench = parsed()
    try:
        rows = compiled(name, bench, turn)
    finally:
        everybody.wait(PATIENCE)
    with turn:
        for case, functions in rows:
            bench.row(case, functions)
        results.put(bench.rows)


def parsed() -> Bench:
    bench = Bench("architectures", __doc__)
    bench.parser.add_argument("--autotune", action="store_true", help='time mode="max-autotune" as well')
    bench.parser.add_argument("--eager", action="store_true", help="time the uncompiled model as well")
    bench.parser.set_defaults(rounds=9)
    return bench


def main() -> None:
    bench = parsed()
    names = [name for name in SHAPES if any(bench.wanted({"model": name, "tokens": tokens}) for tokens in TOKENS)]
    if bench.args.device == "cpu":
        for name in names:
            for case, functions in compiled(name, bench, contextlib.nullcontext()):
                bench.row(case, functions)
    else:
        processes = multiprocessing.get_context("spawn")
        everybody, turn, results = processes.Barrier(len(names)), processes.Lock(), processes.SimpleQueue()
        workers = [processes.Process(target=worker, args=(name, everybody, turn, results)) for name in names]
        for each in workers:
            each.start()
        for each in workers:
            each.join()
        while not results.empty():
            bench.rows += results.get()
    bench.rows.sort(key=lambda row: (names.index(row["case"]["model"]), row["case"]["tokens"]))
    bench.finish()


if __name__ == "__main__":
    main()
