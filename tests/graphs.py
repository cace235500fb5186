"""Compiles with the backend up to code generation, and interprets the graphs instead: exact and quick."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._functorch import config as functorch_config

from torch_deepinfer.inductor.backend import compile_graph
from torch_deepinfer.inductor.report import Report, read, to_counter
from torch_deepinfer.inductor.rewrite import Rewrites


@dataclasses.dataclass
class Traced:
    """A function compiled without code generation.

    ``graphs`` holds what Inductor would have lowered, ``inputs`` what these graphs were called with.
    """

    call: Callable[..., Any]
    graphs: list[torch.fx.Graph]
    inputs: list[tuple[Any, ...]]
    counter: Counter[str]

    @property
    def report(self) -> Report:
        return read(self.counter)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with functorch_config.patch(enable_autograd_cache=False):
            return self.call(*args, **kwargs)


def traced(function: Callable[..., Any], options: dict[str, Any] | None = None, dynamic: bool | None = None) -> Traced:
    """``torch.compile(function, backend="deepinfer")`` that stops before Inductor generates code."""
    counter: Counter[str] = Counter()
    graphs: list[torch.fx.Graph] = []
    inputs: list[tuple[Any, ...]] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        done = Rewrites()

        def interpret(gm: torch.fx.GraphModule, example_inputs: Any, **_: Any) -> Any:
            counter.update(to_counter(done, gm.graph))
            done.clear()
            graphs.append(gm.graph)

            def call(*args: Any) -> Any:
                inputs.append(args)
                return gm.forward(*args)

            return make_boxed_func(call)

        return compile_graph(gm, example_inputs, done, options=options, inner_compile=interpret)

    torch._dynamo.reset()
    return Traced(torch.compile(function, backend=backend, dynamic=dynamic), graphs, inputs, counter)


def swaps(report: Report) -> dict[str, int]:
    """How often each pattern was swapped."""
    return {name: entry.swapped for name, entry in report.patterns.items() if entry.swapped}
