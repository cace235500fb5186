"""One model run three ways: uncompiled, with stock torch.compile, and with backend="deepinfer"."""

import copy
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from generation import Generator, chat_prompt, random_prompt
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from torch_deepinfer.inductor import Report, report

EAGER, BASELINE, OURS = "eager", "stock", "deepinfer"
VARIANTS: dict[str, dict[str, Any] | None] = {
    EAGER: None,
    BASELINE: {"backend": "inductor"},
    OURS: {"backend": "deepinfer"},
}
MESSAGES = [
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Give me five tips for learning a new language.",
]


@dataclass(frozen=True)
class Size:
    """How much is run; a timing is the median of ``rounds`` samples."""

    prompt_tokens: int = 512
    new_tokens: int = 48
    timed_tokens: int = 12
    rounds: int = 5
    messages: int = len(MESSAGES)

    @property
    def steps(self) -> int:
        """How often :func:`compare` calls ``advance``."""
        return len(VARIANTS) * (1 + self.rounds) + 2 * self.messages


@dataclass
class Timing:
    """Seconds of a prefill or of a decode step, and how many times faster than stock torch.compile that is."""

    phase: str
    variant: str
    tokens: int
    first_call: float
    samples: list[float] = field(default_factory=list)
    ratio: float = 1.0

    @property
    def seconds(self) -> float:
        return statistics.median(self.samples)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass
class Text:
    """What the uncompiled model wrote, and how many of its tokens the compiled one repeats before it first differs."""

    message: str
    text: str
    tokens: int
    agree: int


@dataclass
class Comparison:
    """All that is known of one form of a model."""

    form: str
    timings: list[Timing]
    texts: list[Text]
    report: Report

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the fields and the figures derived from them."""
        timings = [asdict(t) | {"seconds": t.seconds, "tokens_per_second": t.tokens_per_second} for t in self.timings]
        return asdict(self) | {"timings": timings}


def compare(
    form: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    size: Size,
    advance: Callable[[str], None],
) -> Comparison:
    """Compiles, times and compares; ``advance`` hears what comes next.

    The variants take turns, so that a busy machine disturbs all of them alike, and a ratio is the median of the rounds'
    own ratios.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # the report of this form starts here
    forwards = {
        variant: torch.compile(model, dynamic=False, **settings) if settings else model
        for variant, settings in VARIANTS.items()
    }
    generate = Generator(model, batch=1, cache_length=size.prompt_tokens + size.new_tokens)
    timings = _time(forwards, generate, size, advance)
    swapped = report()
    torch._dynamo.reset()
    return Comparison(form, timings, _write(model, tokenizer, size, advance), swapped)


def _write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, size: Size, advance: Callable[[str], None]
) -> list[Text]:
    """Greedy text of the uncompiled model and of ours, both in float32.

    In bfloat16 the order of a sum can tip a near tie between two tokens, and from there on the texts differ.
    """
    model = model if model.dtype == torch.float32 else copy.deepcopy(model).float()
    forwards = {EAGER: model, OURS: torch.compile(model, dynamic=False, **VARIANTS[OURS])}
    generate = Generator(model, batch=1, cache_length=size.prompt_tokens + size.new_tokens)
    texts = []
    for message in MESSAGES[: size.messages]:
        prompt = chat_prompt(tokenizer, message, size.prompt_tokens, size.new_tokens)
        written = {}
        for variant, forward in forwards.items():
            advance(f"writing, {variant}")
            written[variant] = generate(forward, prompt).tokens[0].tolist()
        expected = written[EAGER][: _length_of_text(written[EAGER], model.generation_config.eos_token_id)]
        text = tokenizer.decode(expected, skip_special_tokens=True)
        texts.append(Text(message, text, len(expected), _leading_equal(written[OURS], expected)))
    return texts


def _time(
    forwards: dict[str, Callable[..., Any]], generate: Generator, size: Size, advance: Callable[[str], None]
) -> list[Timing]:
    prompt = random_prompt(generate.model.config, 1, size.prompt_tokens, size.new_tokens)
    prefill, decode = {}, {}
    for variant, forward in forwards.items():
        advance(f"first call, {variant}")
        first = generate(forward, prompt, 2)
        prefill[variant] = Timing(f"prefill {size.prompt_tokens}", variant, size.prompt_tokens, first.prefill_seconds)
        decode[variant] = Timing("decode", variant, 1, first.decode_seconds[0])

    variants = list(forwards)
    for i in range(size.rounds):
        turn = i % len(variants)
        for variant in variants[turn:] + variants[:turn]:
            advance(f"round {i + 1} of {size.rounds}, {variant}")
            run = generate(forwards[variant], prompt, 1 + size.timed_tokens)
            prefill[variant].samples.append(run.prefill_seconds)
            decode[variant].samples.append(statistics.median(run.decode_seconds))

    for phase in (prefill, decode):
        for timing in phase.values():
            pairs = zip(phase[BASELINE].samples, timing.samples, strict=True)
            timing.ratio = statistics.median(stock / own for stock, own in pairs)
    return [*prefill.values(), *decode.values()]


def _length_of_text(tokens: list[int], end: int | list[int] | None) -> int:
    """The tokens up to and with the first one that ends the text."""
    ends = end if isinstance(end, list) else [end]
    return next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))


def _leading_equal(tokens: list[int], expected: list[int]) -> int:
    return next((i for i, token in enumerate(expected) if tokens[i] != token), len(expected))
