import math

import pytest
import torch
from checking import assert_bit_equal, layouts, opcheck
from samples import SAMPLES

from torch_deepinfer import ops
from torch_deepinfer.reference import sampling as reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def column(rows: int, value: float, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.full((rows,), value, dtype=dtype, device=device)


def on(device: str, arguments: dict) -> dict:
    return {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in arguments.items()}


def draws(logits: torch.Tensor, count: int, **filters: float) -> torch.Tensor:
    """How often each element of one row is drawn."""
    device = logits.device
    dtypes = {"top_k": torch.int32}
    columns = {n: column(count, v, dtypes.get(n, torch.float32), device) for n, v in filters.items()}
    ids, _ = ops.sample(logits.expand(count, -1), torch.arange(count, device=device), **columns)
    return ids.bincount(minlength=logits.shape[-1]).cpu()


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Of a chi-square test, with the normal approximation of Wilson and Hilferty."""
    assert (counts[probabilities == 0] == 0).all()
    kept = probabilities > 0
    expected = probabilities[kept].double() * counts.sum()
    degrees = int(kept.sum()) - 1
    chi = ((counts[kept] - expected) ** 2 / expected).sum().item()
    z = ((chi / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2))


WHOLE = {"top_k": [3, 1, 50, 700, 0, 20, 2000, 5]}  # of logits that are whole numbers: many are equal
FILTERS = {
    "none": {},
    "top_k": {"top_k": [1, 5, 50, 700, 0, -1, 2**31 - 1, 3]},
    "top_p": {"top_p": [0.0, 0.1, 0.5, 0.9, 0.999, 1.0, 2.0, 0.3]},
    "min_p": {"min_p": [0.0, 0.01, 0.1, 0.5, 1.0, 2.0, 1e-6, 0.3]},
    "all": {"top_k": [50] * 4 + [500] * 4, "top_p": [0.9, 0.2] * 4, "min_p": [0.0, 0.05] * 4},
}


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 17, 1000, 12928, 40003])
def test_matches_reference(device, size, dtype, filters):
    logits = (3 * torch.randn(8, size)).to(dtype)
    temperature = torch.tensor([1.0, 0.7, 0.0, 2.0, 1e-6, 1.0, 30.0, -1.0])
    columns = {n: torch.tensor(v, dtype=torch.int32 if n == "top_k" else torch.float32) for n, v in filters.items()}
    arguments = {"temperature": temperature, **columns, "return_log_probs": True}
    seeds, offsets = torch.randint(-(2**62), 2**62, (8,)), torch.randint(0, 2**40, (8,))
    expected = reference.sample(logits, seeds, offsets, **arguments)
    actual = ops.sample(logits.to(device), seeds.to(device), offsets.to(device), **on(device, arguments))
    assert_bit_equal(actual[0], expected[0])
    torch.testing.assert_close(actual[1].cpu(), expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [17, 1000, 40003])
def test_ties_are_kept(device, size, dtype):
    logits = (2 * torch.randn(8, size)).round().to(dtype)
    seeds = torch.arange(8)
    for top_p in (None, torch.tensor([0.9, 1.0, 0.5, 0.99, 0.9, 0.1, 0.7, 1.0])):
        arguments = {"top_k": torch.tensor(WHOLE["top_k"], dtype=torch.int32), "top_p": top_p, "keep_ties": True}
        expected = reference.sample(logits, seeds, **arguments, return_log_probs=True)
        actual = ops.sample(logits.to(device), seeds.to(device), **on(device, arguments), return_log_probs=True)
        assert_bit_equal(actual[0], expected[0])
        torch.testing.assert_close(actual[1].cpu(), expected[1], rtol=1e-5, atol=1e-5)
    tied = torch.tensor([3.0, 1.0, 3.0, 3.0, 2.0], dtype=dtype, device=device).expand(200, -1)
    one = column(200, 1, torch.int32, device)
    ids = ops.sample(tied, torch.arange(200, device=device), top_k=one, keep_ties=True)[0]
    assert ids.unique().tolist() == [0, 2, 3]


def test_draw(device):
    logits = torch.randn(30, 2000, device=device)
    torch.manual_seed(3)
    first = ops.draw(logits, temperature=0.8, top_k=40, top_p=0.9)
    torch.manual_seed(3)
    seeds = torch.randint(2**63 - 1, (30,), device=device)
    filters = {
        "temperature": column(30, 0.8, device=device),
        "top_k": column(30, 40, torch.int32, device),
        "top_p": column(30, 0.9, device=device),
    }
    assert_bit_equal(first, ops.sample(logits, seeds, **filters, keep_ties=True)[0])
    assert not torch.equal(first, ops.draw(logits, temperature=0.8, top_k=40, top_p=0.9))
    assert torch.equal(ops.draw(logits, temperature=0.0, keepdim=True), logits.argmax(-1, keepdim=True))
    for bad in (logits.double(), logits[:, :0]):
        with pytest.raises(ValueError, match="logits"):
            ops.draw(bad)
        with pytest.raises(ValueError, match="logits"):
            ops.draw(bad.to("meta"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0])
def test_devices_agree(dtype, scale):
    for size, rows in ((129280, 3), (129280, 200), (501, 300), (40000, 40)):
        logits = (scale * torch.randn(rows, size)).to(dtype)
        for name in FILTERS:
            arguments = {
                "temperature": torch.rand(rows) * 2 - 0.1,
                "top_k": torch.randint(-1, 3000, (rows,)).int() if name in ("top_k", "all") else None,
                "top_p": torch.rand(rows) * 1.1 if name in ("top_p", "all") else None,
                "min_p": torch.rand(rows) ** 4 if name in ("min_p", "all") else None,
                "keep_ties": rows == 200,
            }
            seeds = torch.randint(2**62, (rows,))
            expected = ops.sample(logits, seeds, **arguments)
            actual = ops.sample(logits.cuda(), seeds.cuda(), **on("cuda", arguments))
            assert_bit_equal(actual[0], expected[0], f"{name} {rows} x {size}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "filters", [{}, {"temperature": 0.6}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 30, "top_p": 0.7}]
)
def test_distribution(device, dtype, filters):
    logits = (1.5 * torch.randn(200)).to(dtype)
    given = [filters.get(n, d) for n, d in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))]
    weights = reference.weights(logits, *given).double()
    assert p_value(draws(logits.to(device), 100_000, **filters), weights / weights.sum()) > 1e-3


# The same with a million draws, together with all filters.
@pytest.mark.slow
@pytest.mark.parametrize("filters", [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 40, "top_p": 0.95}])
def test_distribution_of_a_million(device, filters):
    logits = 1.5 * torch.randn(100)
    given = [filters.get(n, d) for n, d in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))]
    weights = reference.weights(logits, *given).double()
    assert p_value(draws(logits.to(device), 1_000_000, **filters), weights / weights.sum()) > 1e-3


def test_log_prob(device):
    logits = torch.randn(50, 3000, device=device)
    seeds = torch.arange(50, device=device)
    ids, log_probs = ops.sample(logits, seeds, return_log_probs=True)
    expected = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    torch.testing.assert_close(log_probs, expected, rtol=1e-5, atol=1e-5)


# A row draws the same whatever rows are around it, in any layout; offsets and seeds alone change it.
def test_rows_are_independent(device):
    logits = torch.randn(40, 5000).to(device)
    seeds = torch.arange(40, device=device) * 7919
    top_p = column(40, 0.95, device=device)
    ids, _ = ops.sample(logits, seeds, top_p=top_p)
    for row in (0, 17, 39):
        assert ops.sample(logits[row], seeds[row], top_p=top_p[row])[0] == ids[row]
    for name, view in layouts(logits).items():
        assert_bit_equal(ops.sample(view, seeds, top_p=top_p)[0], ids, name)
    assert (ops.sample(logits, seeds, seeds + 1, top_p=top_p)[0] != ids).any()


# transformers#18976, #19839, vllm#50979, vllm#14181
def test_edges_of_the_filters(device):
    exact = torch.tensor([0.5, 0.25, 0.125, 0.125], device=device).log2() * math.log(2)
    for top_p, kept in ((0.4, [0]), (0.6, [0, 1]), (1.0, [0, 1, 2, 3]), (0.0, [0])):
        assert draws(exact, 2000, top_p=top_p).nonzero()[:, 0].tolist() == kept
    tied = torch.tensor([1, 2, 2, 2, 3.0], device=device)
    assert draws(tied, 2000, top_k=3).nonzero()[:, 0].tolist() == [1, 2, 4]
    assert draws(torch.full((3,), 2.0, device=device), 500, top_k=1).tolist() == [500, 0, 0]
    assert draws(torch.full((8,), 2.0, device=device), 500, top_p=0.0).tolist() == [500] + 7 * [0]
    assert (draws(torch.zeros(16, device=device), 2000, top_k=17) > 0).all()


# pytorch#192812: what has no probability is never drawn.
def test_masked_elements(device):
    logits = torch.full((151936,), -math.inf, device=device).half()
    logits[5] = 3.0
    assert draws(logits, 200)[5] == 200
    assert draws(logits, 200, temperature=math.inf)[5] == 200
    logits[70000] = 3.0
    assert draws(logits, 400).nonzero()[:, 0].tolist() == [5, 70000]


# FreeToken#471: greedy rows take the first maximum, whatever the seed, and leave the others alone.
def test_greedy(device):
    logits = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]], device=device).bfloat16()
    taken = set()
    for seed in range(100):
        seeds = torch.tensor([seed, seed], device=device)
        ids, _ = ops.sample(logits, seeds, temperature=torch.tensor([0.0, 1.0], device=device))
        assert ids[0] == 0
        taken.add(int(ids[1]))
    assert taken == {0, 1, 2}


def test_rows_without_a_distribution(device):
    logits = torch.randn(4, 100)
    logits[0, 40:42] = math.nan
    logits[1, 30:32] = math.inf
    logits[2] = -math.inf
    logits[3, 3], logits[3, 2] = math.nan, math.inf
    ids, log_probs = ops.sample(logits.to(device), torch.arange(4, device=device), return_log_probs=True)
    assert ids.tolist() == [40, 30, 0, 3]
    assert log_probs.isnan().tolist() == [True, False, False, True]


# guidance#1327
def test_logits_are_not_changed(device):
    logits = torch.randn(2, 32, device=device)
    before = logits.clone()
    ops.sample(logits, torch.arange(2, device=device), temperature=column(2, 0.5, device=device))
    assert_bit_equal(logits, before)


def drafted(batch: int, count: int, size: int) -> dict:
    draft = torch.randn(batch, count, size).softmax(-1)
    return {
        "target_logits": torch.randn(batch, count + 1, size),
        "draft_ids": draft.view(-1, size).multinomial(1).view(batch, count),
        "draft_probs": draft,
        "seeds": torch.arange(batch) + 2**40,
    }


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("size", [3, 100, 20000])
def test_verify_matches_reference(device, size, certain):
    batch, count = 12, 5
    arguments = drafted(batch, count, size)
    if certain:
        arguments["draft_probs"] = None
        arguments["draft_ids"] = arguments["target_logits"][:, :-1].argmax(-1)
    shape = (batch, count + 1)
    arguments |= {
        "offsets": torch.arange(batch),
        "num_drafted": torch.tensor([5, 4, 0, -1, 9, 5] * 2, dtype=torch.int32),
        "temperature": torch.where(torch.rand(shape) < 0.2, 0.0, 1 + torch.rand(shape)),
        "top_k": torch.randint(-1, 60, shape).int(),
        "top_p": 0.5 + 0.7 * torch.rand(shape),
    }
    expected = reference.spec_verify(**arguments)
    actual = ops.spec_verify(**on(device, arguments))
    assert_bit_equal(actual[0], expected[0])
    assert_bit_equal(actual[1], expected[1])


# What is emitted first has the target's distribution, whatever the draft's is.
@pytest.mark.parametrize("batch", [60_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("certain", [False, True])
def test_verified_distribution(device, certain, batch):
    size = 12
    target, draft = torch.randn(2, size), torch.randn(size).softmax(-1)
    ids, accepted = ops.spec_verify(
        target.expand(batch, 2, size).to(device),
        (torch.full((batch, 1), 3) if certain else draft.expand(batch, -1).multinomial(1)).to(device),
        None if certain else draft.expand(batch, 1, size).to(device),
        torch.arange(batch, device=device),
    )
    probabilities = target.softmax(-1)
    assert p_value(ids[:, 0].cpu().bincount(minlength=size), probabilities[0]) > 1e-3
    second = ids[accepted == 1, 1].cpu()
    assert p_value(second.bincount(minlength=size), probabilities[1]) > 1e-3
    overlap = probabilities[0, 3] if certain else torch.minimum(probabilities[0], draft).sum()
    assert abs(accepted.float().mean().item() - overlap.item()) < 0.02


# vllm#53029: NaN in the draft or the target, a residual of nothing, ids outside of the vocabulary.
def test_verify_nasty(device):
    size = 12928
    logits = torch.full((5, 2, size), -20.0)
    logits[:, 0, 777] = logits[:, 1, 778] = 5.0
    logits[1] = math.nan
    probs = torch.zeros(5, 1, size)
    probs[0] = probs[1] = math.nan
    probs[2:, 0] = logits[2, 0].softmax(-1)
    drafts = torch.tensor([[0], [5], [777], [size], [-1]])
    ids, accepted = ops.spec_verify(
        logits.to(device), drafts.to(device), probs.to(device), torch.arange(5, device=device)
    )
    assert accepted.tolist() == [0, 0, 1, 0, 0]
    assert ids.tolist() == [[777, -1], [0, -1], [777, 778], [777, -1], [777, -1]]


def test_verify_greedy(device):
    logits = torch.randn(6, 4, 50).bfloat16()
    drafts = logits[:, :3].argmax(-1)
    drafts[1, 1] = (drafts[1, 1] + 1) % 50
    drafts[2, 0] = (drafts[2, 0] + 1) % 50
    ids, accepted = ops.spec_verify(
        logits.to(device), drafts.to(device), None, torch.arange(6, device=device),
        temperature=torch.zeros(6, 4, device=device),
    )  # fmt: skip
    assert accepted.tolist() == [3, 1, 0, 3, 3, 3]
    best = logits.argmax(-1)
    for row, count in enumerate(accepted.tolist()):
        assert ids[row].tolist() == best[row, : count + 1].tolist() + [-1] * (3 - count)


def test_budget(device):
    survival = torch.tensor([[0.9, 0.8, 0.1], [0.5, 0.6, 0.4], [0.05, 0.01, 0.0]], device=device)
    free = torch.ones(10, device=device)
    assert ops.spec_budget_select(survival, free).tolist() == [3, 3, 2]
    dear = 1 + 10.0 * torch.arange(10, device=device)
    assert ops.spec_budget_select(survival, dear).tolist() == [0, 0, 0]
    step = torch.where(torch.arange(10, device=device) <= 4, 1.0, 100.0)
    assert ops.spec_budget_select(survival, step).tolist() == [2, 2, 0]
    assert ops.spec_budget_select(survival[:, :0], free[:1]).tolist() == [0, 0, 0]


def test_budget_is_the_best_of_all():
    for _ in range(20):
        survival = torch.rand(4, 3).cumprod(-1)
        cost = (1 + torch.rand(13)).cumsum(0)
        lengths = ops.spec_budget_select(survival, cost, 2.0)

        def value(counts, survival=survival, cost=cost):
            gained = sum(survival[r, :n].sum() for r, n in enumerate(counts))
            return ((4 + gained) / (2.0 + cost[sum(counts)])).item()

        best = max(value(torch.unravel_index(torch.tensor(i), (4, 4, 4, 4))) for i in range(256))
        assert value(lengths.tolist()) == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_penalties(device, dtype):
    logits = torch.randn(3, 6).to(dtype)
    logits[0, 3] = -math.inf
    tokens = torch.tensor([[0, 0, 3, 5, 5, 5], [1, 2, -1, 2, 1, 6], [-1, -1, -1, -1, -1, -1]])
    num_prompt = torch.tensor([2, 1, 0])
    repetition, presence, frequency = torch.tensor([1.5, 0.5, 2.0]), torch.tensor([0.3, -0.2, 1.0]), torch.rand(3)
    expected = logits.float().clone()
    for row in range(3):
        for token in range(6):
            x = expected[row, token]
            if token in tokens[row]:
                x = x / repetition[row] if x > 0 else x * repetition[row]
            count = (tokens[row, num_prompt[row] :] == token).sum()
            if count > 0:
                x = x - presence[row]
            expected[row, token] = x - count * frequency[row]
    arguments = {"repetition": repetition, "presence": presence, "frequency": frequency}
    before = logits.clone()
    given = on(device, {"logits": logits, "tokens": tokens, "num_prompt": num_prompt, **arguments})
    torch.testing.assert_close(ops.penalize_logits(**given).cpu(), expected.to(dtype))
    assert_bit_equal(given["logits"], before)
    assert_bit_equal(ops.penalize_logits(given["logits"], given["tokens"]), before)
    for change in ({"tokens": given["tokens"][:2]}, {"presence": presence.double().to(device)}, {"logits": tokens}):
        with pytest.raises(ValueError, match="penalize_logits: "):
            ops.penalize_logits(**given | change)


@pytest.mark.parametrize("dtype", DTYPES)
def test_top_log_probs(device, dtype):
    logits = (3 * torch.randn(4, 2, 500)).to(dtype).to(device)
    log_probs, ids = ops.top_log_probs(logits, 5)
    assert log_probs.dtype == torch.float32 and ids.dtype == torch.int64
    expected = logits.double().log_softmax(-1)
    torch.testing.assert_close(log_probs.double(), expected.gather(-1, ids), atol=1e-5, rtol=0)
    assert torch.equal(logits.gather(-1, ids), logits.topk(5).values)
    seeds = torch.zeros(4, 2, dtype=torch.int64, device=device)
    drawn = ops.sample(logits, seeds, temperature=torch.zeros(4, 2, device=device))[0]
    assert torch.equal(drawn, ids[..., 0])
    for bad, message in (((logits, 501), "n must lie in"), ((logits.double(), 1), "logits must be float32")):
        with pytest.raises(ValueError, match=f"top_log_probs: {message}"):
            ops.top_log_probs(*bad)


# The last element that is kept is a zero: below it lies -0, which equals it.
@pytest.mark.parametrize("dtype", DTYPES)
def test_nucleus_ends_at_a_zero(device, dtype):
    logits = torch.full((2, 300), -math.inf)
    logits[:, 1::2] = 0.0
    logits[1, 3::4] = -0.0
    seeds = torch.arange(2)
    expected = reference.sample(logits.to(dtype), seeds, top_p=torch.tensor([0.5, 0.9]))[0]
    given = on(device, {"logits": logits.to(dtype), "seeds": seeds, "top_p": torch.tensor([0.5, 0.9])})
    ids, log_probs = ops.sample(**given, return_log_probs=True)
    assert torch.equal(ids.cpu(), expected)
    assert log_probs[0].item() == pytest.approx(-math.log(75), rel=1e-6)


@pytest.mark.parametrize(
    "op", [torch.ops.deepinfer.sample, torch.ops.deepinfer.draw, torch.ops.deepinfer.spec_verify], ids=str
)
def test_opcheck(device, op):
    args, kwargs = SAMPLES[str(op).removeprefix("deepinfer.")]()
    args = tuple(a.to(device) if isinstance(a, torch.Tensor) else a for a in args)
    opcheck(op.default, args, kwargs)


def test_no_rows(device):
    ids, log_probs = ops.sample(torch.empty(0, 9, device=device), torch.empty(0, dtype=torch.int64, device=device))
    assert ids.shape == (0,) and log_probs.shape == (0,)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"logits": torch.zeros(2, 8, dtype=torch.float64)},
            "logits must be float32, bfloat16 or float16, got",
        ),
        ({"logits": torch.zeros(2, 0)}, r"the last dimension of logits must lie in \[1, 2\^23\), got 0"),
        ({"logits": torch.zeros(())}, "logits must have at least one dimension"),
        ({"seeds": torch.zeros(2, dtype=torch.int32)}, "seeds must be int64, got int32"),
        ({"seeds": torch.zeros(3, dtype=torch.int64)}, r"seeds must have shape \[2\], got \[3\]"),
        ({"offsets": torch.zeros(2)}, "offsets must be int64, got float32"),
        ({"temperature": torch.zeros(2, dtype=torch.float64)}, "temperature must be float32, got float64"),
        ({"top_k": torch.zeros(2, dtype=torch.int64)}, "top_k must be int32, got int64"),
        ({"top_p": torch.zeros(2, 1)}, r"top_p must have shape \[2\], got \[2, 1\]"),
        ({"min_p": torch.zeros(1)}, r"min_p must have shape \[2\], got \[1\]"),
    ],
)
def test_errors(change, message):
    arguments = {"logits": torch.zeros(2, 8), "seeds": torch.zeros(2, dtype=torch.int64)} | change
    for place in (arguments, on("meta", arguments)):
        with pytest.raises(ValueError, match=f"sample: {message}"):
            ops.sample(**place)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"target_logits": torch.zeros(2, 8)}, r"target_logits must be 3-D, \[batch, drafted \+ 1, vocabulary\], got"),
        ({"draft_ids": torch.zeros(2, 4, dtype=torch.int64)}, r"draft_ids must have shape \[2, 3\], got \[2, 4\]"),
        ({"draft_probs": torch.zeros(2, 3, 9)}, r"draft_probs must have shape \[2, 3, 8\], got \[2, 3, 9\]"),
        ({"seeds": torch.zeros(2, 1, dtype=torch.int64)}, r"seeds must have shape \[2\], got \[2, 1\]"),
        ({"temperature": torch.zeros(2)}, r"temperature must have shape \[2, 4\], got \[2\]"),
        ({"num_drafted": torch.zeros(2, dtype=torch.int64)}, "num_drafted must be int32, got int64"),
    ],
)
def test_verify_errors(change, message):
    arguments = drafted(2, 3, 8) | change
    for place in (arguments, on("meta", arguments)):
        with pytest.raises(ValueError, match=f"spec_verify: {message}"):
            ops.spec_verify(**place)


def test_budget_errors():
    for survival, cost, message in (
        (torch.zeros(3), torch.zeros(4), "survival must be 2-D"),
        (torch.zeros(2, 2).double(), torch.zeros(5), "survival must be float32, got float64"),
        (torch.zeros(2, 2), torch.zeros(4), r"verify_cost must have shape \[5\], got \[4\]"),
    ):
        with pytest.raises(ValueError, match=f"spec_budget_select: {message}"):
            ops.spec_budget_select(survival, cost)
