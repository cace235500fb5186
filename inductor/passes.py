"""The two Inductor passes: one swaps ops in, one writes down what is in the final graph."""

import functools
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

import torch_deepinfer
from torch_deepinfer import jit
from torch_deepinfer.inductor.report import to_counter
from torch_deepinfer.inductor.rewrite import Rewrites, rewrite
from torch_deepinfer.inductor.settings import Settings


class SwapPass(CustomGraphPass):
    """Runs at the joint stage, where routers and softmax still have their shape."""

    def __init__(self, settings: Settings, done: Rewrites) -> None:
        self.settings = settings
        self.done = done

    def __call__(self, graph: Graph) -> None:
        self.done.update(rewrite(graph, self.settings))

    def uuid(self) -> str:
        return identity(self.settings)


class CountPass(CustomGraphPass):
    """Runs after the joint stage and writes the report into Inductor's counters.

    Inductor stores what its counters gained during a compile with the cached graph and replays it on a hit, when no
    pass runs. Only passes of the post-grad stage are inside of that window.
    """

    def __init__(self, settings: Settings, done: Rewrites) -> None:
        self.settings = settings
        self.done = done

    def __call__(self, graph: Graph) -> None:
        for key, count in to_counter(self.done, graph).items():
            counters["inductor"][key] += count
        self.done.clear()

    def uuid(self) -> str:
        return identity(self.settings)


class Chain(CustomGraphPass):
    """Several passes as one, for versions of torch whose configuration takes a single pass."""

    def __init__(self, *passes: Any) -> None:
        self.passes = passes

    def __call__(self, graph: Graph) -> None:
        for each in self.passes:
            each(graph)

    def uuid(self) -> tuple[Any, ...] | None:
        ids = tuple(each.uuid() if isinstance(each, CustomGraphPass) else None for each in self.passes)
        return ids if all(ids) else None  # None: Inductor does not cache graphs that such a pass went over


def compose(ours: CustomGraphPass, theirs: Any) -> Any:
    """The value of a pass option that runs our pass and then whatever the user had there."""
    if theirs is None:
        return ours
    theirs = list(theirs) if isinstance(theirs, (list, tuple)) else [theirs]
    takes_lists = hasattr(custom_graph_pass, "get_custom_graph_passes")
    return [ours, *theirs] if takes_lists else Chain(ours, *theirs)


def identity(settings: Settings) -> str:
    """What a compiled graph depends on besides the graph: our code, the settings, torch and the machine."""
    return f"{_code_digest()}-{torch.__version__}-{_machine()}-{settings}"


@functools.cache
def _code_digest() -> str:
    package = Path(torch_deepinfer.__file__).parent
    files = sorted([*package.rglob("*.py"), *(package / "inductor").rglob("*.py"), *package.glob("*.so")])
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


@functools.cache
def _machine() -> str:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return f"{torch.backends.cpu.get_cpu_capability()}-{gpu}-{jit.available()}"
