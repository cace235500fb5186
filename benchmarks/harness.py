"""What the benchmarks share: alternating timings, the memory floor, the environment, tables, JSON and charts.

A benchmark is a script with a list of cases::

    bench = Bench("norm", __doc__)
    for case in cases:
        bench.row({"shape": ..., "dtype": ...}, {"ours": f, "eager": g, "stock": torch.compile(g)}, bytes_moved=n)
    bench.finish()

The columns of a row are timed in turns inside one process and the ratio is the median of the rounds' own ratios, so
that a busy machine disturbs all columns alike; the ratio of the minima stands beside it as a check.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import device_times
import torch

RESULTS = Path(__file__).parent / "results"

Function = Callable[[], Any]


@dataclass
class Timing:
    """Seconds of one call, one sample a round."""

    samples: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def minimum(self) -> float:
        return min(self.samples)

    @property
    def spread(self) -> float:
        """The range that holds the middle half of the samples, relative to the median."""
        low, _, high = statistics.quantiles(self.samples, n=4)
        return (high - low) / self.median


def ratio(slow: Timing, fast: Timing) -> float:
    """How many times faster ``fast`` is: the median over the rounds of both."""
    return statistics.median(a / b for a, b in zip(slow.samples, fast.samples, strict=True))


def compare(functions: dict[str, Function], rounds: int = 15, device: str = "cpu") -> dict[str, Timing]:
    """Times the functions in turns, after a warm-up that also compiles."""
    with torch.no_grad():
        take = device_times.sampler(functions) if device == "cuda" else _cpu_sampler(functions)
        names = list(functions)
        turns = [names[i % len(names) :] + names[: i % len(names)] for i in range(rounds)]
        taken = take([name for turn in turns for name in turn])
    samples: dict[str, list[float]] = {name: [] for name in names}
    for name, sample in zip((name for turn in turns for name in turn), taken, strict=True):
        samples[name].append(sample)
    return {name: Timing(s) for name, s in samples.items()}


def _cpu_sampler(functions: dict[str, Function]) -> Callable[[list[str]], list[float]]:
    """A sample lasts a few milliseconds at least."""
    calls = {name: _calls_per_sample(f) for name, f in functions.items()}
    return lambda names: [_sample_cpu(functions[name], calls[name]) for name in names]


def _calls_per_sample(function: Function, seconds: float = 4e-3) -> int:
    for _ in range(3):
        function()
    return max(1, min(1000, int(seconds / _sample_cpu(function, 2))))


def _sample_cpu(function: Function, calls: int) -> float:
    """Elapsed time; the thread's own time with one thread, which other processes hardly disturb."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    for _ in range(calls):
        function()
    return (clock() - start) / calls


@cache
def bandwidth(device: str = "cpu") -> float:
    """Bytes a second of a large copy, read plus written: the best of ten.

    On a GPU by a kernel, as the ops are: the copy engines, which a captured ``copy_`` runs on, are slower.
    """
    a = torch.ones(1 << (28 if device == "cuda" else 26), dtype=torch.float32, device=device)
    b = torch.empty_like(a)
    copy = partial(torch.abs, a, out=b) if device == "cuda" else partial(b.copy_, a)
    return 2 * a.nbytes / compare({"copy": copy}, 10, device)["copy"].minimum


def floor_seconds(bytes_moved: int, device: str = "cpu") -> float:
    """The least time that moving these bytes to or from memory takes."""
    return bytes_moved / bandwidth(device)


