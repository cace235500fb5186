"""The backend as a user meets it: names, options, modes, caches, training, other people's passes."""

import json
import os
import re
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from graphs import swaps, traced
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass

import torch_deepinfer.inductor as inductor
from torch_deepinfer.inductor import gates, settings
from torch_deepinfer.inductor.passes import Chain, SwapPass, compose
from torch_deepinfer.inductor.rewrite import Rewrites


class Norm(nn.Module):
    """Llama's RMSNorm behind a residual addition."""

    def __init__(self, hidden_size: int = 32, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden_size))
        self.eps = eps

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual + x
        hidden = total.float()
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * hidden.to(total.dtype), total


ALL = {"deepinfer.patterns": "all"}


def run_python(code: str, **environment: str) -> str:
    """Standard output of a fresh interpreter that runs ``code``."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deepinfer.pattern": "all"}, "unknown option 'deepinfer.pattern'; deepinfer has deepinfer.patterns"),
        ({"deepinfer.patterns": ["rmsnorm"]}, "unknown pattern 'rmsnorm'; there are fused_experts"),
        ({"deepinfer.disable": 3}, "deepinfer.disable must be a list of names or 'all', got 3"),
        ({"deepinfer.strict": "yes"}, "deepinfer.strict must be a bool, got 'yes'"),
        ({"deepinfer.expect": {"router": 1}}, "deepinfer.expect must map some of .* got {'router': 1}"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        settings.parse(options, {})


def test_option_that_nobody_knows():
    with pytest.raises(Exception, match="unknown option 'max_autotun': neither an option of Inductor nor one of ours"):
        torch.compile(lambda x: x + 1, backend="deepinfer", options={"max_autotun": True})(torch.ones(2))


def test_settings_from_options_and_environment():
    parsed, rest = settings.parse(
        {"deepinfer.patterns": ["moe", "rms_norm"], "deepinfer.disable": ["gemm"], "epilogue_fusion": False},
        {"DEEPINFER_DISABLE": "add_rms_norm, moe_router"},
    )
    assert parsed.patterns == ("moe_router", "rms_norm")
    assert parsed.disable == ("add_rms_norm", "fused_experts", "moe_router", "shared_expert", "widened_gemm")
    assert rest == {"epilogue_fusion": False}
    assert settings.parse({}, {"DEEPINFER_DISABLE": "all"})[0].disable == tuple(sorted(inductor.patterns.NAMES))
    assert settings.parse(None, {}) == (settings.Settings(), {})


def softmax_router(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = torch.topk(torch.softmax(logits.float(), -1), 2, dim=-1)
    return weights / weights.sum(-1, keepdim=True), ids


def test_disable_and_environment(monkeypatch):
    logits = torch.randn(5, 8)
    run = traced(softmax_router, options={"deepinfer.disable": ["moe_router"]})
    run(logits)
    assert swaps(run.report) == {} and run.report.patterns["moe_router"].declined == {"disabled by the user": 1}
    monkeypatch.setenv("DEEPINFER_DISABLE", "moe")
    run = traced(softmax_router)
    run(logits)
    assert swaps(run.report) == {} and run.report.patterns["moe_router"].matches == 1


def test_gates_by_device_and_rows(monkeypatch):
    def decide():
        run = traced(softmax_router)
        run(torch.randn(5, 8))
        return swaps(run.report), list(run.report.patterns["moe_router"].declined)

    monkeypatch.setitem(gates.GATES, ("moe_router", "cpu"), gates.Gate(True, reason="slower", max_rows=4))
    assert decide() == ({}, ["off on cpu for more than 4 rows: slower"])
    monkeypatch.setitem(gates.GATES, ("moe_router", "cpu"), gates.Gate(True, "3 x", max_rows=5))
    assert decide() == ({"moe_router": 1}, []) and "3 x on cpu" in gates.gain("moe_router")
    monkeypatch.setitem(gates.GATES, ("moe_router", "cpu"), gates.Gate(True, "3 x", reason="slower", min_rows=6))
    assert decide() == ({}, ["off on cpu for fewer than 6 rows: slower"])
    monkeypatch.setitem(gates.GATES, ("moe_router", "cpu"), gates.Gate(True, "3 x", min_rows=5))
    assert decide() == ({"moe_router": 1}, [])
    monkeypatch.delitem(gates.GATES, ("moe_router", "cpu"))
    assert decide() == ({}, ["off on cpu: not measured on cpu"])


def test_expect_and_strict():
    logits = torch.randn(5, 8)
    traced(softmax_router, options={"deepinfer.expect": {"moe_router": 1}})(logits)
    with pytest.raises(Exception, match="2 x moe_router expected, 1 swapped"):
        traced(softmax_router, options={"deepinfer.expect": {"moe_router": 2}})(logits)

    def clamped(logits):
        weights, ids = torch.topk(torch.softmax(logits, -1), 2, dim=-1)
        return weights / weights.sum(-1, keepdim=True).clamp_max(1.0), ids

    with pytest.raises(
        Exception, match=r"moe_router: the weights are divided by .* their sum.*test_inductor_backend.py"
    ):
        traced(clamped, options={"deepinfer.strict": True})(logits)


# -- torch.compile -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fresh_cache(tmp_path_factory):
    """Generated code of this module, compiled once."""
    folder = tmp_path_factory.mktemp("inductor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        yield folder


@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead", "max-autotune-no-cudagraphs"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_modes_and_dynamic_shapes(fresh_cache, mode, dynamic):
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(softmax_router, backend="deepinfer", mode=mode, dynamic=dynamic)
    for tokens in (5, 9):
        logits = torch.randn(tokens, 8)
        torch.testing.assert_close(compiled(logits), softmax_router(logits))
    assert swaps(inductor.report())["moe_router"] == counters["stats"]["unique_graphs"]


def test_mode_reaches_inductor(monkeypatch):
    seen = {}

    def compile_fx(gm, example_inputs, config_patches):
        seen.update(config_patches)
        return gm

    monkeypatch.setattr("torch_deepinfer.inductor.backend.compile_fx", compile_fx)
    torch._dynamo.reset()
    torch.compile(softmax_router, backend="deepinfer", mode="max-autotune")(torch.randn(3, 8))
    assert seen["max_autotune"] and seen["triton.cudagraphs"]
    torch._dynamo.reset()
    options = {"epilogue_fusion": False, "deepinfer.disable": "all"}
    torch.compile(softmax_router, backend="deepinfer", options=options)(torch.randn(3, 8))
    assert seen["epilogue_fusion"] is False
    assert not any(key.startswith("deepinfer") for key in seen)


def test_entry_point_without_import(fresh_cache):
    out = run_python(
        """
        import sys, torch
        assert "deepinfer" in torch._dynamo.list_backends()
        assert not any(name.startswith("torch_deepinfer") for name in sys.modules)
        def norm(x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        x = torch.randn(5, 8)
        compiled = torch.compile(norm, backend="deepinfer", options={"deepinfer.patterns": ["norm"]})
        assert torch.allclose(compiled(x), norm(x))
        from torch_deepinfer.inductor import report
        print(report().patterns["rms_norm"].swapped)
        """
    )
    assert out.strip() == "1"


def test_import_of_the_package_stays_light():
    out = run_python(
        """
        import sys, torch
        before = set(sys.modules)
        import torch_deepinfer
        print([name for name in set(sys.modules) - before if name.startswith(("torch._dynamo", "torch._inductor"))])
        """
    )
    assert out.strip() == "[]"


# -- floats and sizes with dynamic=True --------------------------------------------------------------------------------


def test_floats_of_a_module_stay_constant():
    norm, sizes = Norm(), (5, 9, 17)
    run = traced(norm, ALL, dynamic=True)
    with torch.no_grad():
        for tokens in sizes:
            x = torch.randn(2, 2, tokens, 32)
            for ours, eager in zip(run(*x), norm(*x), strict=True):
                torch.testing.assert_close(ours, eager)
        assert len(run.graphs) == 1 and swaps(run.report) == {"add_rms_norm": 1}
        norm.eps = 0.1
        for ours, eager in zip(run(*x), norm(*x), strict=True):
            torch.testing.assert_close(ours, eager)
    assert swaps(run.report) == {"add_rms_norm": 2}


EPS = 0.25


def test_defaults_globals_and_closures_are_constant():
    weight, shift = torch.randn(8), 0.5

    def norm(x, eps=0.1):
        def of(x, eps):
            return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))

        return of(x, eps), of(x, EPS), of(x, shift)

    run = traced(lambda x: norm(x), ALL, dynamic=True)
    x = torch.randn(3, 8)
    for ours, eager in zip(run(x), norm(x), strict=True):
        torch.testing.assert_close(ours, eager)
    assert swaps(run.report) == {"rms_norm": 3}


def test_floats_of_a_call_stay_dynamic():
    def norm(x, eps):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)

    run = traced(norm, ALL, dynamic=True)
    for eps in (0.1, 0.2, 0.3):
        x = torch.randn(3, 8)
        torch.testing.assert_close(run(x, eps), norm(x, eps))
    assert len(run.graphs) == 1
    [reason] = run.report.patterns["rms_norm"].missed
    assert reason.startswith("eps is not a constant (test_inductor_backend.py:")


# -- other people's passes, training -----------------------------------------------------------------------------------


class Recorder(CustomGraphPass):
    """Somebody else's pass."""

    def __init__(self, identity: str | None = "recorder") -> None:
        self.identity = identity
        self.runs = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.runs += 1

    def uuid(self) -> str | None:
        return self.identity


@pytest.mark.parametrize("how", ["option", "list", "config"])
@pytest.mark.parametrize("stage", ["joint_custom_pre_pass", "post_grad_custom_post_pass"])
def test_passes_of_the_user_run_too(fresh_cache, how, stage):
    theirs = Recorder(f"{how} {stage}")
    options = {**ALL}
    if how != "config":
        options[stage] = theirs if how == "option" else [theirs]
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad(), torch._inductor.config.patch({stage: theirs} if how == "config" else {}):
        torch.compile(Norm(), backend="deepinfer", options=options)(*torch.randn(2, 3, 32))
    assert theirs.runs == 1 and swaps(inductor.report()) == {"add_rms_norm": 1}


def test_one_pass_for_older_torch(monkeypatch):
    monkeypatch.delattr("torch._inductor.custom_graph_pass.get_custom_graph_passes", raising=False)
    ours, theirs = SwapPass(settings.Settings(), Rewrites()), Recorder()
    assert compose(ours, None) is ours
    chain = compose(ours, theirs)
    assert isinstance(chain, Chain) and chain.uuid() == (ours.uuid(), "recorder")
    chain(torch.fx.Graph())
    assert theirs.runs == 1
    # What nobody can identify must not be cached, as without us.
    assert compose(ours, Recorder(None)).uuid() is None and compose(ours, lambda graph: None).uuid() is None


def test_training_is_left_alone():
    norm = Norm()
    x, residual = torch.randn(2, 4, 32, requires_grad=True), torch.randn(2, 4, 32)
    run = traced(norm, ALL)
    out, total = run(x, residual)
    (out.sum() + total.sum()).backward()
    grad, x.grad = x.grad, None
    out, total = norm(x, residual)
    (out.sum() + total.sum()).backward()
    torch.testing.assert_close(grad, x.grad)
    assert run.report.patterns == {} and not run.report.ops


# -- caches ------------------------------------------------------------------------------------------------------------

CACHED = """
    import json, os, torch
    from torch._dynamo.utils import counters
    from torch_deepinfer import inductor

    def block(x, residual, weight, router):
        total = residual + x
        normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
        weights, ids = torch.topk(torch.softmax(normed @ router, -1), 2, dim=-1)
        return total, weights, ids

    def compile_and_count(options=None, **environ):
        os.environ.pop("DEEPINFER_DISABLE", None)
        os.environ.update(environ)
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        arguments = torch.randn(4, 32), torch.randn(4, 32), torch.randn(32), torch.randn(32, 8)
        compiled = torch.compile(block, backend="deepinfer", options=options)
        for ours, eager in zip(compiled(*arguments), block(*arguments), strict=True):
            torch.testing.assert_close(ours, eager)
        found = {}
        for kind, prefix in (("inductor", "fxgraph_cache_"), ("aot_autograd", "autograd_cache_")):
            for event in ("hit", "miss", "bypass"):
                found[prefix + event] = counters[kind][prefix + event]
        return found, str(inductor.report())
"""


def caches(code: str, folder: object) -> list[Any]:
    """What ``code`` prints as JSON, after the definitions above, in a process of its own."""
    return json.loads(run_python(textwrap.dedent(CACHED) + textwrap.dedent(code), TORCHINDUCTOR_CACHE_DIR=str(folder)))


def test_caches(tmp_path):
    """The same choices hit, another choice misses, nothing is ever kept out, and a report survives a hit."""
    results = caches(
        """
        print(json.dumps([
            compile_and_count({"deepinfer.patterns": "all"}),
            compile_and_count({"deepinfer.patterns": "all"}),
            compile_and_count({"deepinfer.patterns": ["norm"]}),
            compile_and_count({"deepinfer.patterns": "all"}, DEEPINFER_DISABLE="moe_router"),
        ]))
        """,
        tmp_path,
    )
    again = caches("""print(json.dumps([compile_and_count({"deepinfer.patterns": "all"})]))""", tmp_path)
    hit = {"fxgraph_cache_hit": 1, "autograd_cache_hit": 1}
    miss = {"fxgraph_cache_miss": 1, "autograd_cache_miss": 1}
    happened = [{event: count for event, count in counts.items() if count} for counts, _ in (*results, *again)]
    assert happened == [miss, hit, miss, miss, hit]
    first, second, norm_alone, without_router, elsewhere = (report for _, report in (*results, *again))
    assert first == second == elsewhere and first != norm_alone != without_router
    assert re.search(r"moe_router +1 +1 ", first) and re.search(r"moe_router +1 +0 +1 x disabled", without_router)
