"""Random graphs out of the pieces that models are made of, in any order and with any value kept: swapped or not, the
results stay. tests/test_inductor_mutants.py alters single nodes of known graphs; here the graphs are new.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import traced
from products import relative_error
from test_inductor_batched_experts import batched_experts
from test_inductor_moe import (
    HIDDEN,
    TOKENS,
    cast_back,
    expert_inputs,
    experts,
    gpt_oss,
    limited,
    logits_of,
    renormalized,
    sigmoid_bias,
    topk_softmax,
)
from test_inductor_patterns import NORMS, ROTATIONS, angles

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]

HEADS, HEAD_SIZE = 2, HIDDEN // 2
ROUTERS = [renormalized, cast_back, topk_softmax, sigmoid_bias, limited]
ERRORS = {torch.float32: 1e-3, torch.bfloat16: 0.15}

Step = Callable[[dict[str, Any], torch.Tensor, torch.Tensor], torch.Tensor]


def rotated(x: torch.Tensor, rotate: Callable[..., Any], given: dict[str, Any], norm: Any = None) -> torch.Tensor:
    """The rows as heads of one sequence."""
    heads = x.view(1, TOKENS, HEADS, HEAD_SIZE)
    if norm is not None:
        heads = norm(heads, given["head_weight"])
    out = rotate(heads.transpose(1, 2), given["cos"].unsqueeze(1), given["sin"].unsqueeze(1))
    return out.transpose(1, 2).reshape(TOKENS, HIDDEN)


def latent(x: torch.Tensor, y: torch.Tensor, rotate: Callable[..., Any], given: dict[str, Any]) -> torch.Tensor:
    """The rows as one head each of q and k, whose last columns are rotated."""
    cos, sin = given["cos"].unsqueeze(1), given["sin"].unsqueeze(1)
    heads = []
    for rows in (x, y):
        nope, rope = rows.view(1, TOKENS, 1, HIDDEN).transpose(1, 2).split([HIDDEN - HEAD_SIZE, HEAD_SIZE], -1)
        heads.append(torch.cat([nope, rotate(rope, cos, sin)], -1).view(TOKENS, HIDDEN))
    return heads[0] - heads[1]


def routed(x: torch.Tensor, router: Callable[..., Any], spelling: Callable[..., Any], given: dict[str, Any]) -> Any:
    weights, ids = router(given["logits"], given["bias"])
    return spelling(x, given["gate_up"], given["down"], ids, weights)


def halves(x: torch.Tensor, act: Callable[..., Any]) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([act(first, second), second], -1)


def steps(choose: random.Random) -> Step:
    """One random step from two earlier values to a new one."""
    norm, rotate, router = choose.choice(list(NORMS.values())), choose.choice(ROTATIONS), choose.choice(ROUTERS)
    spelling, number = choose.choice([experts, batched_experts]), choose.choice([0.5, -1.0, 2.0])
    kinds: list[Step] = [
        lambda g, x, y: x + y,
        lambda g, x, y: x - y,
        lambda g, x, y: norm(x, g["weight"]),
        lambda g, x, y: norm(x + y, g["weight"]),
        lambda g, x, y: norm(x, g["weight"]) + x,
        lambda g, x, y: x @ g["matrix"],
        lambda g, x, y: F.silu(x) * y,
        lambda g, x, y: F.gelu(x, approximate="tanh") * y,
        lambda g, x, y: gpt_oss(x, y),
        lambda g, x, y: halves(x, lambda a, b: F.silu(a) * b),
        lambda g, x, y: halves(x, lambda a, b: F.gelu(b) * a),
        lambda g, x, y: rotated(x, rotate, g),
        lambda g, x, y: rotated(x, rotate, g, norm),
        lambda g, x, y: latent(x, y, rotate, g),
        lambda g, x, y: routed(x, router, spelling, g),
        lambda g, x, y: routed(norm(x, g["weight"]), router, spelling, g) + y,
        lambda g, x, y: x * number,
        lambda g, x, y: torch.cat([-x[..., HIDDEN // 2 :], y[..., : HIDDEN // 2]], -1),
        lambda g, x, y: x.float().softmax(-1).to(x.dtype),
        lambda g, x, y: (x.float() * x.float().pow(2).mean(-1, keepdim=True).add(1.0).rsqrt()).to(x.dtype),
        lambda g, x, y: x.flip(0),
    ]
    return choose.choice(kinds)


def program(seed: int) -> tuple[Callable[..., Any], dict[str, Any], torch.dtype]:
    """A function of named tensors, and the tensors."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    dtype = choose.choice([torch.float32, torch.float32, torch.bfloat16])
    plan = [(steps(choose), choose.random(), choose.random()) for _ in range(choose.randint(2, 9))]
    kept = [choose.random() < 0.2 for _ in plan[:-1]] + [True]
    x, gate_up, down, _, _ = expert_inputs(dtype)
    cos, sin = angles(TOKENS, HEAD_SIZE, dtype)
    given = {
        "x": x,
        "y": torch.randn(TOKENS, HIDDEN).to(dtype),
        "gate_up": gate_up,
        "down": down,
        "logits": logits_of(dtype),
        "bias": (torch.rand(logits_of().shape[1]) / 20).to(dtype),
        "weight": torch.randn(HIDDEN).to(dtype),
        "head_weight": torch.randn(HEAD_SIZE).to(dtype),
        "matrix": (torch.randn(HIDDEN, HIDDEN) / HIDDEN**0.5).to(dtype),
        "cos": cos,
        "sin": sin,
    }

    def run(given: dict[str, Any]) -> list[torch.Tensor]:
        values = [given["x"], given["y"]]
        for step, first, second in plan:  # mostly recent values
            operands = [values[-1 - int(place**2 * len(values))] for place in (first, second)]
            values.append(step(given, *operands))
        return [value for value, keep in zip(values[2:], kept, strict=True) if keep]

    return run, given, dtype


@torch.no_grad()
@pytest.mark.parametrize("first", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(50, 2000, 50))])
def test_random_graphs(first):
    swapped = 0
    for seed in range(first, first + 50):
        run, given, dtype = program(seed)
        compiled = traced(run, {"deepinfer.patterns": "all"})
        for ours, eager in zip(compiled(given), run(given), strict=True):
            assert ours.dtype == eager.dtype and ours.shape == eager.shape and ours.stride() == eager.stride()
            if eager.isfinite().all():
                assert relative_error(ours, eager) < ERRORS[dtype], f"seed {seed}: {compiled.report}"
        swapped += sum(entry.swapped for entry in compiled.report.patterns.values())
    assert swapped > 25
