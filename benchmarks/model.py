"""A real model, SmolLM2-135M, as it is and upcycled to 16 experts, top 4: a prefill, and decoding of a batch.

Columns: backend="deepinfer", the uncompiled model, stock torch.compile. A call of a decode row gives every sequence of
the batch its next token behind a prompt in a static cache.
"""

import sys
from functools import partial
from pathlib import Path

import torch
from harness import Bench
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from generation import Generator, Prompt, random_prompt
from loading import load
from upcycle import upcycle

PROMPT_TOKENS = 512


def decode(generate: Generator, prompt: Prompt, forward) -> torch.Tensor:
    """The token after the first one behind the prompt, again and again: each call does the same work."""
    generate.rewind(PROMPT_TOKENS)
    return generate.step(forward, prompt.ids[:, -1:], prompt.mask, prompt.positions[:, PROMPT_TOKENS:][:, :1])


def prefill(generate: Generator, prompt: Prompt, forward) -> torch.Tensor:
    """The first token behind the prompt."""
    generate.rewind(0)
    return generate.step(forward, prompt.ids, prompt.mask, prompt.positions[:, :PROMPT_TOKENS])


def columns(model: PreTrainedModel, phase, batch: int) -> dict[str, partial]:
    """The phase with each way to run the model; all share one cache."""
    generate = Generator(model, batch, cache_length=PROMPT_TOKENS + 64)
    prompt = random_prompt(model.config, batch, PROMPT_TOKENS, new_tokens=64)
    generate(model, prompt, 1)  # fills the cache for decoding
    forwards = {
        "ours": torch.compile(model, backend="deepinfer", dynamic=False),
        "eager": model,
        "stock": torch.compile(model, dynamic=False),
    }
    return {name: partial(phase, generate, prompt, forward) for name, forward in forwards.items()}


def main() -> None:
    bench = Bench("model", __doc__)
    bench.parser.set_defaults(rounds=9)
    rows = [(prefill, 1), (decode, 1), (decode, 8)]
    model, _ = load(None)
    for form in ("dense", "moe"):
        if form == "moe":
            model = upcycle(model)
        for phase, batch in rows:
            case = {"form": form, "phase": f"{phase.__name__}, batch {batch}"}
            if bench.wanted(case):
                bench.row(case, columns(model, phase, batch))
    bench.finish()


if __name__ == "__main__":
    main()
