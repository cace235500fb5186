"""Greedy generation with a static cache: two shapes for the compiler, the prompt and the single token.

This is the loop of ``transformers``' own ``generate`` with nothing around it, so that what is timed is the model.
Prompts are padded on the left to one length; the attention mask covers the whole cache from the start.
"""

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, StaticCache
from transformers.cache_utils import StaticLayer


@dataclass
class Generated:
    """Token ids ``[batch, new_tokens]`` and the seconds of the prefill and of each decode step."""

    tokens: torch.Tensor
    prefill_seconds: float
    decode_seconds: list[float]


@dataclass
class Prompt:
    """Token ids ``[batch, length]``, and the mask ``[batch, length + new_tokens]`` that is 0 on padding."""

    ids: torch.Tensor
    mask: torch.Tensor

    @property
    def new_tokens(self) -> int:
        return self.mask.shape[1] - self.ids.shape[1]

    @property
    def positions(self) -> torch.Tensor:
        """Of prompt and new tokens ``[batch, length + new_tokens]``; padding does not count."""
        return (self.mask.cumsum(-1) - 1).clamp(min=0)


def random_prompt(config: PreTrainedConfig, batch: int, length: int, new_tokens: int, seed: int = 0) -> Prompt:
    """Random token ids: unlike padding they spread over the experts, which a timing needs."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocab_size, (batch, length), generator=generator)
    return Prompt(ids, torch.ones(batch, length + new_tokens, dtype=torch.long))


def chat_prompt(tokenizer: PreTrainedTokenizerBase, text: str, length: int, new_tokens: int) -> Prompt:
    """One user message in the model's chat format (as it is if there is none), padded on the left."""
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    else:
        ids = tokenizer(text)["input_ids"]
    ids = ids[-length:]
    padding = length - len(ids)
    mask = [0] * padding + [1] * (len(ids) + new_tokens)
    return Prompt(torch.tensor([[0] * padding + ids]), torch.tensor([mask]))


class Generator:
    """Generates with any callable form of ``model``, eager or compiled, in one cache that is used again."""

    def __init__(self, model: PreTrainedModel, batch: int, cache_length: int) -> None:
        self.model = model
        self.cache = StaticCache(config=model.config, max_cache_len=cache_length)
        # A window that holds the whole cache is no window. Its layers would count in Python and recompile every step.
        window = getattr(model.config, "sliding_window", None) or 0
        if window >= cache_length:
            self.cache.layers = [StaticLayer(cache_length) for _ in self.cache.layers]
        renamed = "cache" in inspect.signature(model.forward).parameters  # in transformers 5.24
        self._cache_argument = {"cache" if renamed else "past_key_values": self.cache}
        with torch.no_grad():
            model(torch.zeros(batch, 1, dtype=torch.long), **self._cache_argument)  # allocates the cache

    def __call__(self, forward: Callable[..., Any], prompt: Prompt, new_tokens: int | None = None) -> Generated:
        """Greedy decoding of ``new_tokens`` (all that the prompt has room for) after a prefill."""
        length = prompt.ids.shape[1]
        end = length + (prompt.new_tokens if new_tokens is None else new_tokens) - 1
        positions = prompt.positions
        self.cache.reset()
        start = time.perf_counter()
        tokens = [self.step(forward, prompt.ids, prompt.mask, positions[:, :length])]
        marks = [time.perf_counter()]
        for i in range(length, end):
            tokens.append(self.step(forward, tokens[-1], prompt.mask, positions[:, i : i + 1]))
            marks.append(time.perf_counter())
        steps = [after - before for before, after in pairwise(marks)]
        return Generated(torch.cat(tokens, dim=1), marks[0] - start, steps)

    @torch.no_grad()
    def step(
        self, forward: Callable[..., Any], ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Puts ``ids`` ``[batch, tokens]`` behind what the cache holds; returns the next token ``[batch, 1]``."""
        output = forward(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **self._cache_argument,
        )
        return output.logits[:, -1].argmax(-1, keepdim=True)

    def rewind(self, length: int) -> None:
        """Forgets all but the first ``length`` tokens."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(length)
