"""The forward pass of transformers models in the shapes of public ones, with few layers and random weights.

Columns: backend="deepinfer", stock torch.compile, with --autotune both in mode="max-autotune", and with --eager the
uncompiled model. On a GPU every column is replayed from a CUDA graph, as mode="reduce-overhead" does. Rows: the tokens
of one sequence, without a cache; with --decode instead one token of each sequence of a batch, behind a static cache
(not for models with sliding windows, whose caches count in Python). On a GPU the models are compiled side by side, a
process each (with --autotune, which takes minutes, each row a process with its own copy of the model), and then timed
one at a time; tuning, too, times one candidate at a time.
"""

import inspect
import multiprocessing
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from device_times import captured
from harness import Bench
from torch._inductor.runtime.benchmarking import benchmarker

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
BATCHES = (1, 16, 64)
CACHE = 1024  # positions, half of which hold tokens at first; each call adds one
WINDOWED = ("gpt_oss", "gemma3_text")
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


Case = dict[str, Any]
Row = tuple[Case, dict[str, Callable[[], Any]]]


def cases_of(name: str, bench: Bench) -> list[Case]:
    if bench.args.decode:
        cases = [{"model": name, "batch": batch, "cache": CACHE} for batch in BATCHES if name not in WINDOWED]
    else:
        cases = [{"model": name, "tokens": tokens} for tokens in TOKENS]
    return [case for case in cases if bench.wanted(case)]


def one_sequence(model: transformers.PreTrainedModel, tokens: int) -> dict[str, Any]:
    ids = torch.randint(3, model.config.vocab_size, (1, tokens), device=model.device)
    return {"input_ids": ids, "use_cache": False}


def behind_a_cache(model: transformers.PreTrainedModel, batch: int) -> dict[str, Any]:
    cache = transformers.StaticCache(config=model.config, max_cache_len=CACHE)
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    inputs = {
        "input_ids": torch.randint(3, model.config.vocab_size, (batch, 1), device=model.device),
        "attention_mask": torch.ones(batch, CACHE, dtype=torch.long, device=model.device),
        "position_ids": torch.full((batch, 1), CACHE // 2, device=model.device),
        "use_cache": True,
        argument: cache,
    }
    with torch.no_grad():
        model(**inputs)  # allocates
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
        layer.cumulative_length.fill_(CACHE // 2)
    return inputs


def compiled(cases: list[Case], bench: Bench) -> list[Row]:
    """The columns of the cases, all of one model; on a GPU called and captured before."""
    device = bench.args.device
    torch._dynamo.config.recompile_limit = 64  # every column and number of tokens compiles anew
    model = build(cases[0]["model"], device)
    rows = []
    for case in cases:
        inputs = behind_a_cache(model, case["batch"]) if bench.args.decode else one_sequence(model, case["tokens"])
        functions: dict[str, Any] = {}
        for column, options in columns(bench).items():
            run = model if options is None else torch.compile(model, dynamic=False, **options)
            call = partial(run, **inputs)
            if device == "cuda":
                began = time.perf_counter()
                with torch.no_grad():
                    call = captured(call)
                print(f"{case}: {column} compiled in {time.perf_counter() - began:.0f} s", flush=True)
            functions[column] = call
        rows.append((case, functions))
    return rows


def tune_in_turn(turn: Any) -> None:
    """Lets Inductor time a candidate only while no other process times one."""
    benchmark = benchmarker.benchmark

    def alone(*args: Any, **kwargs: Any) -> float:
        with turn:
            return benchmark(*args, **kwargs)

    benchmarker.benchmark = alone


def worker(cases: list[Case], everybody: Any, turn: Any, results: Any) -> None:
    """Compiles the cases of a model, waits until all are compiled, and times them when nobody else is timed."""
    bench = parsed()
    tune_in_turn(turn)
    try:
        rows = compiled(cases, bench)
    finally:
        everybody.wait(PATIENCE)
    with turn:
        for case, functions in rows:
            bench.row(case, functions)
        results.put(bench.rows)


def parsed() -> Bench:
    bench = Bench("architectures", __doc__)
    bench.parser.add_argument(
        "--decode", action="store_true", help="one token behind a cache instead of whole sequences"
    )
    bench.parser.add_argument("--autotune", action="store_true", help='time mode="max-autotune" as well')
    bench.parser.add_argument("--eager", action="store_true", help="time the uncompiled model as well")
    bench.parser.set_defaults(rounds=9)
    return bench


def main() -> None:
    bench = parsed()
    names = list(SHAPES)
    shares = [cases for name in names if (cases := cases_of(name, bench))]
    if bench.args.autotune:
        shares = [[case] for cases in shares for case in cases]
    if bench.args.device == "cpu":
        for cases in shares:
            for case, functions in compiled(cases, bench):
                bench.row(case, functions)
    else:
        processes = multiprocessing.get_context("spawn")
        everybody, turn, results = processes.Barrier(len(shares)), processes.Lock(), processes.SimpleQueue()
        workers = [processes.Process(target=worker, args=(cases, everybody, turn, results)) for cases in shares]
        for each in workers:
            each.start()
        for each in workers:
            each.join()
        while not results.empty():
            bench.rows += results.get()
    bench.rows.sort(key=lambda row: (names.index(row["case"]["model"]), list(row["case"].values())[1]))
    if bench.args.decode:
        bench.name = "decode"
    if bench.args.autotune:
        bench.name += "-autotune"
    bench.finish()


if __name__ == "__main__":
    main()
