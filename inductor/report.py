"""What was swapped and what was not, and why.

The numbers travel in Inductor's own counters, under keys of text. Inductor stores them with a compiled graph and
replays them when the graph comes out of its cache, so a report is right in a process in which no pass ever ran.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping

import torch
from torch._dynamo.utils import counters
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch.fx import Graph

from torch_deepinfer.inductor import gates
from torch_deepinfer.inductor.patterns import NAMES
from torch_deepinfer.inductor.rewrite import Rewrites

_PREFIX, _SEPARATOR = "deepinfer", "|"


@dataclasses.dataclass
class PatternReport:
    """One pattern. ``declined`` and ``missed`` map a reason to how often it applied."""

    name: str
    swapped: int = 0
    declined: Counter[str] = dataclasses.field(default_factory=Counter)
    missed: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def matches(self) -> int:
        """How often the graphs hold the pattern, swapped or not."""
        return self.swapped + self.declined.total()


@dataclasses.dataclass
class Report:
    """What ``backend="deepinfer"`` did. ``print(report)`` shows a table.

    ``ops`` counts the calls of our ops in the compiled graphs, those that a model makes by itself included. ``advice``
    says what :func:`explain` knows to make more of it.
    """

    patterns: dict[str, PatternReport] = dataclasses.field(default_factory=dict)
    ops: Counter[str] = dataclasses.field(default_factory=Counter)
    graphs: int = 0
    graph_breaks: int = 0
    advice: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([self._table(), *self.advice])

    def _table(self) -> str:
        breaks = f", {self.graph_breaks} graph breaks" if self.graph_breaks else ""
        title = f"deepinfer: {self.graphs} compiled graph{'s' * (self.graphs != 1)}{breaks}"
        found = [self.patterns[name] for name in NAMES if name in self.patterns]
        if not found:
            return f"{title}; no known pattern in it"
        rows = [
            ("pattern", "matches", "swapped", "expected gain, or why not"),
            *(row for each in found for row in _rows(each)),
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(
            [title, *(f"{a:{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip() for a, b, c, d in rows)]
        )


def _rows(entry: PatternReport) -> list[tuple[str, str, str, str]]:
    """The lines of the table for one pattern: the counts, then one line for each reason."""
    notes = [gates.gain(entry.name)] if entry.swapped else []
    notes += [f"{count} x {reason}" for reason, count in entry.declined.items()]
    notes += [f"{count} x nearly: {reason}" for reason, count in entry.missed.items()]
    counts = (entry.name, str(entry.matches), str(entry.swapped))
    return [(*(counts if index == 0 else ("", "", "")), note) for index, note in enumerate(notes)]


def report() -> Report:
    """What the compiles of this process did so far, also those that were answered by Inductor's cache.

    The count starts again after ``torch._dynamo.utils.counters.clear()``.
    """
    return read(counters["inductor"])


def read(counter: Mapping[str, int]) -> Report:
    """The report that :func:`to_counter` wrote into ``counter``."""
    found = Report()
    for key, count in counter.items():
        prefix, *fields = key.split(_SEPARATOR, 3)
        if prefix == _PREFIX:
            _add(found, count, *fields)
    return found


def _add(found: Report, count: int, kind: str, name: str = "", reason: str = "") -> None:
    if kind == "graphs":
        found.graphs += count
    elif kind == "op":
        found.ops[name] += count
    else:
        entry = found.patterns.setdefault(name, PatternReport(name))
        if kind == "swapped":
            entry.swapped += count
        else:
            getattr(entry, kind)[reason] += count


def to_counter(done: Rewrites, graph: Graph) -> Counter[str]:
    """What :func:`report` reads back: the rewrites of a graph, and the calls of our ops in it."""
    keys: Counter[str] = Counter({_key("graphs"): 1})
    keys.update({_key("swapped", name): count for name, count in done.swapped.items()})
    keys.update({_key("declined", *pair): count for pair, count in done.declined.items()})
    keys.update({_key("missed", *pair): count for pair, count in done.missed.items()})
    for node in graph.nodes:
        # The first argument of the wrapper around an op that writes arguments is the op.
        target = node.args[0] if node.target is auto_functionalized_v2 else node.target
        if isinstance(target, torch._ops.OpOverload) and target.namespace == "deepinfer":
            keys[_key("op", target._opname)] += 1
    return keys


def _key(*fields: str) -> str:
    return _SEPARATOR.join((_PREFIX, *fields))
