"""rotary_embedding_cache_ and qk_norm_rope_cache_: the bits of the ops that they join; nothing is written elsewhere."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from checking import assert_bit_equal, layouts, opcheck
from test_rope_qk_norm import DTYPES, EPS, FORMS, STYLES, needs_gpu, tables, weights

from torch_deepinfer import ops
from torch_deepinfer.reference import rope as reference

OPS = ["rotary_embedding_cache_", "qk_norm_rope_cache_"]
LENGTH = 9


def heads(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def unfused(q, k, v, q_weight, k_weight, cos, sin, key_cache, value_cache, cache_position, **options):
    """The ops one after the other on the device of q, and then plain copies."""
    if "weight_form" in options:
        q, k = ops.qk_norm_rope(q, k, q_weight, k_weight, cos, sin, EPS, **options)
    else:
        q, k = ops.rotary_embedding(q, k, cos, sin, **options)
    for b in range(k.shape[0]):
        for t, slot in enumerate(cache_position.expand(k.shape[:2])[b].tolist()):
            key_cache[b, :, slot] = k[b, t]
            value_cache[b, :, slot] = v[b, t]
    return q


def fused(q, k, v, q_weight, k_weight, cos, sin, key_cache, value_cache, cache_position, module=ops, **options):
    if "weight_form" in options:
        return module.qk_norm_rope_cache_(
            q, k, v, q_weight, k_weight, cos, sin, key_cache, value_cache, cache_position, EPS, **options
        )
    return module.rotary_embedding_cache_(q, k, v, cos, sin, key_cache, value_cache, cache_position, **options)


def check(q, k, v, q_weight, k_weight, cos, sin, key_cache, value_cache, cache_position, **options) -> None:
    """Bit for bit the unfused ops; and what the reference writes lies where it should."""
    results = []
    for call in (fused, unfused, lambda *args, **options: fused(*args, module=reference, **options)):
        caches = [cache.clone() for cache in (key_cache, value_cache)] if results else [key_cache, value_cache]
        before = [cache.clone() for cache in caches]
        results.append((call(q, k, v, q_weight, k_weight, cos, sin, *caches, cache_position, **options), *caches))
        key_cache, value_cache = before
    for actual, expected, plain in zip(*results, strict=True):
        assert_bit_equal(actual, expected)
        tolerance = {torch.float32: 4e-6, torch.bfloat16: 2**-5, torch.float16: 2**-8}[actual.dtype]
        torch.testing.assert_close(actual, plain, rtol=tolerance, atol=tolerance)
    assert results[0][0].is_contiguous()


def caches(batch, kv_heads, head_size, value_size, dtype, device):
    return [heads(batch, kv_heads, LENGTH, size, dtype=dtype, device=device) for size in (head_size, value_size)]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_size", "rotary_dim", "value_size", "form"),
    [
        (64, None, 64, "cast_mul"),
        (128, 64, 128, "mul_cast"),
        (80, 48, 36, "one_plus"),
        (18, 16, 7, "none"),
        (3, 2, 1, "cast_mul"),
    ],
)
def test_equals_the_unfused_ops(device, style, dtype, head_size, rotary_dim, value_size, form):
    scale = weights(head_size, form, dtype, device)
    options = dict(style=style, rotary_dim=rotary_dim)
    for tokens, table_dtype in [(1, dtype), (4, torch.float32)]:
        q = heads(2, tokens, 5, head_size, dtype=dtype, device=device)
        k = heads(2, tokens, 2, head_size, dtype=dtype, device=device)
        v = heads(2, tokens, 2, value_size, dtype=dtype, device=device)
        position = torch.tensor([7, 2, 0, 8], device=device)[:tokens]
        cos, sin = tables(1, tokens, 1, (rotary_dim or head_size) // 2, dtype=table_dtype, device=device)
        room = caches(2, 2, head_size, value_size, dtype, device)
        check(q, k, v, None, None, cos, sin, *room, position, **options)
        check(q, k, v, *scale, cos, sin, *room, position, weight_form=form, **options)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("form", [None, "one_plus"])
def test_a_position_for_each_sequence(device, index_dtype, form):
    """Positions of tokens, of sequences and of both; cosines and sines from a cache."""
    q, k, v = (heads(3, 2, count, 32, device=device) for count in (4, 2, 2))
    scale = weights(32, "one_plus", torch.float32, device) if form else (None, None)
    options = {"weight_form": form} if form else {}
    positions = torch.tensor([[3, 4], [0, 1], [7, 8]], dtype=index_dtype, device=device)
    for slots in (positions, positions[0], positions[:1]):
        room = caches(3, 2, 32, 32, torch.float32, device)
        check(q, k, v, *scale, *tables(3, 2, 1, 16, device=device), *room, slots, **options)
        check(q, k, v, *scale, *tables(LENGTH, 16, device=device), *room, slots, positions=positions[..., None],
              inverse=True, **options)  # fmt: skip
    for slots in (positions[:, :1], positions[0, 0]):
        one = q[:, :1], k[:, :1], v[:, :1]
        check(*one, *scale, *tables(3, 1, 1, 16, device=device), *room, slots, **options)


@pytest.mark.parametrize("form", [None, "cast_mul"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(device, dtype, form):
    """As slices of one projection, as heads first, and any layout of a cache: what lies around it stays as it was."""
    q, k, v = (heads(2, 3, count, 64, dtype=dtype) for count in (4, 2, 2))
    scale = weights(64, form, dtype, device) if form else (None, None)
    options = {"weight_form": form} if form else {}
    position, room = torch.tensor([8, 1, 3], device=device), caches(2, 2, 64, 64, dtype, "cpu")
    cos, sin = tables(3, 1, 32, dtype=dtype, device=device)
    views = zip(*(layouts(x).values() for x in (q, k, v, *room)), strict=True)
    for *rows, keys, values in views:
        around = [cache.as_strided((cache.untyped_storage().nbytes() // cache.element_size(),), (1,), 0)
                  for cache in (keys, values)]  # fmt: skip
        moved = [whole.to(device) for whole in around]
        ours = [whole.as_strided(cache.shape, cache.stride(), cache.storage_offset())
                for whole, cache in zip(moved, (keys, values), strict=True)]  # fmt: skip
        check(*(x.to(device) for x in rows), *scale, cos, sin, *ours, position, **options)
        for cache in ours:  # in its memory, that and nothing else has changed
            cache.fill_(99)
        for cache in (keys, values):
            cache.fill_(99)
        for mine, theirs in zip(moved, around, strict=True):
            assert_bit_equal(mine, theirs)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(data=st.data())
def test_any_shape_and_strides(data):
    batch, tokens, kv_heads = (data.draw(st.integers(0, 3)) for _ in range(3))
    rotary_dim = 2 * data.draw(st.integers(1, 12))
    head_size, value_size = rotary_dim + data.draw(st.integers(0, 9)), data.draw(st.integers(1, 20))
    dtype, table_dtype = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(DTYPES))

    def strided(*shape):
        order = data.draw(st.permutations(range(4)))
        return heads(*shape, dtype=dtype).permute(order).contiguous().permute([order.index(d) for d in range(4)])

    q = strided(batch, tokens, data.draw(st.integers(0, 4)), head_size)
    k, v = strided(batch, tokens, kv_heads, head_size), strided(batch, tokens, kv_heads, value_size)
    room = strided(batch, kv_heads, LENGTH, head_size), strided(batch, kv_heads, LENGTH, value_size)
    slots = torch.stack([torch.randperm(LENGTH)[:tokens] for _ in range(max(batch, 1))])
    slots = slots[:batch] if data.draw(st.booleans()) else slots[0]
    cos, sin = tables(data.draw(st.sampled_from([1, batch])), tokens, 1, rotary_dim // 2, dtype=table_dtype)
    options = {"style": data.draw(st.sampled_from(STYLES)), "rotary_dim": rotary_dim}
    scale = None, None
    if data.draw(st.booleans()):
        options["weight_form"] = data.draw(st.sampled_from(FORMS))
        scale = weights(head_size, options["weight_form"], dtype, "cpu")
    check(q, k, v, *scale, cos, sin, *room, slots, **options)


@pytest.mark.parametrize("bad", [-1, LENGTH])
@pytest.mark.parametrize("form", [None, "none"])
def test_positions_outside_the_cache(bad, form):
    q, k, v = (heads(1, 2, count, 8) for count in (2, 1, 1))
    room = caches(1, 1, 8, 8, torch.float32, "cpu")
    before = [cache.clone() for cache in room]
    name = OPS[form is not None]
    with pytest.raises(ValueError, match=rf"{name}: cache_position must lie in \[0, {LENGTH}\), got {bad}"):
        fused(q, k, v, None, None, *tables(1, 2, 1, 4), *room, torch.tensor([0, bad]),
              **({"weight_form": form} if form else {}))  # fmt: skip
    for cache, was in zip(room, before, strict=True):
        assert_bit_equal(cache, was)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("form", [None, "none"])
def test_positions_outside_the_cache_on_a_gpu(form, index_dtype):
    """Nothing is written for them; q and the other tokens are as ever."""
    q, k, v = (heads(2, 4, count, 64, device="cuda") for count in (4, 2, 2))
    angles = tables(1, 4, 1, 32, device="cuda")
    options = {"weight_form": form} if form else {}
    room = caches(2, 2, 64, 64, torch.float32, "cuda")
    expected = [cache.clone() for cache in room]
    slots = torch.tensor([3, -1, LENGTH, 5], dtype=index_dtype, device="cuda")
    actual_q = fused(q, k, v, None, None, *angles, *room, slots, **options)
    good = [0, 3]
    unfused(q[:, good], k[:, good], v[:, good], None, None, *(t[:, good] for t in angles), *expected, slots[good],
            **options)  # fmt: skip
    for ours, theirs in zip(room, expected, strict=True):
        assert_bit_equal(ours, theirs)
    expected_q = ops.qk_norm_rope(q, None, None, None, *angles, EPS, **options) if form else (
        ops.rotary_embedding(q, None, *angles))  # fmt: skip
    assert_bit_equal(actual_q, expected_q[0])


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("form", [None, "cast_mul"])
def test_replayed_graph(form):
    q, k, v = (heads(16, 1, count, 128, dtype=torch.bfloat16, device="cuda") for count in (32, 8, 8))
    scale = weights(128, "cast_mul", torch.bfloat16, "cuda") if form else (None, None)
    angles = tables(1, 1, 1, 64, dtype=torch.bfloat16, device="cuda")
    options = {"weight_form": form} if form else {}
    room, slot = caches(16, 8, 128, 128, torch.bfloat16, "cuda"), torch.tensor([2], device="cuda")
    expected = [cache.clone() for cache in room]
    call = lambda: fused(q, k, v, *scale, *angles, *room, slot, **options)  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = call()
    unfused(q, k, v, *scale, *angles, *expected, slot, **options)
    for _ in range(3):
        slot += 1
        q.normal_(), k.normal_(), v.normal_()
        graph.replay()
        theirs = unfused(q, k, v, *scale, *angles, *expected, slot, **options)
        for ours, expected_one in zip((actual, *room), (theirs, *expected), strict=True):
            assert_bit_equal(ours, expected_one)


def test_nothing_to_do(device):
    for batch, tokens, kv_heads in [(0, 1, 2), (2, 0, 2), (2, 1, 0)]:
        q, k, v = (heads(batch, tokens, count, 8, device=device) for count in (3, kv_heads, kv_heads))
        slots = torch.arange(tokens, device=device)
        room = caches(batch, kv_heads, 8, 8, torch.float32, device)
        check(q, k, v, None, None, *tables(1, tokens, 1, 4, device=device), *room, slots)


CALL = {
    "q": torch.ones(2, 3, 4, 8),
    "k": torch.ones(2, 3, 2, 8),
    "v": torch.ones(2, 3, 2, 6),
    "cos": torch.ones(3, 1, 4),
    "sin": torch.ones(3, 1, 4),
    "key_cache": torch.ones(2, 2, 5, 8),
    "value_cache": torch.ones(2, 2, 5, 6),
    "cache_position": torch.arange(3),
}


def as_meta(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(style="neox"), "style must be half, interleaved or interleaved_to_half, got neox"),
        (dict(k=torch.ones(2, 3, 2, 6)), r"k must have the last dimension of q, 8, got \[2, 3, 2, 6\]"),
        (dict(q=torch.ones(3, 4, 8)), r"q must be \[batch, tokens, heads, head_size\], got \[3, 4, 8\]"),
        (dict(k=torch.ones(1, 3, 2, 8)), r"k must have the batch and the tokens of q, got \[1, 3, 2, 8\]"),
        (dict(v=torch.ones(2, 3, 1, 6)), r"v must have the batch, the tokens and the heads of k, got \[2, 3, 1, 6\]"),
        (dict(v=torch.ones(2, 3, 2, 6).half()), "v must have the dtype of the rotated k, float32, got float16"),
        (dict(key_cache=torch.ones(2, 5, 2, 8)), r"key_cache must be \[2, 2, length, 8\], got \[2, 5, 2, 8\]"),
        (dict(key_cache=torch.ones(2, 2, 8)), r"key_cache must be \[2, 2, length, 8\], got \[2, 2, 8\]"),
        (dict(value_cache=torch.ones(2, 2, 4, 6)), r"value_cache must be \[2, 2, length, 6\], got \[2, 2, 4, 6\]"),
        (dict(key_cache=torch.ones(2, 2, 5, 8).bfloat16()), "key_cache must have the dtype of the rotated k, float32"),
        (dict(value_cache=torch.ones(2, 2, 5, 6).int()), "value_cache must have the dtype of the rotated k, float32"),
        (dict(cache_position=torch.ones(3)), "cache_position must be int32 or int64, got float32"),
        (
            dict(cache_position=torch.arange(2)),
            r"cache_position of shape \[2\] does not broadcast to the batch and tokens, \[2, 3\]",
        ),
        (dict(cache_position=torch.zeros(1, 1, 3).int()), r"cache_position of shape \[1, 1, 3\] does not broadcast"),
        (
            dict(key_cache=torch.ones(1, 2, 5, 8).expand(2, 2, 5, 8)),
            "key_cache is written and must not be expanded or have elements that share memory",
        ),
    ],
)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("meta", [False, True])
def test_errors(name, change, message, meta):
    arguments = {**CALL, **change}
    if name == OPS[1]:
        arguments |= {"q_weight": None, "k_weight": None, "eps": EPS, "weight_form": "none"}
    if meta:
        arguments = {n: as_meta(a) if isinstance(a, torch.Tensor) else a for n, a in arguments.items()}
    with pytest.raises(ValueError, match=rf"{name}: .*{message}"):
        getattr(ops, name)(**arguments)


@pytest.mark.parametrize("name", ["q", "k", "v", "cos", "sin", "value_cache"])
def test_caches_apart_from_everything_else(name):
    """Cut from one piece of memory, so that they overlap in one element."""
    arguments = {**CALL}
    first, second = arguments["key_cache"], arguments[name]
    memory = torch.zeros(first.numel() + second.numel() - 1)
    arguments["key_cache"] = memory[: first.numel()].view(first.shape)
    arguments[name] = memory[first.numel() - 1 :].view(second.shape)
    with pytest.raises(ValueError, match=r"rotary_embedding_cache_: .*key_cache.* written and must not share memory"):
        ops.rotary_embedding_cache_(**arguments)
    assert not memory.any()


def test_no_gradients():
    arguments = {**CALL, "key_cache": torch.ones(2, 2, 5, 8, requires_grad=True)}
    with pytest.raises(RuntimeError, match="rotary_embedding_cache_: the caches are written without a gradient"):
        ops.rotary_embedding_cache_(**arguments)
    with torch.no_grad():
        ops.rotary_embedding_cache_(**arguments)


@pytest.mark.parametrize(("style", "dtype"), list(zip(STYLES, DTYPES, strict=True)))
def test_opcheck(device, style, dtype):
    joined = heads(2, 3, 8, 16, dtype=dtype, device=device)
    q, k, v = joined.split([4, 2, 2], 2)
    cos, sin = tables(3, 1, 8, device=device)
    keys, values = caches(2, 2, 16, 16, dtype, device)
    weight = heads(16, dtype=dtype, device=device)
    slots = torch.tensor([6, 1, 3], device=device)
    for a, b, at in [(keys, values, slots), (keys.transpose(1, 2).contiguous().transpose(1, 2), values, slots.int())]:
        opcheck(torch.ops.deepinfer.rotary_embedding_cache_.default, (q, k, v, cos, sin, a, b, at, None, style))
        opcheck(
            torch.ops.deepinfer.qk_norm_rope_cache_.default,
            (q, k, v, weight, weight, cos, sin, a, b, at, EPS),
            {"style": style},
        )
    one = [x[:, :1] for x in (q, k, v)]
    opcheck(torch.ops.deepinfer.rotary_embedding_cache_.default, (*one, cos[:1], sin[:1], keys, values, slots[:1]))


@torch.no_grad()
def test_compiled_by_stock_inductor():
    """A mutating op of a model's own: written where it is."""
    arguments = {n: a.clone() for n, a in CALL.items()}
    expected = {n: a.clone() for n, a in CALL.items()}
    q = torch.compile(lambda **given: ops.rotary_embedding_cache_(**given) + 1, fullgraph=True)(**arguments)
    assert_bit_equal(q, ops.rotary_embedding_cache_(**expected) + 1)
    for ours, theirs in zip(arguments.values(), expected.values(), strict=True):
        assert_bit_equal(ours, theirs)
