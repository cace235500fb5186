"""Sampling without sorting, and verification of drafted tokens (Leviathan et al., 2022, arXiv 2211.17192).

The weight of an element is the integer part of 2^40 exp((logit - greatest) / temperature). Sums of integers are the
same in any order, so every device draws the same element from the same numbers. The random numbers are Philox4x32-10
(Salmon et al., 2011) of a row's own seed and offset: a row's result does not depend on the rows around it.
"""

import torch

from torch_deepinfer.ops.checks import check, check_float_dtype, name_of, shape_of
from torch_deepinfer.ops.topk import topk


def sample(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    offsets: torch.Tensor | None = None,
    *,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    keep_ties: bool = False,
    return_log_probs: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws one element of each row from the softmax of its logits.

    The filters apply one after the other, as in transformers: top_k, top_p of what that leaves, min_p. Each keeps the
    greatest elements, of equal ones those of the lower index; the greatest of all always stays.

    Args:
        logits: ``[..., V]``, float32, bfloat16 or float16, any strides, V below 2^23. They are not changed.
        seeds: ``[...]`` int64.
        offsets: ``[...]`` int64, 0 by default: the position in a row's sequence of random numbers, which the caller
            advances by one a token.
        temperature: ``[...]`` float32, 1 by default. Below 1e-5 (or NaN) the row takes its first greatest element.
        top_k: ``[...]`` int32; not positive, or V and more: no limit.
        top_p: ``[...]`` float32: an element stays if what comes before it, in descending order, has less than this part
            of the probability. 1 and more: no limit.
        min_p: ``[...]`` float32: an element stays if it has at least this part of the greatest one's probability.
        keep_ties: what equals the last element that top_k keeps stays too, as transformers has it.
        return_log_probs: also the logarithm of the probability, among what the filters left, of what was drawn.

    Returns:
        ``(ids [...] int64, log_probs [...] float32)``; log_probs ``[0]`` unless asked for.

    An element less than 2^-40 times as likely as the greatest is never drawn. A row whose greatest logit is NaN (which
    is the greatest), inf or -inf takes the first such element; its log_prob is NaN for NaN, else 0.

    Raises:
        ValueError: a wrong shape, dtype or device.
    """
    return torch.ops.deepinfer.sample.default(
        logits,
        seeds,
        offsets,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        keep_ties=keep_ties,
        return_log_probs=return_log_probs,
    )


def draw(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    keepdim: bool = False,
) -> torch.Tensor:
    """Draws one element of each row with torch's own generator, as ``torch.multinomial(probs, 1)`` does.

    Args:
        logits: ``[..., V]`` as :func:`sample` takes them.
        temperature, top_k, top_p: as in :func:`sample`, with ``keep_ties``, the same for all rows.
        keepdim: results ``[..., 1]``.

    Returns:
        ids ``[...]`` int64.

    Raises:
        ValueError: a wrong shape or dtype.
    """
    return torch.ops.deepinfer.draw.default(logits, temperature=temperature, top_k=top_k, top_p=top_p, keepdim=keepdim)


def spec_verify(
    target_logits: torch.Tensor,
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    seeds: torch.Tensor,
    offsets: torch.Tensor | None = None,
    *,
    num_drafted: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepts drafted tokens so that what is emitted has the distribution of the target model.

    Draft i is accepted with probability min(1, p_target / p_draft). At the first that is not, a token is drawn from
    max(p_target - p_draft, 0); if all are, one more from the target's next distribution. Rows of temperature 0 accept
    what equals the greatest logit.

    Args:
        target_logits: ``[batch, drafted + 1, V]`` as :func:`sample` takes them; position i follows i drafts.
        draft_ids: ``[batch, drafted]`` int64. An id outside of [0, V) is not accepted.
        draft_probs: ``[batch, drafted, V]`` float32, the distributions that the drafts were drawn from; None if each
            was certain (greedy or n-gram drafting). Where a draft's own probability is NaN it is not accepted, and NaN
            counts as 0.
        seeds, offsets: ``[batch]`` int64. Independent of the numbers that :func:`sample` takes for the same.
        num_drafted: ``[batch]`` int32: how many drafts of a row count, all by default.
        temperature, top_k, top_p, min_p: ``[batch, drafted + 1]``: the target's distributions, as in :func:`sample`.

    Returns:
        ``(ids [batch, drafted + 1] int64, accepted [batch] int32)``: accepted drafts, the token after them, then -1.

    Raises:
        ValueError: a wrong shape, dtype or device.
    """
    return torch.ops.deepinfer.spec_verify.default(
        target_logits,
        draft_ids,
        draft_probs,
        seeds,
        offsets,
        num_drafted=num_drafted,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )


def spec_budget_select(survival: torch.Tensor, verify_cost: torch.Tensor, draft_cost: float = 0.0) -> torch.Tensor:
    """How many drafts of each request to verify, so that most tokens are expected per unit of time.

    Of all drafts of the batch the b most likely to survive are verified, for the b that maximises
    ``(requests + their survival) / (draft_cost + verify_cost[b])``; the least such b.

    Args:
        survival: ``[requests, drafted]`` float32: the probability that a draft and all before it are accepted. Where it
            rises along a row, the least value so far counts.
        verify_cost: ``[requests * drafted + 1]`` float32, the time of a step that verifies b drafts.
        draft_cost: the time of drafting.

    Returns:
        ``[requests]`` int32. Of equally likely drafts earlier positions, then lower requests, come first.

    Raises:
        ValueError: a wrong shape or dtype.
    """
    op = "spec_budget_select"
    check(survival.dim() == 2, f"{op}: survival must be 2-D, [requests, drafted], got shape {shape_of(survival)}")
    check(survival.dtype == torch.float32, f"{op}: survival must be float32, got {name_of(survival.dtype)}")
    requests, drafted = survival.shape
    count = requests * drafted
    check(
        verify_cost.shape == (count + 1,),
        f"{op}: verify_cost must have shape [{count + 1}], got {shape_of(verify_cost)}",
    )
    if count == 0:
        return torch.zeros(requests, dtype=torch.int32, device=survival.device)
    by_position = survival.cummin(-1).values.t().reshape(-1)
    likely, order = topk(by_position, count, sorted=True, index_dtype=torch.int64)
    expected = requests + torch.cat([likely.new_zeros(1), likely.cumsum(0)])
    budget = (expected / (draft_cost + verify_cost)).argmax()
    chosen = (torch.arange(count, device=survival.device) < budget).to(torch.int32)
    return torch.zeros(requests, dtype=torch.int32, device=survival.device).index_add(0, order % requests, chosen)


def penalize_logits(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    num_prompt: torch.Tensor | None = None,
    *,
    repetition: torch.Tensor | None = None,
    presence: torch.Tensor | None = None,
    frequency: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits with the usual penalties on tokens that a row already holds. Made of torch's own operators.

    Args:
        logits: ``[rows, V]``, float32, bfloat16 or float16. They are not changed.
        tokens: ``[rows, L]`` int64: the prompt, then what was generated. Ids outside of [0, V) are padding.
        num_prompt: ``[rows]`` int64: how many entries are the prompt, none by default.
        repetition: ``[rows]`` float32: logits of all tokens are divided by it where positive, else multiplied
            (Keskar et al., 2019, arXiv 1909.05858).
        presence, frequency: ``[rows]`` float32: subtracted once, and once for each occurrence, from the logits of
            generated tokens.

    Returns:
        ``[rows, V]`` of the dtype of ``logits``, computed in float32.

    Raises:
        ValueError: a wrong shape, dtype or device.
    """
    op = "penalize_logits"
    check(logits.dim() == 2, f"{op}: logits must be 2-D, [rows, vocabulary], got shape {shape_of(logits)}")
    check_float_dtype(op, "logits", logits.dtype)
    rows, size = logits.shape
    check(tokens.dim() == 2, f"{op}: tokens must be 2-D, [rows, length], got shape {shape_of(tokens)}")
    _check_argument(op, "tokens", tokens, (rows, tokens.shape[1]), torch.int64, logits)
    _check_argument(op, "num_prompt", num_prompt, (rows,), torch.int64, logits)
    for name, penalty in (("repetition", repetition), ("presence", presence), ("frequency", frequency)):
        _check_argument(op, name, penalty, (rows,), torch.float32, logits)

    valid = (tokens >= 0) & (tokens < size)
    place = torch.where(valid, tokens, size)  # one column more takes the padding
    x = logits.float()
    if repetition is not None:
        seen = torch.zeros(rows, size + 1, dtype=torch.bool, device=x.device).scatter(1, place, True)[:, :size]
        factor = repetition[:, None]
        x = torch.where(seen, torch.where(x > 0, x / factor, x * factor), x)
    if presence is not None or frequency is not None:
        generated = valid.float()
        if num_prompt is not None:
            generated = generated * (torch.arange(tokens.shape[1], device=x.device) >= num_prompt[:, None])
        counts = torch.zeros(rows, size + 1, device=x.device).scatter_add(1, place, generated)[:, :size]
        if presence is not None:
            x = x - (counts > 0) * presence[:, None]
        if frequency is not None:
            x = x - counts * frequency[:, None]
    return x.to(logits.dtype)


def top_log_probs(logits: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``n`` likeliest elements of each row and the logarithms of their probabilities. Made of other operators.

    Args:
        logits: ``[..., V]``, float32, bfloat16 or float16.
        n: how many, at most V.

    Returns:
        ``(log_probs [..., n] float32, ids [..., n] int64)``, the likeliest first, of equal ones the lower id: the
        greatest logits minus the logarithm of the row's sum of exponentials, computed in float32.

    Raises:
        ValueError: a wrong shape, dtype or n.
    """
    op = "top_log_probs"
    check(logits.dim() >= 1, f"{op}: logits must have at least one dimension")
    check_float_dtype(op, "logits", logits.dtype)
    check(0 <= n <= logits.shape[-1], f"{op}: n must lie in [0, {logits.shape[-1]}], got {n}")
    greatest, ids = topk(logits, n, sorted=True, index_dtype=torch.int64)
    return greatest.float() - logits.float().logsumexp(-1, keepdim=True), ids


def _check_argument(op: str, name: str, t: torch.Tensor | None, shape, dtype: torch.dtype, like: torch.Tensor) -> None:
    if t is None:
        return
    check(t.device == like.device, f"{op}: {name} must be on the same device as the first argument")
    check(t.dtype == dtype, f"{op}: {name} must be {name_of(dtype)}, got {name_of(t.dtype)}")
    check(t.shape == shape, f"{op}: {name} must have shape {list(shape)}, got {shape_of(t)}")


def _check_source(op, logits, temperature, top_k, top_p, min_p):
    check_float_dtype(op, "logits", logits.dtype)
    size, shape = logits.shape[-1], logits.shape[:-1]
    check(1 <= size < 2**23, f"{op}: the last dimension of logits must lie in [1, 2^23), got {size}")
    _check_argument(op, "temperature", temperature, shape, torch.float32, logits)
    _check_argument(op, "top_k", top_k, shape, torch.int32, logits)
    _check_argument(op, "top_p", top_p, shape, torch.float32, logits)
    _check_argument(op, "min_p", min_p, shape, torch.float32, logits)


@torch.library.register_fake("deepinfer::sample")
def _sample_meta(
    logits,
    seeds,
    offsets=None,
    *,
    temperature=None,
    top_k=None,
    top_p=None,
    min_p=None,
    keep_ties=False,
    return_log_probs=False,
):
    check(logits.dim() >= 1, "sample: logits must have at least one dimension")
    _check_source("sample", logits, temperature, top_k, top_p, min_p)
    shape = logits.shape[:-1]
    _check_argument("sample", "seeds", seeds, shape, torch.int64, logits)
    _check_argument("sample", "offsets", offsets, shape, torch.int64, logits)
    log_probs = logits.new_empty(shape if return_log_probs else (0,), dtype=torch.float32)
    return logits.new_empty(shape, dtype=torch.int64), log_probs


# Registered from here: a schema with tags, which the stable interface of the oldest torch lacks.
torch.library.define(
    "deepinfer::draw",
    "(Tensor logits, *, float temperature=1.0, int top_k=0, float top_p=1.0, bool keepdim=False) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)


@torch.library.impl("deepinfer::draw", ("cpu", "cuda"))
def _draw(logits, *, temperature=1.0, top_k=0, top_p=1.0, keepdim=False):
    check(logits.dim() >= 1, "draw: logits must have at least one dimension")
    seeds = torch.randint(2**63 - 1, logits.shape[:-1], device=logits.device)
    ids = torch.ops.deepinfer._sample_alike(logits, seeds, temperature, top_k, top_p, True)
    return ids.unsqueeze(-1) if keepdim else ids


@torch.library.register_fake("deepinfer::draw")
def _draw_meta(logits, *, temperature=1.0, top_k=0, top_p=1.0, keepdim=False):
    check(logits.dim() >= 1, "draw: logits must have at least one dimension")
    _check_source("draw", logits, None, None, None, None)
    shape = (*logits.shape[:-1], 1) if keepdim else logits.shape[:-1]
    return logits.new_empty(shape, dtype=torch.int64)


@torch.library.register_fake("deepinfer::spec_verify")
def _spec_verify_meta(
    target_logits,
    draft_ids,
    draft_probs,
    seeds,
    offsets=None,
    *,
    num_drafted=None,
    temperature=None,
    top_k=None,
    top_p=None,
    min_p=None,
):
    op = "spec_verify"
    check(
        target_logits.dim() == 3 and target_logits.shape[1] >= 1,
        f"{op}: target_logits must be 3-D, [batch, drafted + 1, vocabulary], got shape {shape_of(target_logits)}",
    )
    _check_source(op, target_logits, temperature, top_k, top_p, min_p)
    batch, positions, size = target_logits.shape
    drafted = positions - 1
    _check_argument(op, "draft_ids", draft_ids, (batch, drafted), torch.int64, target_logits)
    _check_argument(op, "draft_probs", draft_probs, (batch, drafted, size), torch.float32, target_logits)
    _check_argument(op, "seeds", seeds, (batch,), torch.int64, target_logits)
    _check_argument(op, "offsets", offsets, (batch,), torch.int64, target_logits)
    _check_argument(op, "num_drafted", num_drafted, (batch,), torch.int32, target_logits)
    ids = target_logits.new_empty((batch, positions), dtype=torch.int64)
    return ids, target_logits.new_empty((batch,), dtype=torch.int32)
