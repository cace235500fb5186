"""Speculative decoding. Drafts come from the text, what followed its last tokens before, or from a smaller model.

    python examples/speculative.py --temperature 0.7 "List the first twenty even numbers."
    python examples/speculative.py --model Qwen/Qwen3-4B --draft Qwen/Qwen3-0.6B

Every step runs the model on the last token and the drafts, and ``spec_verify`` accepts as many as the model's own
distribution allows. The distribution of the text is that of plain sampling; at temperature 0 it is the same text.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from loading import load
from transformers import DynamicCache, PreTrainedModel

from torch_deepinfer import ops


@dataclass
class Sampling:
    """The seed and the filters of a text."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def filters(self, *shape: int) -> dict[str, torch.Tensor]:
        """As arguments of ``sample`` and ``spec_verify``."""
        return {"temperature": torch.full(shape, self.temperature), "top_p": torch.full(shape, self.top_p)}


@dataclass
class Text:
    """All token ids, how many steps of the model made them, and the drafts that were proposed and accepted."""

    ids: list[int]
    steps: int = 0
    drafted: int = 0
    accepted: int = 0


def propose(ids: list[int], most: int, longest: int = 3) -> list[int]:
    """What followed the latest earlier occurrence of the last tokens, of as many of them as have occurred before."""
    for length in range(min(longest, len(ids) - 1), 0, -1):
        for start in range(len(ids) - length - 1, -1, -1):
            if ids[start : start + length] == ids[-length:]:
                return ids[start + length : start + length + most]
    return []


# Proposes at most so many tokens to follow a text: ids, and the distributions ``[1, n, V]`` that they were drawn from,
# None if there was no choice.
Drafter = Callable[[list[int], int], tuple[list[int], torch.Tensor | None]]


class ModelDrafter:
    """Drafts with a model of the same vocabulary, a token at a time. It keeps the keys and values of what stays."""

    def __init__(self, model: PreTrainedModel, sampling: Sampling) -> None:
        self.model, self.sampling = model, sampling
        self.cache, self.cached = DynamicCache(config=model.config), list[int]()

    @torch.no_grad()
    def __call__(self, ids: list[int], most: int) -> tuple[list[int], torch.Tensor | None]:
        kept = 0
        while kept < min(len(self.cached), len(ids) - 1) and self.cached[kept] == ids[kept]:
            kept += 1
        if kept < len(self.cached):
            self.cache.crop(kept - len(self.cached))
        drafts, probs, given = list[int](), [], ids[kept:]
        seed, temperature = torch.tensor([self.sampling.seed]), torch.tensor([self.sampling.temperature])
        for place in range(len(ids), len(ids) + most):
            logits = self.model(torch.tensor([given]), past_key_values=self.cache, logits_to_keep=1).logits[:, -1]
            given = ops.sample(logits, seed, torch.tensor([place]), temperature=temperature)[0].tolist()
            drafts += given
            probs.append((logits.float() / temperature).softmax(-1))
        self.cached = ids + drafts[:-1]
        return drafts, torch.stack(probs, 1) if probs and self.sampling.temperature > 0 else None


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    prompt: list[int],
    new_tokens: int,
    sampling: Sampling,
    most_drafts: int,
    end: int | None,
    drafter: Drafter = lambda ids, most: (propose(ids, most), None),
) -> Text:
    """Plain sampling with ``most_drafts`` 0, speculative otherwise. Stops after ``new_tokens`` or behind ``end``."""
    text, cache = Text(list(prompt)), DynamicCache(config=model.config)
    seeds = torch.tensor([sampling.seed])
    while len(text.ids) - len(prompt) < new_tokens and (end is None or end not in text.ids[len(prompt) :]):
        drafts, probs = drafter(text.ids, most_drafts) if most_drafts else ([], None)
        cached = cache.get_seq_length()
        given = torch.tensor([text.ids[cached:] + drafts])
        logits = model(given, past_key_values=cache, use_cache=True, logits_to_keep=len(drafts) + 1).logits
        emitted, accepted = ops.spec_verify(
            logits,
            torch.tensor([drafts], dtype=torch.long),
            probs,
            seeds,
            torch.tensor([len(text.ids)]),
            **sampling.filters(1, len(drafts) + 1),
        )
        text.ids += emitted[0, : accepted + 1].tolist()
        text.steps += 1
        text.drafted += len(drafts)
        text.accepted += int(accepted)
        if accepted < len(drafts):
            cache.crop(int(accepted) - len(drafts))  # forgets the others
    new = text.ids[len(prompt) : len(prompt) + new_tokens]
    text.ids = prompt + (new[: new.index(end) + 1] if end in new else new)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="List the first twenty even numbers, one a line.")
    parser.add_argument("--model", help="as of compile_model.py")
    parser.add_argument(
        "--draft", help="a smaller model with the same tokenizer; without it the text itself is searched"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--drafts", type=int, default=7)
    arguments = parser.parse_args()
    model, tokenizer = load(arguments.model)
    messages = [{"role": "user", "content": arguments.prompt}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    sampling = Sampling(arguments.temperature)
    drafter = {"drafter": ModelDrafter(load(arguments.draft)[0], sampling)} if arguments.draft else {}
    seconds = {}
    for drafts in (0, arguments.drafts):
        start = time.perf_counter()
        text = generate(model, prompt, arguments.tokens, sampling, drafts, tokenizer.eos_token_id, **drafter)
        new = len(text.ids) - len(prompt)
        seconds[drafts] = (time.perf_counter() - start) / new
        print(
            f"{'speculative' if drafts else 'plain':12} {new} tokens in {text.steps} steps, {1 / seconds[drafts]:.1f}/s"
        )
    print(f"{text.accepted} of {text.drafted} drafts accepted, {new / text.steps:.2f} tokens a step, "
          f"{seconds[0] / seconds[arguments.drafts]:.2f}x as fast\n")  # fmt: skip
    print(tokenizer.decode(text.ids[len(prompt) :], skip_special_tokens=True))


if __name__ == "__main__":
    main()