def environment(device: str = "cpu") -> dict[str, Any]:
    """What a figure depends on: processor, threads, torch; the GPU and its driver."""
    info: dict[str, Any] = {
        "cpu": _cpu_model(),
        "isa": os.environ.get("DEEPINFER_CPU_ISA", "best"),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device == "cuda":
        info["gpu"] = torch.cuda.get_device_name()
        info["cuda"] = torch.version.cuda
        with contextlib.suppress(OSError):
            info["driver"] = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    return info


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def write_json(name: str, rows: list[dict[str, Any]], device: str = "cpu") -> Path:
    """Writes benchmarks/results/<name>-<device>.json with the environment beside the rows."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{device}.json"
    path.write_text(json.dumps({"name": name, "environment": environment(device), "rows": rows}, indent=1) + "\n")
    return path


def write_plot(name: str, rows: list[dict[str, Any]], baseline: str, device: str = "cpu") -> Path:
    """Writes a bar chart of the ratios to benchmarks/results/<name>-<device>.png."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.3 * len(rows)), layout="constrained")
    labels = [", ".join(str(v) for v in row["case"].values()) for row in rows]
    axes.barh(labels, [row["ratio"] for row in rows])
    axes.axvline(1, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel(f"times faster than {baseline}")
    axes.set_title(f"{name} on {environment(device).get('gpu', _cpu_model())}")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{device}.png"
    figure.savefig(path, dpi=150)
    return path


class Bench:
    """The rows of one benchmark: timed, printed as they come, saved at the end.

    Arguments of every benchmark: --device, --rounds, --threads, --filter PATTERN (only cases that match), --json,
    --plot. A script adds its own to ``parser`` before it reads ``args``.
    """

    def __init__(self, name: str, description: str | None, baseline: str = "stock") -> None:
        self.name, self.baseline = name, baseline
        self.rows: list[dict[str, Any]] = []
        self._header: list[str] = []
        self.parser = argparse.ArgumentParser(description=description)
        self.parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
        self.parser.add_argument("--rounds", type=int, default=15, help="samples of each column (default 15)")
        self.parser.add_argument("--threads", type=int, help="CPU threads (default: torch's own choice)")
        self.parser.add_argument("--filter", default="", metavar="PATTERN", help="only cases like tokens=16")
        self.parser.add_argument("--json", action="store_true", help="save the rows to benchmarks/results")
        self.parser.add_argument("--plot", action="store_true", help="save a chart to benchmarks/results (matplotlib)")

    @property
    def args(self) -> argparse.Namespace:
        if not hasattr(self, "_args"):
            self._args = self.parser.parse_args()
            if self._args.threads:
                torch.set_num_threads(self._args.threads)
        return self._args

    def wanted(self, case: dict[str, Any]) -> bool:
        """Whether --filter lets the case through: ask before building expensive inputs."""
        return re.search(self.args.filter, " ".join(f"{k}={v} {v}" for k, v in case.items())) is not None

    def row(self, case: dict[str, Any], functions: dict[str, Function], bytes_moved: int | None = None) -> None:
        """Times one case; the ratio is the baseline column over the first one."""
        if not self.wanted(case):
            return
        if not any(isinstance(function, device_times.Replay) for function in functions.values()):
            torch._dynamo.reset()  # every case compiles for its own shapes
        self.record(case, compare(functions, self.args.rounds, self.args.device), bytes_moved)

    def record(self, case: dict[str, Any], timings: dict[str, Timing], bytes_moved: int | None = None) -> None:
        """Adds a row of what has been timed, and prints it."""
        ours = next(iter(timings.values()))
        row: dict[str, Any] = {
            "case": case,
            "seconds": {name: t.median for name, t in timings.items()},
            "minimum": {name: t.minimum for name, t in timings.items()},
            "spread": {name: t.spread for name, t in timings.items()},
            "ratio": ratio(timings[self.baseline], ours),
            "ratio_of_minima": timings[self.baseline].minimum / ours.minimum,
        }
        if bytes_moved is not None:
            row["floor"] = floor_seconds(bytes_moved, self.args.device)
        self.rows.append(row)
        self._print(row)

    def _print(self, row: dict[str, Any]) -> None:
        cells = {name: str(value) for name, value in row["case"].items()}
        for name, seconds in row["seconds"].items():
            cells[f"{name} us"] = f"{seconds * 1e6:.1f} ±{row['spread'][name] * 50:.0f}%"
        cells["floor us"] = f"{row['floor'] * 1e6:.1f}" if "floor" in row else ""
        cells[f"x {self.baseline}"] = f"{row['ratio']:.2f}"
        cells["x min"] = f"{row['ratio_of_minima']:.2f}"
        widths = [40 if name == "shape" else 24 if name in row["case"] else 15 for name in cells]
        if list(cells) != self._header:
            self._header = list(cells)
            print("".join(name.ljust(width) for name, width in zip(cells, widths, strict=True)))
        print("".join(cell.ljust(width) for cell, width in zip(cells.values(), widths, strict=True)), flush=True)

    def finish(self) -> None:
        """Prints the environment and writes what --json and --plot ask for."""
        print(", ".join(f"{key} {value}" for key, value in environment(self.args.device).items()))
        if self.args.json:
            print("saved", write_json(self.name, self.rows, self.args.device))
        if self.args.plot:
            print("saved", write_plot(self.name, self.rows, self.baseline, self.args.device))
