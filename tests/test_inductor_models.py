"""Every model family: how often each pattern is found and swapped, exactly, and that the logits stay what they were.

Graphs are interpreted, not lowered, so both sides use torch's own kernels for everything that is not swapped.
"""

import copy
from collections import Counter

import pytest
import torch
import transformers
from graphs import Traced, swaps, traced
from tiny_models import FAMILIES, decode_inputs, prefill_inputs, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")  # Dynamo and transformers, about themselves

ALL = {"deepinfer.patterns": "all"}

# Two layers. A layer adds twice to the residual stream, and the last sum meets the final norm: 4 sums before a norm.
DENSE = {"add_rms_norm": 4, "rms_norm": 1, "rotary_embedding": 2, "silu_and_mul": 2}
MOE = {"add_rms_norm": 4, "rms_norm": 1, "rotary_embedding": 2, "moe_router": 2, "fused_experts": 2}
ALL_HEADS_NORM = {"rms_norm": 5}  # of q and of k, each over all heads at once, in each layer
HEAD_NORM = {"qk_norm_rope": 2}
ONE_DENSE_LAYER = {"moe_router": 1, "fused_experts": 1, "shared_expert": 1, "silu_and_mul": 1}
LATENT_NORM = {"rms_norm": 5}  # of the compressed q and kv, in each layer
LATENT_HEADS = {"prefill": {"mla_qk_rope": 2}, "decode": {"mla_q_rope": 2}}  # with or without a cache


def with_head_norm(swaps: dict[str, int]) -> dict[str, int]:
    """Heads that are normed before they are rotated."""
    return {name: count for name, count in swaps.items() if name != "rotary_embedding"} | HEAD_NORM


def latent(swaps: dict[str, int]) -> dict[str, int]:
    """Heads that are rotated in part, with one key for all."""
    return {name: count for name, count in swaps.items() if name != "rotary_embedding"} | LATENT_NORM


SWAPS: dict[str, dict[str, int]] = {
    "llama": DENSE,
    "mistral": DENSE,
    "phi3": DENSE,
    "qwen3": with_head_norm(DENSE),
    # Norms before and after each block: only those before follow a sum.
    "gemma3_text": {"add_rms_norm": 4, "rms_norm": 5, "qk_norm_rope": 2, "gelu_and_mul": 2},
    "qwen2_moe": MOE | {"silu_and_mul": 2},
    "qwen3_moe": with_head_norm(MOE),
    "mixtral": MOE,
    "olmoe": MOE | ALL_HEADS_NORM,
    "deepseek_v2": latent(MOE | ONE_DENSE_LAYER),
    "deepseek_v3": latent(MOE | ONE_DENSE_LAYER),
    "glm4_moe": with_head_norm(MOE | ONE_DENSE_LAYER),
    "gpt_oss": MOE | {"sink_attention": 2},
    "minimax_m2": MOE | ALL_HEADS_NORM,
}
LATENT = {"deepseek_v2", "deepseek_v3"}
# Routers that multiply in float32, whose weight older versions of transformers keep in 16 bits.
OLDER = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24)
WIDENING = {"deepseek_v2", "deepseek_v3", "glm4_moe"} if OLDER else set()
# One token that attends with several heads to the keys of one. The others: latent attention, attention sinks.
GROUPED = {"packed_attention": 2}
NOT_GROUPED = {"phi3", *LATENT, "gpt_oss"}
# The mask of a prompt is built in the model. The others: latent attention, which torch spells out on a CPU, attention
# sinks, and a window that is shorter than the prompt.
OWN_MASK = {"maskless_attention": 2}
NO_OWN_MASK = {*LATENT, "gpt_oss", "gemma3_text"}
# Only ops that round as eager does. Grouped products add in another order; weighted sums of experts and the gelu of
# large negative numbers round less.
EXACT = {"llama", "mistral", "phi3", "qwen3"}

# Rotations whose k goes to a static cache. The others: latent attention, and a cache of a window.
CACHED = {"rotary_embedding": "rotary_embedding_cache_", "qk_norm_rope": "qk_norm_rope_cache_"}
NOT_CACHED = {*LATENT, "gemma3_text"}

DTYPES = [torch.bfloat16, torch.float32]


def inputs_of(model, phase, batch=2, length=16):
    return prefill_inputs(batch, length) if phase == "prefill" else decode_inputs(model, batch)


@torch.no_grad()
def check(model, family, run: Traced, phase: str, batch: int = 2, length: int = 16) -> None:
    """The logits of ``run`` against those of the model itself."""
    ours = run(**inputs_of(model, phase, batch, length)).logits
    eager = model(**inputs_of(model, phase, batch, length)).logits
    if model.dtype == torch.float32:
        torch.testing.assert_close(ours, eager, rtol=0, atol=1e-5)
    elif family in EXACT:
        assert torch.equal(ours, eager)
    else:
        exact = copy.deepcopy(model).float()
        truth = exact(**inputs_of(exact, phase, batch, length)).logits
        error = typical_distance(eager, truth)
        # Two results that are rounded apart are further from each other than either is from the truth.
        assert typical_distance(ours, truth) <= 1.25 * error and typical_distance(ours, eager) <= 1.5 * error


