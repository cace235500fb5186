"""A look at what the backend would do with a model, in seconds: no code is generated."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._functorch import config as functorch_config
from torch.fx import GraphModule

from torch_deepinfer.inductor.backend import compile_graph
from torch_deepinfer.inductor.report import Report, read, to_counter
from torch_deepinfer.inductor.rewrite import Rewrites


def explain(
    model: Callable[..., Any],
    /,
    *args: Any,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    **kwargs: Any,
) -> Report:
    """Traces ``model(*args, **kwargs)`` for inference; prints and returns what would be swapped, and why the rest not.

    ``options`` and ``dynamic`` are those of ``torch.compile``. Like ``torch._dynamo.explain`` it forgets everything
    that Dynamo compiled before.
    """
    counted: Counter[str] = Counter()

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        done = Rewrites()

        def count_and_interpret(gm: GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
            counted.update(to_counter(done, gm.graph))
            done.clear()
            return make_boxed_func(gm.forward)

        return compile_graph(gm, example_inputs, done, options=options, inner_compile=count_and_interpret)

    torch._dynamo.reset()
    try:
        with torch.no_grad(), functorch_config.patch(enable_autograd_cache=False):
            torch.compile(model, backend=backend, dynamic=dynamic)(*args, **kwargs)
    finally:
        torch._dynamo.reset()
    found = read(counted)
    found.advice = list(_advice(model))
    print(found)
    return found


def _advice(model: Any) -> Iterator[str]:
    """What the user could choose so that more is found."""
    for module in model.modules() if isinstance(model, torch.nn.Module) else ():
        config = getattr(module, "config", None)
        if hasattr(module, "_apply_gate") and getattr(config, "_experts_implementation", None) == "eager":
            yield (
                "the experts run one after another in Python, which breaks the graph in pieces: "
                "model.set_experts_implementation('grouped_mm')"
            )
            return
