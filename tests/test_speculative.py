"""The examples of decoding: speculative, and inside of transformers' generate."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the example needs it")
pytest.importorskip("gguf", reason="the example needs it")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from sampler import Sampler  # noqa: E402
from speculative import ModelDrafter, Sampling, generate, propose  # noqa: E402


def tiny(seed: int, layers: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()


@pytest.fixture(scope="module")
def model() -> Iterator[torch.nn.Module]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a model this small has no work for more
    yield tiny(0, 2)
    torch.set_num_threads(threads)


def test_proposals():
    assert propose([1, 2, 3, 9, 1, 2, 3], 2) == [9, 1]
    assert propose([1, 2, 7, 5, 2, 8, 1, 2], 9) == [7, 5, 2, 8, 1, 2]
    assert propose([1, 2, 3], 4) == []
    assert propose([4], 4) == []


def test_greedy_text_is_the_same(model):
    prompt = [3, 5, 3, 5, 3]
    plain = generate(model, prompt, 60, Sampling(), 0, None)
    fast = generate(model, prompt, 60, Sampling(), 5, None)
    assert fast.ids == plain.ids and len(plain.ids) == 65
    assert plain.steps == 60 and fast.steps < 60
    assert 0 < fast.accepted <= fast.drafted


def test_sampled_text(model):
    first = [generate(model, [3, 5, 3], 1, Sampling(1.0, seed=i), d, None).ids[3] for d in (0, 4) for i in range(150)]
    plain, fast = (torch.tensor(ids).bincount(minlength=40).float() / 150 for ids in (first[:150], first[150:]))
    with torch.no_grad():
        exact = model(torch.tensor([[3, 5, 3]])).logits[0, -1].softmax(-1)
    for observed in (plain, fast):
        assert (observed - exact).abs().sum() < 0.7  # 0.35 is expected


def test_draft_model(model):
    plain = generate(model, [3, 5, 7], 40, Sampling(), 0, None).ids
    for draft, all_accepted in ((model, True), (tiny(1, 1), False)):
        fast = generate(model, [3, 5, 7], 40, Sampling(), 4, None, ModelDrafter(draft, Sampling()))
        assert fast.ids == plain and (fast.accepted == fast.drafted) == all_accepted
    sampled = Sampling(1.0, seed=3)
    same = generate(model, [3, 5, 7], 40, sampled, 4, None, ModelDrafter(model, sampled))
    assert same.accepted >= same.drafted - 1  # equal distributions, up to the rounding of longer inputs


def test_text_of_a_draft_model(model):
    draft, texts = tiny(1, 1), 400
    ids = []
    for seed in range(texts):
        sampling = Sampling(1.0, seed=seed)
        ids.append(generate(model, [3, 5, 3], 2, sampling, 2, None, ModelDrafter(draft, sampling)).ids[3])
    with torch.no_grad():
        exact = model(torch.tensor([[3, 5, 3]])).logits[0, -1].softmax(-1)
    assert (torch.tensor(ids).bincount(minlength=40) / texts - exact).abs().sum() < 0.45  # 0.2 is expected


def test_stops_behind_the_end(model):
    greedy = generate(model, [1, 2], 40, Sampling(), 4, None).ids
    end = greedy[12]
    stopped = generate(model, [1, 2], 40, Sampling(), 4, end).ids
    assert stopped == greedy[: greedy.index(end, 2) + 1]


def test_sampler_in_generate(model):
    prompt = torch.tensor([[3, 5, 3], [7, 8, 9]])

    def text(prompt: torch.Tensor, **settings) -> torch.Tensor:
        processors = [Sampler(**settings)] if settings else []
        return model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12, pad_token_id=0,
            eos_token_id=None, logits_processor=processors,
        )  # fmt: skip

    assert torch.equal(text(prompt, temperature=0.0), text(prompt))
    drawn = text(prompt, top_p=0.9, seed=4)
    assert torch.equal(drawn, text(prompt, top_p=0.9, seed=4)) and not torch.equal(drawn, text(prompt))
    assert torch.equal(text(prompt[1:], top_p=0.9, seed=5), drawn[1:])
    assert len({tuple(text(prompt[:1], seed=i)[0].tolist()) for i in range(5)}) > 1