def typical_distance(logits: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """By token and then the median: a token whose experts are nearly tied may get others in either run."""
    return (logits - others).abs().mean(-1).median()


def assert_swapped(run: Traced, *expected: dict[str, int]) -> None:
    """One table of counts for each graph."""
    report = run.report
    assert report.graphs == len(expected)
    assert swaps(report) == dict(sum(map(Counter, expected), Counter())), report
    assert not any(entry.declined or entry.missed for entry in report.patterns.values()), report


def expected(
    family: str, phase: str, dtype: torch.dtype = torch.bfloat16, dynamic: bool | None = None
) -> dict[str, int]:
    attention: dict[str, int] = {}
    if phase == "decode" and family not in NOT_GROUPED:
        attention |= GROUPED
        if family == "gemma3_text" and not dynamic:
            attention |= OWN_MASK  # its cache holds no more than the window, which is full
    if phase == "prefill" and family not in NO_OWN_MASK and not dynamic:
        attention |= OWN_MASK
    heads = {} if family not in LATENT else LATENT_HEADS[phase]
    router = {} if family not in WIDENING or dtype == torch.float32 else {"widened_gemm": 1}
    found = SWAPS[family] | heads | attention | router
    if phase == "decode" and family not in NOT_CACHED:
        found = {CACHED.get(name, name): count for name, count in found.items()}
    return found


def test_the_table_is_complete():
    assert SWAPS.keys() == FAMILIES.keys() and len(FAMILIES) >= 14


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_counts_and_logits(family, dtype, phase):
    model = tiny_model(family, dtype)
    run = traced(model, ALL)
    check(model, family, run, phase)
    assert_swapped(run, expected(family, phase, dtype))


# What generate() decodes with on a GPU. The matrices of GPT-OSS are transposed, its biases are added in place.
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=["bf16", "fp32"]
)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_batched_experts(family, dtype, phase, dynamic):
    model = tiny_model(family, dtype)
    model.set_experts_implementation("batched_mm")
    run = traced(model, ALL, dynamic=dynamic)
    for batch in (2, 1):
        check(model, family, run, phase, batch)
    assert_swapped(run, *[expected(family, phase, dtype, dynamic)] * run.report.graphs)


SOME = ["gemma3_text", "qwen3_moe", "deepseek_v3", "gpt_oss"]
OTHERS = [pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES if family not in SOME]


@pytest.mark.parametrize("family", [*SOME, *OTHERS])
def test_dynamic_shapes(family):
    model = tiny_model(family, torch.bfloat16)
    run = traced(model, ALL, dynamic=True)
    check(model, family, run, "prefill")
    check(model, family, run, "prefill", batch=3, length=11)
    assert_swapped(run, expected(family, "prefill", dynamic=True))


@pytest.mark.parametrize("family", [*SOME, *OTHERS])
def test_automatically_dynamic_shapes(family):
    model = tiny_model(family, torch.bfloat16)
    run = traced(model, ALL)
    check(model, family, run, "prefill")
    check(model, family, run, "prefill", length=11)  # here Dynamo learns that the length varies
    check(model, family, run, "prefill", length=7)
    assert_swapped(run, expected(family, "prefill"), expected(family, "prefill", dynamic=True))


@pytest.mark.parametrize("family", [*SOME, *OTHERS])
def test_batch_of_one(family):
    model = tiny_model(family, torch.bfloat16)
    run = traced(model, ALL)
    check(model, family, run, "prefill", batch=1)
    assert_swapped(run, expected(family, "prefill"))


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=["bf16", "fp32", "fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_combination(family, dtype, phase, dynamic, batch):
    model = tiny_model(family, dtype)
    run = traced(model, ALL, dynamic=dynamic)
    check(model, family, run, phase, batch)
    assert_swapped(run, expected(family, phase, dtype, dynamic))


def test_gates_by_default():
    """Without options only what is known to win is swapped; the rest is counted and explained."""
    model = tiny_model("qwen3_moe", torch.bfloat16)
    run = traced(model)
    check(model, "qwen3_moe", run, "prefill")
    report = run.report
    assert {name: entry.matches for name, entry in report.patterns.items()} == expected("qwen3_moe", "prefill")
    off = {name for name, entry in report.patterns.items() if not entry.swapped}
    assert all(reason.startswith("off on cpu: ") for name in off for reason in report.patterns[name].declined)
    assert swaps(report) == {"moe_router": 2, "fused_experts": 2, "maskless_attention": 2}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
@torch.no_grad()
def test_generated_code_is_as_exact_as_stock(family):
    """No further from the fp32 model than what torch.compile makes of the bf16 model by itself."""
    model = tiny_model(family, torch.bfloat16)
    truth = copy.deepcopy(model).float()(**inputs_of(model, "prefill")).logits
    errors = {}
    for backend in ("inductor", "deepinfer"):
        torch._dynamo.reset()
        logits = torch.compile(model, backend=backend)(**inputs_of(model, "prefill")).logits
        errors[backend] = typical_distance(logits, truth)
    assert errors["deepinfer"] <= 1.25 * errors["inductor"]
