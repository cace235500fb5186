"""Times on a GPU: from the start of a call's first kernel to the end of its last, by the profiler.

Events around a call would add some microseconds, as much as a small kernel takes. Each call finds a cold L2 cache: a
kernel in front of it fills the cache with something else. A call is replayed from a CUDA graph if it can be captured,
so that kernels follow each other as they do in a server, and not as fast as Python launches them.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

CALLS = 3  # of one sample, which is their median
FLUSH = "frac"  # in the name of a kernel that no benchmark has


def sampler(functions: dict[str, Callable[[], Any]]) -> Callable[[list[str]], list[float]]:
    """What takes the next samples of the named functions, in that order, in seconds."""
    replays = {name: captured(function) for name, function in functions.items()}

    def take(names: list[str]) -> list[float]:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for name in names:
                for _ in range(CALLS):
                    _flush_l2()
                    replays[name]()
            torch.cuda.synchronize()
        spans = _spans(profiler)
        if len(spans) != CALLS * len(names):
            raise RuntimeError(f"the profiler saw {len(spans)} calls of {CALLS * len(names)}")
        return [sorted(spans[i : i + CALLS])[CALLS // 2] for i in range(0, len(spans), CALLS)]

    return take


def _spans(profiler: profile) -> list[float]:
    """Seconds of each call: of what ran between a flush and the next."""
    kernels = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    kernels.sort(key=lambda event: event.time_range.start)
    spans: list[float] = []
    start = None
    for kernel in kernels:
        if FLUSH in kernel.name:
            spans.append(0.0)
            start = None
        elif spans:
            start = kernel.time_range.start if start is None else start
            spans[-1] = (kernel.time_range.end - start) * 1e-6
    return spans


class Replay:
    """A call, captured with everything that it needs."""

    def __init__(self, graph: torch.cuda.CUDAGraph, function: Callable[[], Any]) -> None:
        self.graph, self.function = graph, function

    def __call__(self) -> None:
        self.graph.replay()


def captured(function: Callable[[], Any]) -> Callable[[], Any]:
    """A replay of the function, or itself if it cannot be captured, or is a replay."""
    if isinstance(function, Replay):
        return function
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            function()
    except RuntimeError:
        torch.cuda.synchronize()
        return function
    return Replay(graph, function)


@cache
def _scratch() -> torch.Tensor:
    size = torch.cuda.get_device_properties(0).L2_cache_size
    return torch.empty(max(size, 1 << 24), dtype=torch.float32, device="cuda")


def _flush_l2() -> None:
    _scratch().frac_()
